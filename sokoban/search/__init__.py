"""Which schedule is best: all tiles enumerated and screened, then padding and bands tried (thesis 5.4)."""
