"""The passes over tensors in C, where the library was built: see native/ and docs/decisions/0020.

`kernels` is for tensors and imports torch; `library` says which level is in use.
"""
