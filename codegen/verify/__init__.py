"""Proof by running: CUDA text emulated by g++, OpenCL twins, shared objects on this processor."""
