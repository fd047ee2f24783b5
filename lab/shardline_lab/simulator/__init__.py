"""Simulations of a job: its own mode and rule classes under a virtual clock, with virtual workers and links."""
