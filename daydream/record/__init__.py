"""Recordings made."""
