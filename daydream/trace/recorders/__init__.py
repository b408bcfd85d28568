"""Recordings of other profilers than PyTorch's, as events of the same kinds."""
