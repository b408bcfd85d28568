"""A recording as columns, and the Kineto files that it is read from."""
