"""The chief's own page: curves in bounded memory, JSON and events over HTTP, static files."""
