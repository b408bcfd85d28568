"""Machine code taken apart and held against what RATIONAL assumed of it."""
