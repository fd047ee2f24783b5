"""What the chief knows about the job, one file per subject."""
