"""How long a kernel takes: RATIONAL (thesis 5.3), and bounds that hold for every schedule."""
