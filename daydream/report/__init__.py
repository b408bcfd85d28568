"""A timeline told: breakdowns, tables, HTML, Chrome trace."""
