"""Daydream on recorded traces: speed, and prices beside recorded times."""
