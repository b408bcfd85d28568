"""A recording as columns, and the files of profilers that it is read from."""
