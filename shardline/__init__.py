"""Shardline: a parameter server for PyTorch.

job = shardline.Job(...)            # a job file for `shardline train JOB.py`; Job(codec=shardline.Bf16())
session = shardline.connect()       # or three lines in your own training script
"""

import os
import sys

import lazy_loader

# Before anything imports grpc, which reads it then: its fork handlers abort children of a busy process, and no child of
# a task uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
"""From __init__.pyi, on first use: importing torch takes seconds, and `shardline --help` doesn't need it."""

if "multiprocessing.spawn" in sys.modules:
    # A child of a task, such as a worker of a DataLoader, gets objects of the job file's classes.
    from shardline.host.python_file import find_files

    find_files()
