"""One kernel in canonical form, and what follows from it alone: matrix roles, data tiles, patch transforms."""
