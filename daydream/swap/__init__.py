"""Recorded calls replaced by compiled kernels: the plan, and the model with them in it."""
