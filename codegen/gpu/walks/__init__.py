"""Kernels whose blocks keep a tile and walk others, as texts: attention, its gradients, pairs of products."""
