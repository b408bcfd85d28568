"""Recordings made: a training step under the profiler, a model's gradients and module names."""
