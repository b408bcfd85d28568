"""Work of recorded and captured operators, by rules in tables, and their prices by Roller."""
