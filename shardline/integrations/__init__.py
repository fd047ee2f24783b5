"""Doors for training loops of other libraries: each module needs its library, and nothing in Shardline imports one."""
