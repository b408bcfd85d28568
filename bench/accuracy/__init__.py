"""What RATIONAL predicts against what others measured: ``python -m bench.accuracy`` prints the tables."""
