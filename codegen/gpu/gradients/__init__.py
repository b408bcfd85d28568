"""Gradients of attention, as texts: blocks keep rows of one side and walk those of the other."""
