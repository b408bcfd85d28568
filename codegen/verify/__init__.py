"""Proof by running: twins on OpenCL, CUDA text on the CPU, libraries on this processor."""
