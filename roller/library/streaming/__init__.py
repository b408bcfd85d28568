"""Kernels of PyTorch and cuDNN that stream their tensors: element by element, row by row, pools and reductions."""
