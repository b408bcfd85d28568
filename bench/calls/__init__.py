"""Operators of the suites as PyTorch calls, for rivals on a GPU and on this machine's cores."""
