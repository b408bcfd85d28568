"""Who computes the same, timed in turns: spreads, checks against a reference, files of results."""
