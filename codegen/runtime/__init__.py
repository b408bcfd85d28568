"""Bundles loaded and launched, with the standard library, NumPy, CuPy and PyTorch alone."""
