"""The commands of ``daydream`` that fill a file of their own, and what commands share."""
