"""Operators to bundles, in parallel processes."""
