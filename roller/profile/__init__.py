"""Bundles measured: benches, their processes, clusters, ranking of manifests."""
