"""Schedules to GPU kernels: the choice of a lowering, and the lowerings that stage nothing."""
