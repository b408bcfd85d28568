"""A model's step run on tensors without data, and every operator of it written down."""
