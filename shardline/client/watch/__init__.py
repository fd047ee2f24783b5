"""Looks at what the user's code does to the model while it is trained."""
