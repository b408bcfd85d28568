"""Time of construction, ranking and compilation on the machine at hand."""
