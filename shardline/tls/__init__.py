"""The TLS files of a process: read, checked, and read again once they have changed."""
