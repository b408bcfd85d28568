"""The task graph: columns, edits, simulation."""
