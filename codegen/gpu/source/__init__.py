"""Lowered module to CUDA or OpenCL text, and text to cubin by NVRTC."""
