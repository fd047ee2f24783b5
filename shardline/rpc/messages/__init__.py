"""Converts values to protobuf messages and back; everything from the network is checked here."""
