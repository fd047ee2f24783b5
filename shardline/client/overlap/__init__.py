"""Forward passes that begin before all parameters have arrived, and wait layer by layer."""
