"""How long construction, ranking and compilation take on the machine at hand."""
