"""How: one candidate, many as columns, files of them, and what a schedule means.

Accesses, rows, windows, pipelines, tiles in vector registers. Of sokoban, only this and what lies below is known to
code generation.
"""
