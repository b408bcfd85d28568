"""Daydream: what-if questions on real training traces (thesis chapter 4 and appendix A)."""
