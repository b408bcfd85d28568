"""What every package stands on and no device is in:
InputError, files that appear whole, lazy faces, printing errors of commands."""
