"""Gradients of attention as kernels see them: rows of a block's own, and rows of the other side that it walks.

The gradient of the queries has queries of its own and walks keys; that of keys and values has keys of its own and walks
the queries of all heads that share them. Either computes the logits and their gradients anew from tiles that it holds,
so that no table of them passes through memory, and no block adds to what another one writes: two runs agree to the bit.
Queries are numbered as :mod:`sokoban.kernel.attention` numbers rows. Where the kernel of keys writes the slopes of its
logits, that of queries is one product with keys (:class:`SlopeProduct`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.attention import GroupedHeads, seen_pairs
from sokoban.kernel.block_range import BlockRange
from sokoban.kernel.kernel import Kernel
from sokoban.language.expression import Tensor
from sokoban.language.named.attention_gradient import AttentionGradient

#: The inputs of a kernel in the order of its parameters, which is that of the operator's program, by their names there.
GRADIENT_INPUTS = ("Q", "K", "L", "dY", "V", "D")
#: The same of a product of slopes and keys.
SLOPE_INPUTS = ("dKVS", "K")


@dataclass(frozen=True, kw_only=True)
class AttentionGradientKernel(GroupedHeads, Kernel):
    """The gradient of attention after its queries, or after its keys and values.

    Attributes:
        name: of the operator.
        attention: its sizes, mask, scale, and what the gradient is of.
        inputs: the tensors that are :data:`GRADIENT_INPUTS`, in that order.
        output: dQ ``[b, heads, queries, head_dim]``, or dK and dV side by side, ``[b, kv_heads, keys, head_dim +
            value_dim]``, and slopes behind them where they are asked for.
    """

    name: str
    attention: AttentionGradient
    inputs: tuple[Tensor, ...]
    output: Tensor

    @property
    def is_of_keys(self) -> bool:
        """True if it is the gradient of keys and values."""
        return self.attention.of == "keys"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the kernel's parameters: those of the operator's program, whatever the tensors are called."""
        return (*GRADIENT_INPUTS, self.attention.output)

    @property
    def writes_slopes(self) -> bool:
        """True if the slopes of logits are a part of the result."""
        return self.attention.slopes

    @property
    def rows(self) -> int:
        """Rows of one problem that blocks have for their own."""
        return self.attention.key_count if self.is_of_keys else self.query_rows

    @property
    def walked_rows(self) -> int:
        """Rows of one problem that blocks walk."""
        return self.query_rows if self.is_of_keys else self.attention.key_count

    @property
    def sizes(self) -> Mapping[str, int]:
        """Elements along every axis."""
        attention = self.attention
        return {
            "problem": self.problems, "row": self.rows, "walked": self.walked_rows,
            "width": attention.head_dim + attention.value_size,
        }  # fmt: skip

    def statement_text(self) -> str:
        """Computation of the kernel, as text."""
        names = ", ".join(f"{tensor.name}{list(tensor.shape)}" for tensor in self.inputs)
        result = "dS^T Q and P^T dY side by side" if self.is_of_keys else "dS K"
        result += " with P (dY V^T - D) behind them" if self.writes_slopes else ""
        return (
            f"{self.output.name} = {result}, dS = P (dY V^T - D) * {self.scale:.4g}, "
            f"P = exp(Q K^T * {self.scale:.4g} - L), of {names}{self.mask_text}"
        )


@dataclass(frozen=True, kw_only=True)
class SlopeProduct(GroupedHeads, Kernel):
    """The gradient of attention's queries from the slopes of its logits: a product with keys, head by head.

    Attributes:
        name: of the operator.
        attention: its sizes, mask and scale.
        inputs: the tensors that are :data:`SLOPE_INPUTS`, in that order: ``[b, kv_heads, keys, head_dim + value_dim +
            heads / kv_heads * queries]`` and ``[b, kv_heads, keys, head_dim]``.
        output: dQ ``[b, heads, queries, head_dim]``.
    """

    name: str
    attention: AttentionGradient
    inputs: tuple[Tensor, ...]
    output: Tensor

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the kernel's parameters: those of the operator's program."""
        return (*SLOPE_INPUTS, "dQ")

    @property
    def problems(self) -> int:
        """Heads of queries of all sequences, each with a product of its own."""
        return self.attention.b * self.attention.heads

    @property
    def rows(self) -> int:
        """Queries of a head."""
        return self.attention.queries

    @property
    def block_range(self) -> BlockRange:
        """Range of keys that blocks walk, whose rows are queries of one head."""
        return replace(super().block_range, group=1)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Elements along every axis."""
        attention = self.attention
        return {
            "problem": self.problems, "row": self.rows, "walked": attention.key_count, "width": attention.head_dim
        }  # fmt: skip

    def statement_text(self) -> str:
        """Computation of the kernel, as text."""
        names = ", ".join(f"{tensor.name}{list(tensor.shape)}" for tensor in self.inputs)
        return f"{self.output.name} = S K * {self.scale:.4g}, S behind dK and dV, of {names}{self.mask_text}"


def gradient_flops(attention: AttentionGradient) -> float:
    """Operations of the products of one gradient: logits and their gradients are computed by both, but where one writes
    the slopes that the other one reads.

    >>> sizes = {"b": 1, "heads": 1, "queries": 4, "head_dim": 8}
    >>> [gradient_flops(AttentionGradient(**sizes, of=of)) / (2 * 16 * 8) for of in ("queries", "keys")]
    [3.0, 4.0]
    """
    depth, width = attention.head_dim, attention.value_size
    widths = 2 * (depth + width) if attention.of == "keys" else depth if attention.slopes else 2 * depth + width
    return 2.0 * attention.b * attention.heads * seen_pairs(attention) * widths


def unread_bytes(attention: AttentionGradient) -> int:
    """Bytes of the inputs of a gradient that none of its results depend on: of the tensor of keys dK, dV and the slopes
    of pairs that are not seen.

    >>> sizes = {"b": 1, "heads": 1, "queries": 4, "head_dim": 8, "causal": True, "dtype": "float16"}
    >>> unread_bytes(AttentionGradient(**sizes, of="queries", slopes=True)) == 2 * (4 * (8 + 8) + 6)
    True
    """
    if not attention.slopes or attention.of == "keys":
        return 0
    hidden = attention.heads * (attention.queries * attention.key_count - seen_pairs(attention))
    ends = attention.key_heads * attention.key_count * (attention.head_dim + attention.value_size)
    return attention.b * (hidden + ends) * DTYPE_BYTES[attention.dtype]
