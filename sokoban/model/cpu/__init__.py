"""RATIONAL where lanes are elements of vectors: traffic by reuse distance, instructions, and stages."""
