"""Passes that change what a step holds: accumulation, recomputation, encoding, and memory on the host."""
