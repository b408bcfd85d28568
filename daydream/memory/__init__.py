"""Bytes instead of seconds: allocations of a step or recording, the allocator that serves them, and whose they are."""
