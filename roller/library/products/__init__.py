"""Products of matrices by cuBLAS: its kernels in float32 and on Tensor Cores, which it takes, and their time."""
