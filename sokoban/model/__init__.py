"""Time of a kernel: RATIONAL (thesis 5.3)."""
