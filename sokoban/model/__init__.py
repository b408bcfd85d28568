"""How long a kernel takes: RATIONAL (thesis 5.3)."""
