"""Attention kernels: text written here, not by TVM, around the device functions of the matrix kernels."""
