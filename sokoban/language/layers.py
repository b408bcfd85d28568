"""Layers as JSON data that are several kernels of a library: products with scales, products of groups, experts, states.

What they compute is a product, how they compute it (quantisation, permutation, a tile a group) is the library's, and it
is that which takes the time. Grouped products of 16 bits, and products of eight bits with scales of blocks once their
activations are quantised, grouped or not, are a tensor expression, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from hal.support.errors import InputError, listed
from sokoban.language.latent_layer import LatentAttention
from sokoban.language.state_layers import DeltaNet, Mamba2

#: Numbers with a scale for so many elements of a row of activations, and for a square block of weights.
EIGHT_BITS_IN_BLOCKS, BLOCK = "fp8-block", 128

#: Numbers of products whose operands are both narrow, by the scales that they carry.
SCALED_PRECISIONS = ("fp8-tensorwise", "fp8-rowwise", EIGHT_BITS_IN_BLOCKS, "mxfp8", "nvfp4", "int8-rowwise")

#: Kernels of a scaled product: vLLM's, or those of Transformer Engine and torchao.
KERNELS = ("serving", "training")

#: Numbers that nothing narrows.
SIXTEEN_BITS = "bfloat16"

#: Numbers of layers of experts: 16 bits, both operands narrow, or the weights alone.
EXPERT_PRECISIONS = (
    SIXTEEN_BITS, "fp8-tensorwise", "fp8-block", "nvfp4", "mxfp4-mxfp8", "int4-weights", "mxfp4-weights",
)  # fmt: skip

#: A power law of tokens over experts: its exponent stands behind the name.
_POWER_LAW = re.compile(r"power_law_(\d+(\.\d+)?)(_in_order)?")

_LARGEST = 2**40

#: Rows of a tile of grouped products where none are given.
_TILE = 128


class ScaledMatmul(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A linear layer of 16-bit activations whose product runs on narrow numbers: y[m,n] = q(x)[m,k] w[n,k].

    Attributes:
        op: ``scaled_matmul``.
        m: rows of the activations, such as tokens.
        n: columns of the result.
        k: elements that each result sums.
        precision: one of :data:`SCALED_PRECISIONS`.
        kernels: whose, one of :data:`KERNELS`.
        name: a name of its own.
    """

    precisions: ClassVar[tuple[str, ...]] = SCALED_PRECISIONS

    op: str
    m: int
    n: int
    k: int
    precision: str = "fp8-rowwise"
    kernels: str = "serving"
    name: str | None = None

    @property
    def stem(self) -> str:
        """The name that it has without one of its own."""
        return f"scaled_matmul_{self.m}x{self.n}x{self.k}_{self.precision}"

    @property
    def counts(self) -> Mapping[str, int]:
        """Sizes that must be positive, by field."""
        return {"m": self.m, "n": self.n, "k": self.k}

    def check(self) -> None:
        """Raises InputError where fields contradict each other."""
        if self.kernels not in KERNELS:
            raise InputError("kernels", f"there are none of {self.kernels!r}", f"use one of {listed(KERNELS)}")


