"""Kernels of layers with a state for each sequence: gated delta networks and Mamba-2, their convolutions and rules."""
