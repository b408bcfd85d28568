"""Trace to graph."""
