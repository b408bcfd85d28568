"""What every package stands on: the error of bad input, files that appear whole, names imported on first use."""
