"""`shardline run`: one command for every role, started by Slurm, torchrun, Kubernetes, Open MPI or ssh."""
