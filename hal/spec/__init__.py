"""A device as a value: its parts, its numbers by key path, the checks, the file."""
