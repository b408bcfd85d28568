"""Attention kernels of libraries: tiles, constants and time of FlashAttention and its successors."""
