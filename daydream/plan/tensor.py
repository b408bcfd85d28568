"""A model divided among tensor ranks before it is captured: what one of them computes, and what it exchanges.

Megatron's way (Shoeybi et al. 2019, section 3): of two linear layers in a row the first keeps a part of its outputs and
the second the same part of its inputs, so that one exchange behind the second, and one backward in front of the first,
is all there is. Which layers these are follows from the order in which a block calls them: those that read the same
tensor are one first half. Embedding and head are divided along the vocabulary, and the loss is of the logits' part.
With ``sequence`` ranks hold a part of the sequence each between the halves (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from math import ceil
from typing import Any

import torch

# Sizes of what the collectives make, on tensors without data.
import torch.distributed._functional_collectives  # noqa: F401
from torch import nn

from daydream.capture.pytorch.checkpoints import repeated_blocks
from hal.support.errors import InputError

_GROUP = "tensor"

#: Attributes that count what is divided.
_COUNTS = re.compile(r"(n|num)_\w*heads?|all_head_size|split_size|\w*heads_count")


class _Reduce(torch.autograd.Function):
    """Megatron's g: sums forward, passes gradients on."""

    @staticmethod
    def forward(_: Any, given: torch.Tensor, __: int) -> torch.Tensor:
        return torch.ops._c10d_functional.all_reduce(given.contiguous(), "sum", _GROUP)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Copy(torch.autograd.Function):
    """Megatron's f: passes on forward, sums gradients."""

    @staticmethod
    def forward(_: Any, given: torch.Tensor, __: int) -> torch.Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Any:
        return torch.ops._c10d_functional.all_reduce(gradient.contiguous(), "sum", _GROUP), None


