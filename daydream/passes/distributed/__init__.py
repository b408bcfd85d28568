"""Passes to many ranks: gradients exchanged by buckets, priority, compression or levels, and parameters in shards."""
