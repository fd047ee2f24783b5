"""Lane cuda: gradients and parameters stay on a GPU that worker and server share."""
