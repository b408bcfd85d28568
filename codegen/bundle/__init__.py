"""The folder that a compilation leaves: manifest, reader, operator read back, reference kernel."""
