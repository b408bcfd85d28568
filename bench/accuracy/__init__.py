"""RATIONAL's predictions against measurements of others: ``python -m bench.accuracy`` prints the tables."""
