"""What is computed: expressions, their text and JSON, named operators, the NumPy reference."""
