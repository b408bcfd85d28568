"""Tensor Cores: wmma, mma.sync, wgmma."""
