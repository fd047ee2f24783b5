"""Codecs that write every number in fewer bits."""
