"""Serving: what a model's layers take for a mix of tokens, and requests scheduled onto boards."""
