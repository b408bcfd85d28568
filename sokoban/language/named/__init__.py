"""The operators with a name, by the word that names each in JSON (``{"op": "matmul", ...}``).

Each is shorthand: it writes the text of the expression language that says the same.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping

from sokoban.language.named.attention import Attention
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.named.base import tag_of
from sokoban.language.named.products import BatchMatMul, MatMul
from sokoban.language.named.scatter import ScatterAdd
from sokoban.language.named.shapes import Elementwise, LayerNorm, Reduce, ScanOperator, Softmax, TopK, Transpose
from sokoban.language.named.windows import AvgPool2d, Conv2d, DepthwiseConv2d, MaxPool2d

NamedOperator = (
    MatMul | BatchMatMul | Conv2d | DepthwiseConv2d | AvgPool2d | MaxPool2d
    | Reduce | ScanOperator | TopK | ScatterAdd | Elementwise | Softmax | LayerNorm | Transpose
    | Attention | AttentionGradient
)  # fmt: skip

NAMED_OPERATORS: Mapping[str, type[NamedOperator]] = {tag_of(cls): cls for cls in typing.get_args(NamedOperator)}

__all__ = ["NAMED_OPERATORS", "NamedOperator"]
