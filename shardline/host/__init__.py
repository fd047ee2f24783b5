"""What this machine gives: files, ports, memory, processes."""
