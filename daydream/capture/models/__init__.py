"""Models built without weights: from a Python file, by a name of timm, from a configuration of transformers."""
