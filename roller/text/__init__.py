"""Quantities and schedules as people read them."""
