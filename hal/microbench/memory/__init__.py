"""Memory of a GPU level by level: bandwidths, latencies, transactions, address translation, banks of shared memory."""
