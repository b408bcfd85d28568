"""Programs told in words and pictures: how found, what sets the pace, which rivals lost."""
