"""Attention as texts of its own, in CUDA and OpenCL C, by ``mma.sync``, by ``wgmma`` or by multiply-adds."""
