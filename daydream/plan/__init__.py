"""A training step of many boards from a plan: how a captured model is divided among them, and what that takes."""
