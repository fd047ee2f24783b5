"""Lane shm: tensor bytes lie in memory that both tasks of one host map."""
