"""Standbys: the primary that sends records, and the second holder that applies them."""
