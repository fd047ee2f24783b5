"""The evaluator: scores each checkpoint with the job's `evaluate`."""
