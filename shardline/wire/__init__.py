"""Frames of tensor bytes, written and read without protobuf's copies."""
