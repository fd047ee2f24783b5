"""The API of a training script: connect(), the session and its loops."""
