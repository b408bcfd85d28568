"""The task graph: columns and edges, edits (thesis 4.4.4), simulation (algorithm 1)."""
