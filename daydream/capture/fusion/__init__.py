"""Fusion of a captured step as TorchInductor would do it."""
