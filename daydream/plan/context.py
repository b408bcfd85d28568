"""A sample's tokens shared by ranks: what each computes of attention, and what they exchange for it.

All operators but attention work on a rank's tokens alone. Of a causal mask every rank gets two pieces, one from either
end of the sample, so that all see equally many pairs (zig-zag; Brandon et al. 2023, "Striped Attention"; Transformer
Engine's load balancing). Ways to get at keys and values of other ranks:

* ``ring`` (Liu et al. 2023): they go around, a step's while the one before is computed; of every step but the first,
  half of the pairs are seen, and its result is added to those before. Backward their gradients go around, too.
* ``all-gather``: they are gathered first, and their gradients are summed up and scattered behind (Llama 3's report,
  section 3.3.2).
* ``ulysses`` (Jacobs et al. 2023): an exchange of everything with everyone gives each rank all tokens of some heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from daydream.operators.attention import Sides, attention_sides, is_attention, resized
from daydream.operators.calls import KernelPrice, OperatorPrice
from daydream.operators.inputs import Inputs
from daydream.trace.dtypes import element_bytes
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.capture.captured import CapturedOperator
    from daydream.plan.layout import Layout

#: Prices an operator with other arguments.
Priced = Callable[["CapturedOperator", Inputs], OperatorPrice]
#: Seconds of a collective among the ranks of the context direction.
Exchanged = Callable[[str, float], float]

#: Bytes per element of a step's result that is added to those before: the result and the sum are read, the sum written,
#: sums of float32 (Transformer Engine's ``flash_attn_fwd_out_correction``).
_SUM_BYTES = 10


class Shared(NamedTuple):
    """Attention of a rank that shares a sample with others: its kernels and what they exchange.

    Attributes:
        kernels: of attention, with those that add up results.
        exposed: seconds of exchanges that no kernel hides.
    """

    kernels: tuple[KernelPrice, ...]
    exposed: float


def share_attention(
    prices: list[OperatorPrice], operators: Sequence[CapturedOperator], layout: Layout, priced: Priced,
    exchanged: Exchanged, dram: float,
) -> None:  # fmt: skip
    """Puts what ranks of the context direction compute of attention, and exchange for it, into prices.

    Args:
        prices: of the operators, captured on a rank's tokens; those of attention are replaced.
        operators: of the step.
        layout: of the ranks.
        priced: prices an operator with other arguments.
        exchanged: seconds of a collective among the ranks, or of a ``send`` to the next one.
        dram: bytes per second of the board's memory.

    Raises:
        InputError: attention is written out, or its heads cannot be shared.
    """
    if layout.context == 1:
        return
    rows = [row for row, each in enumerate(operators) if is_attention(each.name)]
    if not rows:
        raise InputError("--context", "the model's attention is no fused operator", "choose --attention flash2")
    for row in rows:
        operator = operators[row]
        sides = attention_sides(operator.name, operator.inputs)
        if sides is None:
            raise InputError("--context", f"sizes of {operator.name} are not known", "leave --context out")
        alone = prices[row]
        shared = _WAYS[layout.exchange_context](operator, sides, alone, layout.context, priced, exchanged, dram)
        kernel = KernelPrice(f"context {layout.exchange_context}", shared.exposed, "links", "collectives")
        work = alone.work
        if work is not None:
            # Pairs within a rank's own tokens, times the ranks: as many as it sees in all.
            work = replace(work, flops=work.flops * layout.context)
        prices[row] = OperatorPrice(
            kernels=(*shared.kernels, kernel), work=work, flops=alone.flops * layout.context
        )  # fmt: skip


def _ring(
    operator: CapturedOperator, sides: Sides, alone: OperatorPrice, ranks: int, priced: Priced, exchanged: Exchanged,
    dram: float,
) -> Shared:  # fmt: skip
    keys = sides.keys // 2 if sides.causal else sides.keys
    step = priced(operator, resized(operator.name, operator.inputs, keys=keys, causal=False))
    outputs = sides.b * sides.heads * sides.queries * sides.value_width
    adding = KernelPrice("sum of results", outputs * _SUM_BYTES / dram, "dram", "streams")
    size = _keys_bytes(operator, sides) * (2 if sides.backward else 1)
    wait = max(exchanged("send", size) - step.seconds - adding.seconds, 0.0)
    return Shared((*alone.kernels, *(*step.kernels, adding) * (ranks - 1)), wait * (ranks - 1))


def _gathered(
    operator: CapturedOperator, sides: Sides, alone: OperatorPrice, ranks: int, priced: Priced, exchanged: Exchanged,
    _: float,
) -> Shared:  # fmt: skip
    del alone
    # Two pieces of the sample, one early and one late: together they see what two in the middle see.
    keys = sides.keys * ranks
    queries = max(sides.queries // 2, 1) if sides.causal else sides.queries
    piece = priced(
        operator,
        resized(
            operator.name, operator.inputs, queries=queries, keys=keys // 2 if sides.causal else keys, causal=False
        ),
    )
    size = _keys_bytes(operator, sides) * ranks
    seconds = exchanged("all_gather", size) + (exchanged("reduce_scatter", size) if sides.backward else 0.0)
    return Shared(piece.kernels * (2 if sides.causal else 1), seconds)


def _ulysses(
    operator: CapturedOperator, sides: Sides, alone: OperatorPrice, ranks: int, priced: Priced, exchanged: Exchanged,
    _: float,
) -> Shared:  # fmt: skip
    del alone
    if sides.heads % ranks:
        raise InputError(
            "--context", f"{ranks} ranks do not divide {sides.heads} heads", "choose --context-exchange ring"
        )
    full = priced(
        operator,
        resized(operator.name, operator.inputs, queries=sides.queries * ranks, keys=sides.keys * ranks, parts=ranks),
    )
    own = float(sides.b * sides.heads * sides.queries * sides.value_width * _element(operator))
    # Queries, keys and values go one way and results the other; backward the gradients of all of them, too.
    sizes = (own + _keys_bytes(operator, sides), own)
    return Shared(full.kernels, sum(exchanged("alltoall", size) for size in sizes))


_WAYS = {"ring": _ring, "all-gather": _gathered, "ulysses": _ulysses}


def _element(operator: CapturedOperator) -> int:
    return element_bytes(next(each.dtype for each in operator.inputs.tensors if each is not None))


def _keys_bytes(operator: CapturedOperator, sides: Sides) -> float:
    """Bytes of a rank's own keys and values."""
    elements = sides.b * sides.kv_heads * sides.keys * (sides.width + sides.value_width)
    return float(elements * _element(operator))


def gathered_bytes(operator: CapturedOperator, layout: Layout) -> int:
    """Bytes that an attention operator holds besides its arguments: keys and values of other ranks."""
    sides = attention_sides(operator.name, operator.inputs) if is_attention(operator.name) else None
    if layout.context == 1 or sides is None:
        return 0
    # A ring has those under way and those that are used.
    copies = (
        2 if layout.exchange_context == "ring" else layout.context if layout.exchange_context == "all-gather" else 1
    )
    return int(_keys_bytes(operator, sides)) * copies * (2 if sides.backward else 1)
