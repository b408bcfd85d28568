"""Proof by running: OpenCL twins, CUDA text emulated by g++, shared objects on this processor."""
