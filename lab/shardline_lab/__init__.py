"""The laboratory: what a job would do on a cluster, what plain PyTorch does with it, and what a network can carry."""
