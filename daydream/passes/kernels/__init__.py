"""Passes that change kernels: precision, fusion, substitution, and launches put together."""
