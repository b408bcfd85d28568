"""A simulated timeline told: breakdowns, tables, HTML, Chrome trace."""
