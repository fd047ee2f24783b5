"""Standbys: the primary sends records, and the standby applies them."""
