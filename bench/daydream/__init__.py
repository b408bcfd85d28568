"""Daydream on recorded traces: speed, and prices against recorded times."""