class GroupedMatmul(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Products of consecutive rows by the weights of their group: y[rows of g, n] = x[rows of g, k] w[g,n,k].

    Attributes:
        op: ``grouped_matmul``.
        n: columns of every result.
        k: elements that each result sums.
        sizes: rows of every group; or else
        m: rows of all groups together, and
        groups: how many there are, and
        distribution: ``uniform`` or ``power_law_1.2``: how many each has.
        precision: one of :data:`EXPERT_PRECISIONS`.
        tile: rows that those of a group are padded to a multiple of, in kernels of ours.
        name: a name of its own.
    """

    precisions: ClassVar[tuple[str, ...]] = EXPERT_PRECISIONS

    op: str
    n: int
    k: int
    sizes: tuple[int, ...] = ()
    m: int | None = None
    groups: int | None = None
    distribution: str = "uniform"
    precision: str = SIXTEEN_BITS
    tile: int = _TILE
    name: str | None = None

    @property
    def stem(self) -> str:
        """The name that it has without one of its own."""
        groups, rows = (len(self.sizes), sum(self.sizes)) if self.sizes else (self.groups, self.m)
        tile = f"_{self.tile}rows" * (self.tile != _TILE)
        return f"grouped_matmul_{rows}x{self.n}x{self.k}_{groups}groups_{self.precision}{tile}"

    @property
    def group_count(self) -> int:
        """Number of groups, empty ones too."""
        return len(self.sizes) or self.groups or 1

    @property
    def tiles(self) -> int:
        """Tiles of :attr:`tile` rows of one group each; of a power law as many as any groups of so many rows take.

        >>> GroupedMatmul(op="grouped_matmul", n=4, k=4, sizes=(0, 1, 130)).tiles
        3
        >>> GroupedMatmul(op="grouped_matmul", n=4, k=4, m=130, groups=3, distribution="power_law_1").tiles
        3
        """
        if self.sizes:
            return sum(-(-size // self.tile) for size in self.sizes)
        rows, groups = self.m or 1, self.groups or 1
        if self.distribution == "uniform":
            least, larger = divmod(rows, groups)
            return larger * -(-(least + 1) // self.tile) + (groups - larger) * -(-least // self.tile)
        return (rows + min(groups, rows) * (self.tile - 1)) // self.tile

    @property
    def counts(self) -> Mapping[str, int]:
        """Sizes that must be positive, by field."""
        return {"n": self.n, "k": self.k, "m": self.m or 1, "groups": self.groups or 1, "tile": self.tile}

    def check(self) -> None:
        """Raises InputError where fields contradict each other."""
        if self.sizes and (self.m is not None or self.groups is not None):
            raise InputError("sizes", "stand next to m and groups", "give the rows of every group, or their sum")
        if not self.sizes and (self.m is None or self.groups is None):
            raise InputError("sizes", "is missing", "give the rows of every group, or m and groups")
        if min(self.sizes, default=0) < 0 or (self.sizes and max(self.sizes) == 0):
            raise InputError("sizes", "got a negative one, or no rows", "write how many rows each group has")
        check_distribution(self.distribution)


class Experts(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A layer of gated experts on the busiest of the boards that share it, routing given.

    Attributes:
        op: ``experts``.
        tokens: that the layer is given.
        hidden: elements of a token.
        intermediate: of an expert, before tensor parallelism divides it.
        experts: on all boards together.
        top_k: experts of a token.
        tensor_parallel: boards that share each expert.
        expert_parallel: boards that the experts are divided among; each is given all ``tokens``.
        distribution: ``uniform`` (experts in turn), ``power_law_1.2``, or ``power_law_1.2_in_order``, whose few tokens
            meet on one board.
        precision: one of :data:`EXPERT_PRECISIONS`.
        name: a name of its own.
    """

    precisions: ClassVar[tuple[str, ...]] = EXPERT_PRECISIONS

    op: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tensor_parallel: int = 1
    expert_parallel: int = 1
    distribution: str = "uniform"
    precision: str = "bfloat16"
    name: str | None = None

    @property
    def stem(self) -> str:
        """The name that it has without one of its own."""
        parallel = f"_ep{self.expert_parallel}" * (self.expert_parallel > 1)
        parallel += f"_tp{self.tensor_parallel}" * (self.tensor_parallel > 1)
        sizes = f"{self.tokens}x{self.hidden}x{self.intermediate}_{self.top_k}of{self.experts}"
        return f"experts_{sizes}{parallel}_{self.precision}"

    @property
    def counts(self) -> Mapping[str, int]:
        """Sizes that must be positive, by field."""
        names = (
            "tokens", "hidden", "intermediate", "experts", "top_k", "tensor_parallel", "expert_parallel",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raises InputError where fields contradict each other."""
        if self.top_k > self.experts:
            raise InputError("top_k", f"got {self.top_k} of {self.experts} experts", "a token takes each once at most")
        if self.expert_parallel > self.experts:
            problem = f"got {self.expert_parallel} boards for {self.experts} experts"
            raise InputError("expert_parallel", problem, "every board keeps one expert at least")
        check_distribution(self.distribution)


Layer = ScaledMatmul | GroupedMatmul | Experts | DeltaNet | Mamba2 | LatentAttention

#: Layer by the word that names it in JSON.
LAYERS: Mapping[str, type[Layer]] = {
    "scaled_matmul": ScaledMatmul, "grouped_matmul": GroupedMatmul, "experts": Experts, "delta_net": DeltaNet,
    "mamba2": Mamba2, "latent_attention": LatentAttention,
}  # fmt: skip


def is_layer(data: object) -> bool:
    """True if an operator's JSON value is a layer's, right or wrong."""
    return isinstance(data, Mapping) and isinstance(data.get("op"), str) and data["op"] in LAYERS


def layer_from_data(data: Mapping[str, Any]) -> Layer:
    """The layer of a JSON object of which :func:`is_layer` is true.

    Raises:
        InputError: a key is missing, unknown or out of range.
    """
    kind = LAYERS[data["op"]]
    try:
        layer = msgspec.convert(dict(data), kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        field = path.strip("`.").split("[")[0]
        remedy = f"the keys of {data['op']} are {listed(kind.__struct_fields__)}"
        raise InputError(field, problem.replace("`", ""), remedy) from None
    for field, count in layer.counts.items():
        if not 1 <= count <= _LARGEST:
            raise InputError(field, f"got {count}, expected 1 or more", "write a size")
    if layer.precision not in kind.precisions:
        raise InputError("precision", f"there is no {layer.precision!r}", f"use one of {listed(kind.precisions)}")
    layer.check()
    return layer


def check_distribution(name: str) -> None:
    """Raises InputError unless a name is that of a distribution of tokens over experts."""
    if name != "uniform" and exponent(name) is None:
        raise InputError("distribution", f"there is no {name!r}", "use uniform, or power_law_1.2 with your exponent")


def exponent(distribution: str) -> float | None:
    """The exponent of a power law; None of any other distribution.

    >>> exponent("power_law_1.2"), exponent("uniform")
    (1.2, None)
    """
    match = _POWER_LAW.fullmatch(distribution)
    return float(match[1]) if match else None


def is_in_order(distribution: str) -> bool:
    """True if a power law gives what rounding leaves to experts in their order, not to the least busy.

    >>> is_in_order("power_law_1.2_in_order"), is_in_order("power_law_1.2")
    (True, False)
    """
    match = _POWER_LAW.fullmatch(distribution)
    return match is not None and match[3] is not None
