"""Tiles with every operand in shared memory."""
