"""The chief: admits tasks, hands out work, recovers from losses, writes checkpoints and logs."""
