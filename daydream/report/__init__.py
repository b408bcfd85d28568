"""Reports of a simulated timeline: breakdowns, tables, HTML, Chrome trace."""
