"""A recording as columns, and Kineto files read into it."""
