"""Tile schedules to GPU kernels: the choice of a lowering, and the plain lowerings."""
