"""Many ranks' recordings joined: collectives paired, clocks aligned, waiting separated from transfer, one graph of
all."""
