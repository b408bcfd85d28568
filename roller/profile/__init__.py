"""Bundles measured: timing on GPU or CPU, the processes and clusters that do it, manifests ranked anew."""
