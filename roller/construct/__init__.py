"""rTiles grown into candidate programs by the alignment rules (thesis 6.3)."""
