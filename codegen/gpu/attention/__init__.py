"""Attention as texts of its own, in CUDA and OpenCL C, by ``mma.sync`` or by multiply-adds."""
