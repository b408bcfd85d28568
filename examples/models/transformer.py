"""A model of one's own for ``daydream predict transformer.py:network``: a function that returns it with inputs."""

import torch
from torch import nn


def network(batch: int = 32, sequence: int = 512) -> dict[str, object]:
    """Two layers of a transformer that names the class of a text."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, activation="gelu", batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.Embedding(32000, 512), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(512 * sequence, 10)
    )
    labels = torch.empty(batch, dtype=torch.long)
    return {
        "model": model,
        "inputs": torch.empty(batch, sequence, dtype=torch.long),
        "loss": lambda result: nn.functional.cross_entropy(result, labels),
        "optimizer": "adamw",
        "batch": batch,
    }
