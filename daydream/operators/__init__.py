"""What recorded operators compute, and what Roller says they take."""
