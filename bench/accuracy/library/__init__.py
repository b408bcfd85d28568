"""Calls of vendor libraries against measured ones, also on other boards than those recorded."""
