"""One kernel in canonical form, and what follows from it alone:
normalisation, matrix roles, data tiles, patch transforms."""
