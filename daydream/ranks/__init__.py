"""Many ranks' recordings joined: collectives paired, clocks aligned, waiting told from transfer, one graph of all."""
