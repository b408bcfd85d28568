"""Roller: rTiles, alignment rules, construction and the compile pipeline (thesis chapter 6)."""
