"""RTiles grown to candidate programs (thesis 6.3)."""
