"""A captured model as a serving engine runs it: products of several layers in one, and kernels by tokens of a batch.

One capture of a prompt of :data:`TOKENS` tokens serves every batch: a size that this prime divides counts tokens.
Engines multiply layers that read the same tensor at once (query, key and value; gate and up), run layers of experts and
latent attention by kernels of their own, divide what lies between a first and a second product among tensor ranks, and
sum the results (Shoeybi et al. 2019, section 3). All else are kernels as TorchInductor fuses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daydream.operators.attention import attention_sides, is_attention, window_of
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.plan.experts import GROUPED, SHARED
from daydream.trace.trace import NONE
from hal.support.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from daydream.capture.captured import Capture, CapturedOperator
    from daydream.capture.pytorch.step import Subject
    from daydream.plan.units import Units

#: Tokens of the capture: a prime that divides no size of a model.
TOKENS = 1009

#: Products of linear layers, by the place of their weights.
_LINEAR = {"aten::mm": 1, "aten::addmm": 2}

#: Last names of the layers of latent attention (DeepSeek-AI 2024, section 2.1): from a token to the latent vector, from
#: there to keys and values, and from a token to the latent vector of queries.
_TO_LATENT, _FROM_LATENT, _TO_QUERY = "kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj"


class Product(NamedTuple):
    """Linear layers that read the same tensor.

    Attributes:
        n: columns.
        k: elements of a token that each sums.
        divided: which of both tensor ranks divide, ``n`` or ``k``; empty for none.
        narrow: whether it belongs to a repeated block, whose layers a precision makes narrow.
    """

    n: int
    k: int
    divided: str
    narrow: bool


class Attention(NamedTuple):
    """Attention to a cache of keys and values; ``window`` is 0 where a query sees all of it."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int


class Latent(NamedTuple):
    """A module of latent attention, products included, by the sizes of ``latent_attention``."""

    heads: int
    hidden: int
    query_rank: int
    latent: int
    rope: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Elements of its weights."""
        queries = self.heads * (self.key_dim + self.rope)
        read = self.query_rank * (self.hidden + queries) if self.query_rank else self.hidden * queries
        cached = self.hidden * (self.latent + self.rope)
        return (
            read + cached + self.heads * (self.latent * (self.key_dim + self.value_dim) + self.value_dim * self.hidden)
        )


class Experts(NamedTuple):
    """A layer of routed experts."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


#: The one kernel by which engines choose experts, a pass over its tensors as those that Inductor makes.
ROUTING = "inductor::topk_softmax"


class Loop(NamedTuple):
    """Any other operator; ``divided`` where tensor ranks have a part of its elements each."""

    name: str
    inputs: Inputs
    outputs: tuple[RecordedTensor, ...]
    divided: bool


class Sum(NamedTuple):
    """Elements of a token that tensor ranks sum up."""

    elements: int


Part = Product | Attention | Latent | Experts | Loop | Sum


