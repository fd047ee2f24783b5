"""The server half of push and pull, for any service that hosts parameters."""
