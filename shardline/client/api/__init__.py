"""What a training script uses: connect(), the session and its loops."""
