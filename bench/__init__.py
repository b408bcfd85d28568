"""Suites of operators and the measurements made on them."""
