"""How long: RATIONAL."""
