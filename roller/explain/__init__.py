"""Programs told in words and pictures."""
