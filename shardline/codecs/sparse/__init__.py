"""Codecs that send few of the numbers, and keep the rest for later."""