def _apply(function: Any, given: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The function with its gradient."""
    result: torch.Tensor = function.apply(given, *sizes)
    return result


def _gathered(given: torch.Tensor, ranks: int, axis: int, in_place: bool) -> torch.Tensor:
    """Parts one after the other along an axis; in place where they are read as they arrive."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(given.contiguous(), ranks, _GROUP)
    if axis == 0:
        return gathered
    if in_place:
        return gathered.view([*given.shape[:axis], ranks * given.shape[axis], *given.shape[axis + 1 :]])
    return torch.cat(torch.chunk(gathered, ranks, 0), axis)


def _scattered(given: torch.Tensor, ranks: int, axis: int, in_place: bool) -> torch.Tensor:
    """A rank's part of sums along an axis, that of :func:`_gathered`."""
    stacked = given
    if axis and in_place:
        first, *others = given.shape
        others[axis - 1] //= ranks
        stacked = given.contiguous().view([first * ranks, *others])
    elif axis:
        stacked = torch.cat(torch.chunk(given, ranks, axis), 0)
    return torch.ops._c10d_functional.reduce_scatter_tensor(stacked.contiguous(), "sum", ranks, _GROUP)


class _Gather(torch.autograd.Function):
    """Parts of the sequence to the whole; backward, sums of the parts."""

    @staticmethod
    def forward(context: Any, given: torch.Tensor, ranks: int, axis: int, in_place: bool) -> torch.Tensor:
        context.parts = ranks, axis, in_place
        return _gathered(given, *context.parts)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return _scattered(gradient, *context.parts), None, None, None


class _Scatter(torch.autograd.Function):
    """Sums of the parts of the sequence; backward, the whole."""

    @staticmethod
    def forward(context: Any, given: torch.Tensor, ranks: int, axis: int, in_place: bool) -> torch.Tensor:
        context.parts = ranks, axis, in_place
        return _scattered(given, *context.parts)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return _gathered(gradient, *context.parts), None, None, None


def divide(
    model: nn.Module, run: Callable[[], Any], ranks: int, *, sequence: int = 0, in_place: bool = False
) -> list[str]:
    """Divides a model in place, and says in sentences what was assumed.

    Args:
        model: on ``meta``.
        run: calls it once with its inputs.
        ranks: tensor ranks.
        sequence: tokens of a sample where ranks hold a part of the sequence each; 0 where they hold all of it.
        in_place: whether products read parts of the sequence where they arrive: tokens lie in front (Megatron), or a
            product is multiplied part by part (its overlap, PyTorch's asynchronous tensor parallelism); else PyTorch
            copies the parts next to each other.

    Raises:
        InputError: the model repeats no block, its linear layers do not come in pairs, or a size has no such part.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise InputError("--tensor", "the model repeats no block", "plan it without")
    calls, entries = _calls(model, run)
    halves = [_halves(block, [each for each in calls if each.path.startswith(f"{block}.")]) for block in blocks]
    exchange = _Exchange(ranks, sequence, in_place)
    for block, pairs in zip(blocks, halves, strict=True):
        for firsts, second in pairs:
            readers = _readers(block, firsts, second, entries)
            _First(exchange, readers, model).register()
            for first in firsts:
                _divide_linear(model, first.path, ranks, axis=0)
            _divide_linear(model, second.path, ranks, axis=1)
            model.get_submodule(second.path).register_forward_hook(exchange.behind)
    for block in blocks:
        _divide_counts(model.get_submodule(block), ranks)
    return [f"tensor ranks share {len(halves[0])} pairs of linear layers in every block",
            *_divide_vocabulary(model, blocks, exchange)]  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """A call of a module.

    Attributes:
        path: of the module.
        read: identities of the tensors that it is given, by position or name.
    """

    path: str
    read: Mapping[int | str, int]


def _calls(model: nn.Module, run: Callable[[], Any]) -> tuple[list[_Call], dict[str, _Call]]:
    """Calls of linear layers in their order, and the last one of every module."""
    linear: list[_Call] = []
    entries: dict[str, _Call] = {}
    arguments: list[Any] = []
    hooks = []
    for path, module in model.named_modules():

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path, of: Any = module) -> None:
            # Tensors that are kept have identities of their own.
            arguments.append((args, kwargs))
            given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            call = _Call(path, {place: id(value) for place, value in given if isinstance(value, torch.Tensor)})
            entries[path] = call
            if isinstance(of, nn.Linear):
                linear.append(call)

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return linear, entries


def _halves(block: str, calls: Sequence[_Call]) -> list[tuple[list[_Call], _Call]]:
    """First halves and second halves of a block's linear layers, in turns."""
    groups = [list(group) for _, group in groupby(calls, key=lambda each: each.read.get(0))]
    if not groups or len(groups) % 2 or any(len(second) > 1 for second in groups[1::2]):
        problem = f"the {len(calls)} linear layers of {block} do not come in pairs of a first and a second half"
        raise InputError("--tensor", problem, "plan it without")
    return [(first, second[0]) for first, second in zip(groups[::2], groups[1::2], strict=True)]


def _readers(block: str, firsts: Sequence[_Call], second: _Call, entries: Mapping[str, _Call]) -> dict[str, int | str]:
    """The modules in front of which the tensor of a first half is exchanged, and where they are given it.

    That is the module around both halves if it is given the tensor itself, since it may look at its sizes; else the
    layers.
    """
    (read,) = {each.read[0] for each in firsts}
    parts = zip(*(each.path.split(".") for each in (*firsts, second)), strict=False)
    around = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, parts)]
    for count in range(block.count(".") + 2, len(around) + 1):
        path = ".".join(around[:count])
        place = (
            next((place for place, each in entries[path].read.items() if each == read), None)
            if path in entries
            else None
        )
        if place is not None:
            return {path: place}
    return {each.path: 0 for each in firsts}


