"""Layers of experts: who gets how many tokens, products of a group each, and the kernels around them."""
