"""Calls of vendor libraries against measured ones."""