@dataclass(eq=False)
class _Exchange:
    """Exchanges of ranks in front of first halves and behind second ones."""

    ranks: int
    sequence: int
    in_place: bool

    def in_front(self, given: torch.Tensor) -> torch.Tensor:
        """Input of a first half."""
        if not self.sequence:
            return _apply(_Copy, given, self.ranks)
        return _apply(_Gather, given, self.ranks, self._axis(given, self.sequence // self.ranks), self.in_place)

    def behind(self, _: Any, __: Any, result: torch.Tensor) -> torch.Tensor:
        """Exchanged result of a second half."""
        if not self.sequence:
            return _apply(_Reduce, result, self.ranks)
        return _apply(_Scatter, result, self.ranks, self._axis(result, self.sequence), self.in_place)

    def _axis(self, tensor: torch.Tensor, size: int) -> int:
        """The axis of the sequence, the second as a rule."""
        return next((axis for axis in (1, 0) if tensor.dim() > axis and tensor.shape[axis] == size), 0)


@dataclass(eq=False)
class _First:
    """The modules that read the tensor of a first half: it is exchanged once for all.

    Attributes:
        exchange: what ranks exchange.
        places: where each module is given the tensor, by position or name.
        model: that holds them.
    """

    exchange: _Exchange
    places: Mapping[str, int | str]
    model: nn.Module
    called: int = 0
    read: list[torch.Tensor] = field(default_factory=list)

    def register(self) -> None:
        """Puts the exchange in front of the modules."""
        for path, place in self.places.items():

            def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str = place) -> Any:
                if isinstance(place, int):
                    return (*args[:place], self._exchanged(args[place]), *args[place + 1 :]), kwargs
                return args, kwargs | {place: self._exchanged(kwargs[place])}

            self.model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def _exchanged(self, given: torch.Tensor) -> torch.Tensor:
        if not self.called:
            self.read = [self.exchange.in_front(given)]
        self.called = (self.called + 1) % len(self.places)
        (full_tensor,) = self.read
        if not self.called:
            # What is kept here would live longer than the step lets it.
            self.read = []
        return full_tensor


def _part(size: int, ranks: int, what: str) -> int:
    if size % ranks:
        raise InputError("--tensor", f"{what} has {size}, which {ranks} ranks do not divide", "divide it otherwise")
    return size // ranks


def _divide_linear(model: nn.Module, path: str, ranks: int, *, axis: int) -> None:
    """Keeps a rank's part of a layer's outputs (axis 0) or inputs (1)."""
    layer: Any = model.get_submodule(path)
    size = _part(layer.weight.shape[axis], ranks, f"{path}.weight")
    layer.weight = nn.Parameter(layer.weight.detach().narrow(axis, 0, size).clone(), layer.weight.requires_grad)
    if axis == 0 and layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[:size].clone(), layer.bias.requires_grad)
    layer.out_features, layer.in_features = layer.weight.shape


def _divide_counts(block: nn.Module, ranks: int) -> None:
    """Numbers of heads that modules have written down."""
    for path, module in block.named_modules():
        for name, value in list(vars(module).items()):
            if type(value) is int and _COUNTS.fullmatch(name):
                setattr(module, name, _part(value, ranks, f"{path}.{name}"))


def _divide_vocabulary(model: nn.Module, blocks: Sequence[str], exchange: _Exchange) -> list[str]:
    """The embedding with the most rows, and the head with as many outputs."""
    outside = [
        (path, module)
        for path, module in model.named_modules()
        if not any(path == block or path.startswith(f"{block}.") for block in blocks)
    ]
    tables = [module for _, module in outside if isinstance(module, nn.Embedding)]
    table = max(tables, key=lambda each: each.num_embeddings, default=None)
    if table is None:
        return []
    rows = table.num_embeddings
    heads = [module for _, module in outside if isinstance(module, nn.Linear) and module.out_features == rows]
    size, tied = ceil(rows / exchange.ranks), bool(heads) and heads[0].weight is table.weight
    table.weight = nn.Parameter(table.weight.detach()[:size].clone(), table.weight.requires_grad)
    table.num_embeddings = size
    table.register_forward_hook(exchange.behind)
    for head in heads[:1]:
        head.weight = table.weight if tied else nn.Parameter(head.weight.detach()[:size].clone())
        if head.bias is not None:
            head.bias = nn.Parameter(head.bias.detach()[:size].clone())
        head.out_features = size
        path = next(path for path, module in outside if module is head)
        _First(exchange, {path: 0}, model).register()
    holders: tuple[Any, ...] = (model, getattr(model, "config", None))
    for holder in holders:
        if type(getattr(holder, "vocab_size", None)) is int and holder.vocab_size == rows:
            holder.vocab_size = size
    return [f"embedding and head hold {size} of {rows} tokens each, and the loss is of that part"]
