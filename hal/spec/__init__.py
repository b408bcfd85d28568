"""A device as a checked value: its records, its numbers by key path, and the text of a device file."""
