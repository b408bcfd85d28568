"""What operators of recordings and captures compute, by rules in tables, and what Roller says they take."""
