"""Lowering to Tensor Cores: wmma, mma.sync and wgmma."""
