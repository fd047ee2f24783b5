"""What the chief knows of the job, one file for each concern."""