@dataclass(frozen=True, eq=False)
class ServedModel:
    """Parts of a model.

    Attributes:
        units: the capture.
        body: parts that run for every token, with how often each does.
        head: those that run for the last token of a sequence alone.
        dtype: of what is not narrow, ``bfloat16`` or ``float16``.
        last: parts of the last block.
        elements: parameters.
    """

    units: Units
    body: Mapping[Part, int]
    head: Mapping[Part, int]
    dtype: str
    last: Mapping[Part, int]
    elements: float

    @property
    def title(self) -> str:
        """Name of the model as the user wrote it."""
        return self.units.capture.title

    @property
    def attentions(self) -> Mapping[Attention | Latent, int]:
        """Attention of either kind, with how often it runs."""
        return {part: count for part, count in self.body.items() if isinstance(part, Attention | Latent)}

    @cached_property
    def live_bytes(self) -> float:
        """Bytes of activations of a token at the peak of the body."""
        capture, last = self.units.capture, int(self.units.captured[-1])
        live = peak = 0
        for operator, unit in zip(capture.operators, self.units.unit.tolist(), strict=True):
            made, freed = (
                sum(capture.storages[each].bytes for each in storages if capture.storages[each].kind == "step")
                for storages in (operator.made, operator.freed)
            )
            live += made
            peak = max(peak, live if unit != last else 0)
            live -= freed
        return peak / TOKENS

    @cached_property
    def has_experts(self) -> bool:
        """True if some layers choose among experts."""
        return any(isinstance(part, Experts) for part in self.body)

    def draft_head(self) -> ServedModel:
        """A block like the last one that drafts from hidden vectors, behind a product that joins these to a token's
        embedding, and with the model's own logits: EAGLE's head (Li et al. 2024, section 4.1), or
        DeepSeek-V3's module of multi-token prediction (2024, section 2.2).
        """
        hidden = next(part.k for part in self.head if isinstance(part, Product))
        join = Product(hidden, 2 * hidden, "", narrow=False)
        elements = float(self.units.elements[-2]) + join.n * join.k
        return replace(self, body={join: 1, **self.last}, elements=elements)

    def weight_bytes(self, ranks: int, narrow_bytes: float, expert_ranks: int = 0) -> float:
        """Bytes of a board's parameters where narrow layers take so many for an element."""
        narrow = undivided = experts = 0.0
        for part, count in (*self.body.items(), *self.head.items()):
            if isinstance(part, Product) and part.narrow and part.divided:
                narrow += part.n * part.k * count
            elif isinstance(part, Product) and not part.divided:
                undivided += part.n * part.k * count
            elif isinstance(part, Experts):
                experts += 3.0 * part.experts * part.hidden * part.intermediate * count
            elif isinstance(part, Latent):
                narrow += part.elements * count
        # Of layers that a capture does not tell apart from others the parameters are the last word.
        wide = max(self.elements - narrow - experts - undivided, 0.0)
        routed = experts * narrow_bytes / (expert_ranks or ranks)
        return (narrow * narrow_bytes + 2 * wide) / ranks + routed + 2 * undivided

    def active_elements(self, tokens: int) -> float:
        """Elements of weights that a step of so many tokens reads, experts as often as an even choice hits them."""
        total = 0.0
        for part, count in (*self.body.items(), *self.head.items()):
            if isinstance(part, Product):
                total += part.n * part.k * count
            elif isinstance(part, Latent):
                total += part.elements * count
            elif isinstance(part, Experts):
                hit = part.experts * (1 - (1 - part.top_k / part.experts) ** tokens)
                total += 3.0 * hit * part.hidden * part.intermediate * count
        return total

    def cache_elements(self, ranks: int) -> float:
        """Elements of keys and values that a board keeps of a token."""
        return float(sum(
            count * (
                part.latent + part.rope if isinstance(part, Latent)
                else -(-part.kv_heads // ranks) * (part.head_dim + part.value_dim)
            )
            for part, count in self.attentions.items()
        ))  # fmt: skip


def served_model(
    model: str | Callable[[], Subject], *, class_name: str | None = None, dtype: str = "bfloat16"
) -> ServedModel:
    """The parts of a model, from its code.

    Args:
        model: as ``daydream predict`` names it, or what builds it.
        class_name: of a model of transformers.
        dtype: of parameters, ``bfloat16`` or ``float16``.

    Raises:
        InputError: the model cannot be built or captured, or repeats no block with attention.
    """
    from daydream.capture.options import CaptureOptions
    from daydream.capture.stored import StoredStep, known_or_captured
    from daydream.plan.source import planned_units
    from daydream.plan.units import units_of

    options = CaptureOptions(batch=1, sequence=TOKENS, class_name=class_name, mode="inference", dtype=dtype)

    def compiled() -> StoredStep:
        from daydream.capture.fusion.inductor import fused

        eager = planned_units(model, options)
        return StoredStep(fused(eager.capture), len(eager.blocks))

    step = known_or_captured(model, (options, "served"), compiled)
    units = units_of(step.capture, step.blocks)
    counts = np.bincount(units.captured).tolist()
    body: Counter[Part] = Counter()
    head: Counter[Part] = Counter()
    last: Counter[Part] = Counter()
    for unit, count in enumerate(counts):
        operators = [units.capture.operators[row] for row in np.flatnonzero(units.unit == unit)]
        is_head = unit == len(counts) - 1
        parts = list(_parts(units.capture, operators, is_block=0 < unit < len(counts) - 1))
        for part in parts:
            (head if is_head else body)[part] += count
        if unit == units.captured[-2]:
            last = Counter(parts)
    served = ServedModel(units, body, head, dtype, last, float(units.elements.sum()))
    if not served.attentions:
        raise InputError(units.capture.title, "repeats no block with attention", "serve a decoder of transformers")
    return served


def _parts(capture: Capture, operators: Sequence[CapturedOperator], *, is_block: bool) -> Iterator[Part]:
    """Parts of a captured unit, in order."""
    paths = [capture.modules[each.module].path if each.module != NONE else "" for each in operators]
    modules = _modules(operators, paths)
    owners = [next((each for each in modules if path == each or path.startswith(f"{each}.")), "") for path in paths]
    products = _products(capture, operators, paths, owners, modules, is_block=is_block)
    inside = False
    for place, (owner, operator) in enumerate(zip(owners, operators, strict=True)):
        if place in products:
            yield from products[place]
            inside = any(isinstance(each, Product) and each.divided == "n" for each in products[place])
        elif owner:
            part = modules.pop(owner, None)
            if part is not None:
                yield part
            if isinstance(part, Experts | Latent):
                yield Sum(part.hidden)
        elif operator.name in _LINEAR or not operator.launches:
            continue
        elif is_attention(operator.name):
            yield _attention(operator)
        else:
            yield Loop(operator.name, operator.inputs, operator.outputs, divided=inside and is_block)
            if "embedding" in operator.name:
                yield Sum(operator.outputs[0].dims[-1])


def _modules(operators: Sequence[CapturedOperator], paths: Sequence[str]) -> dict[str, Part]:
    """Modules that engines run by kernels of their own, and what these are."""
    modules: dict[str, Part] = {}
    for path, operator in zip(paths, operators, strict=True):
        if operator.name == GROUPED and path not in modules:
            grouped = [each for each, where in zip(operators, paths, strict=True)
                       if each.name == GROUPED and where == path]  # fmt: skip
            up, down = (_dims(each, 1) for each in (grouped[0], grouped[-1]))
            rows = _dims(grouped[0], 0)[0]
            modules[path] = Experts(up[1], down[1], up[0], max(rows // TOKENS, 1))
        elif operator.name == "aten::topk":
            modules.setdefault(path, Loop(ROUTING, operator.inputs, operator.outputs, divided=False))
        elif is_attention(operator.name) and f"{path}.{_FROM_LATENT}" in paths:
            modules[path] = _latent(path, operator, operators, paths)
    return modules


def _dims(operator: CapturedOperator, place: int) -> tuple[int, ...]:
    tensor = operator.inputs.tensor(place)
    assert tensor is not None  # products have operands
    return tensor.dims


def _products(
    capture: Capture, operators: Sequence[CapturedOperator], paths: Sequence[str], owners: Sequence[str],
    modules: Mapping[str, Part], *, is_block: bool,
) -> dict[int, list[Part]]:  # fmt: skip
    """Products by the place of the first of their layers, each with what is summed behind it."""
    routers = {owner for owner, part in modules.items() if isinstance(part, Loop)}
    places = [place for place, each in enumerate(operators) if each.name in _LINEAR]
    places = [place for place in places if not owners[place] or owners[place] in routers]
    groups = [list(group) for _, group in groupby(places, key=lambda place: _activations(capture, operators[place]))]
    divided = [group for group in groups if owners[group[0]] not in routers]
    # Those of a block come in pairs of a first and a second half, or are divided in no way.
    sides = (
        ["nk"[place % 2] for place in range(len(divided))]
        if len(divided) % 2 == 0
        else ["" if is_block else "n"] * len(divided)
    )
    side_of = {group[0]: side for group, side in zip(divided, sides, strict=True)}
    products: dict[int, list[Part]] = {}
    for group in groups:
        weights = [_dims(operators[place], _LINEAR[operators[place].name]) for place in group]
        side = side_of.get(group[0], "")
        n = sum(each[1] for each in weights)
        products[group[0]] = [Product(n, weights[0][0], side, is_block and bool(side))]
        if side == "k" and SHARED not in paths[group[0]]:
            products[group[0]].append(Sum(n))
    return products


def _activations(capture: Capture, operator: CapturedOperator) -> int:
    """Storage of what a linear layer reads."""
    read = [each for each in operator.read if capture.storages[each].kind != "parameter"]
    return read[0] if read else NONE


def _attention(operator: CapturedOperator) -> Attention:
    sides = attention_sides(operator.name, operator.inputs)
    assert sides is not None  # captured tensors have sizes
    return Attention(
        sides.heads, sides.kv_heads, sides.width, sides.value_width, window_of(operator.name, operator.inputs)
    )


def _latent(
    path: str, attention: CapturedOperator, operators: Sequence[CapturedOperator], paths: Sequence[str]
) -> Latent:
    weights = {
        where.removeprefix(f"{path}."): _dims(each, _LINEAR[each.name])
        for each, where in zip(operators, paths, strict=True) if each.name in _LINEAR
    }  # fmt: skip
    sides = attention_sides(attention.name, attention.inputs)
    assert sides is not None  # captured tensors have sizes
    hidden, cached = weights[_TO_LATENT]
    latent = weights[_FROM_LATENT][0]
    rope = cached - latent
    query_rank = weights.get(_TO_QUERY, (0, 0))[1]
    return Latent(sides.heads, hidden, query_rank, latent, rope, sides.width - rope, sides.value_width)


def scaled_loop(part: Loop, tokens: int) -> tuple[str, Inputs, tuple[RecordedTensor, ...]]:
    """The operator for another number of tokens."""

    def of_tokens(tensor: RecordedTensor) -> RecordedTensor:
        sizes = (tuple(each // TOKENS * tokens if each and each % TOKENS == 0 else each for each in sides)
                 for sides in (tensor.dims, tensor.strides))  # fmt: skip
        return RecordedTensor(next(sizes), tensor.dtype, next(sizes))

    inputs = part.inputs
    tensors = tuple(None if each is None else of_tokens(each) for each in inputs.tensors)
    lists = tuple(tuple(map(of_tokens, members)) for members in inputs.lists)
    return part.name, Inputs(tensors, inputs.values, lists), tuple(map(of_tokens, part.outputs))
