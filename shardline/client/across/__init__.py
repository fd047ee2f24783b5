"""Workers of one host that share layers: they meet, compute steps together, and part when one is lost."""
