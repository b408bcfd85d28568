"""Ground of every package: the error of bad input, files that appear whole, names imported on first use."""
