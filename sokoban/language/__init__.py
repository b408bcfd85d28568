"""Computations: tensor expressions, their text and JSON, and the float64 reference."""
