"""Findings that a first call has ready: compiled graphs, and libraries that this machine could load before."""
