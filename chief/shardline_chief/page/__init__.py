"""The chief's own page: curves with bounded memory, JSON and events over HTTP, static files."""
