"""The folder that a compilation leaves: its records, the manifest written and read, the reference kernel."""
