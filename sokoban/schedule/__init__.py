"""Tilings of a kernel: one schedule, many as columns, files of them, and what a schedule means."""
