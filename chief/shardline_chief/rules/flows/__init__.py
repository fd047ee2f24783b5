"""What the chief decides, one file per course of events: start, recovery, takeover, ending and so on."""
