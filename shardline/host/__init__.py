"""Resources of this machine: files, ports, memory, processes."""
