"""Daydream on recorded traces and on captured architectures: speed, prices against recorded times, what is answered."""
