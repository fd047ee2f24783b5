"""shardline check: a job's first steps in one plain PyTorch process and through servers, compared bit by bit."""
