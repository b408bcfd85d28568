"""Bundles run: standard library, NumPy, CuPy/PyTorch only."""
