"""Operators drawn over the whole grammar, run as kernels of every kind, and shrunk where one is wrong."""
