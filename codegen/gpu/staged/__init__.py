"""Lowering of tiles whose operands lie in shared memory."""
