"""Kernels whose blocks keep a tile and walk others, as texts: attention, pairs of products."""
