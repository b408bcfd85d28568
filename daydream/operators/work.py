"""Work of an operator as operators that Roller can price, with its arithmetic and the bytes it cannot avoid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: Pass of an operator. A convolution's gradients of its data and of its weights are two passes.
Direction = Literal["forward", "backward", "backward data", "backward weights"]

#: Kinds of work that multiply matrices, by matrix units where a board has any.
PRODUCT_KINDS = ("convolution", "matrix product", "attention")

#: Variant of batched products whose rows are those of groups (``_grouped_mm``).
GROUPED = "grouped"

#: What is supposed of grouped products.
EVEN = "tokens spread evenly over experts"

#: Kinds of models that price a kernel; ``bytes`` is the price of what has no model.
Model = Literal["products", "attention", "convolutions", "element-wise", "row-wise", "streams", "bytes", "collectives"]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A kernel of the library that streams tensors: what it moves and how much it computes.

    Attributes:
        kernel: its name.
        bytes: read and written, of every tensor by its own type; what is repeated counts once.
        outputs: elements written, which set the number of blocks.
        instructions: per output, besides loads and stores.
        integers: integer instructions per output, where places take many of them.
        launches: kernels that share all this evenly.
        model: the kind of model that this is.
        again: bytes that are read besides where the L2 cache does not keep what is repeated.
        between: bytes that pass between two reads of it, which the cache would have to hold.
        flops: arithmetic at the sustained rate of ``dtype``, where the kernel does more than stream.
        dtype: of the arithmetic.
        scattered: sectors of 32 bytes that are read where neighbours of the result lie apart in an operand.
        blocks: of a kernel that has few, such as one per channel; 0 for as many as there is work for.
        trips: round trips to memory that follow one another in each of ``blocks`` blocks of 512 threads.
        walk: rows, columns and further columns of a kernel of ``roller.library.streaming.row_kernels``, of elements of
            ``dtype``; rows, columns and values of each for ``topk``; empty for others.
        scan: the operator of a kernel of ``roller.library.streaming.scans``, whose ``walk`` is rows, columns and the
            elements after them; empty for others.
        is_cold: whether no launch finds in L2 what the one before moved: each takes other tensors.
    """

    kernel: str
    bytes: float
    outputs: float
    instructions: float = 3.0
    integers: float = 0.0
    launches: int = 1
    model: Model = "streams"
    again: float = 0.0
    between: float = 0.0
    flops: float = 0.0
    dtype: str = "float32"
    scattered: float = 0.0
    blocks: float = 0.0
    trips: float = 0.0
    walk: tuple[float, ...] = ()
    scan: str = ""
    is_cold: bool = False


@dataclass(frozen=True)
class WorkPart:
    """One of Roller's operators, and the direction to price it in.

    Attributes:
        data: the operator as in op.json; empty where Roller has none like it.
        direction: of its kernels.
        moved: the library's kernel, where the operator alone does not say what that moves.
        efficient: of attention: whether boards without FlashAttention run memory-efficient kernels for it.
        times: how often it runs, one after the other.
        channels_last: of convolutions: whether their tensors lie in NHWC.
        variant: the library's kernels where a job asks for them (:mod:`daydream.operators.variants`): a family of
            attention, or ``tfloat32``; ``rms`` for layer norms without a mean,
            ``grouped`` for batched products whose rows are those of groups.
        sizes: of convolutions over volumes, as the library's kernels walk them: those of ``roller.library.calls.KINDS``
            with every plane of a volume below the one before.
    """

    data: dict[str, Any]
    direction: Direction = "forward"
    moved: Moved | None = None
    efficient: bool = False
    times: int = 1
    channels_last: bool = False
    variant: str = ""
    sizes: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one call of an operator.

    Attributes:
        kind: ``convolution``, ``matrix product``, ``element-wise``...
        parts: Roller's operators or the library's kernels, run one after the other.
        flops: arithmetic operations, a multiply-add being two.
        bytes: of all tensors read and written, each once.
        dtype: element type.
        assumed: what had to be guessed, in words; empty where the trace says everything.
    """

    kind: str
    parts: tuple[WorkPart, ...]
    flops: float
    bytes: float
    dtype: str = "float32"
    assumed: str = field(default="", compare=False)

    @property
    def direction(self) -> Direction:
        """Direction of all parts; ``backward`` where they differ."""
        ways = {part.direction for part in self.parts}
        return ways.pop() if len(ways) == 1 else "backward"
