"""How a server measures its memory, and returns freed memory to the system."""
