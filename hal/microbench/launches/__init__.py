"""Launches: the time between kernels, between blocks, and that of a framework's call."""
