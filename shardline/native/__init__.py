"""The passes over tensors in C, where the library was built: see native/ and docs/decisions/0020."""

from shardline.native.kernels import cast, copy, fingerprint, magnitude, sgd_step, tree_sum
from shardline.native.library import describe

__all__ = ["cast", "copy", "describe", "fingerprint", "magnitude", "sgd_step", "tree_sum"]
