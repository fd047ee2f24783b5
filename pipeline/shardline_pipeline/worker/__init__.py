"""What a worker does that computes parts of a replica's step."""
