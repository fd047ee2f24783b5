"""Lane shm: tensor bytes are in memory that both tasks on one host map."""
