"""How a kernel is tiled: one schedule, many as columns, files of them, and what a schedule means."""
