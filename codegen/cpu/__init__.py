"""Tile schedules to shared libraries for processors."""
