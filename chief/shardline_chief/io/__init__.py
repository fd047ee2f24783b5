"""The chief's threads, calls and files: they carry out what the rules decide."""
