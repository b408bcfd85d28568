"""Bytes instead of seconds: allocations of a step, the allocator that serves them, and whose they are."""
