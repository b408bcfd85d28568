"""Convolutions by cuDNN: its algorithms in float32, its kernels on Tensor Cores, both gradients."""
