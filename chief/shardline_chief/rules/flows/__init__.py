"""What the chief decides, one file for each course of events: start, recovery, takeover, the end and so on."""
