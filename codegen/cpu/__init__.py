"""Schedules to shared objects for processors."""
