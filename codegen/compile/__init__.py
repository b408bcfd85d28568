"""One request to one finished kernel, in a worker process."""
