"""What is computed: tensor expressions, their text and JSON, and the float64 reference."""
