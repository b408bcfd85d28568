"""Lowered module to CUDA/OpenCL text to cubin."""
