"""Kernels of ours, of Ansor and of others whose tiles are known, against measurements and against libraries."""
