"""Which: all tiles, and what is tried on the best of them (padding, bands)."""
