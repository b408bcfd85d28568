"""Seconds of a scheduler's iteration on the boards of a replica, as tables that a simulation looks up.

An iteration computes some tokens of decoding sequences, one each, and of prompts. Its linear layers and all that goes
over tokens depend on how many there are: priced once for every size at which a tile, or a captured graph, begins.
Attention depends on rows of queries and on the keys that they see in the mean: priced on a grid of powers of two,
between which rows times keys is interpolated, as traffic and arithmetic are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daydream.memory.device import context_bytes
from daydream.memory.narrow import ELEMENT_BYTES
from daydream.operators.calls import operator_prices
from daydream.operators.variants import PRECISIONS
from daydream.plan.experts import deepep_seconds
from daydream.serving.grid import Grid, interpolated
from daydream.serving.parts import Attention, Experts, Latent, Loop, Part, Product, Sum, scaled_loop
from daydream.trace.trace import Floats, Ints
from hal.spec.power import settled
from hal.support.errors import InputError
from roller.library import library_times
from roller.library.attention.times import CAPABILITY
from roller.library.collectives import check_ranks, node_for
from roller.library.experts.call import LAYER_KERNELS
from roller.library.latent.call import KERNELS as LATENT_KERNELS
from roller.library.scaled.products import scaled_times, trained_times

if TYPE_CHECKING:
    from daydream.serving.parts import ServedModel
    from hal.spec.device import DeviceSpec

#: Largest batch that engines capture as a graph in small steps, and the steps: 1, 2, 4, 8, then by 8 and by 16
#: (``cudagraph_capture_sizes`` of vLLM). Larger ones end where a tile of a product does.
GRAPHS, TILE = 512, 128

#: Tokens of a page of keys and values (vLLM's ``block_size``, TensorRT-LLM has 32).
PAGE = 16

#: Sides of narrow products are multiples of this.
_SIDE = 16

#: Numbers of experts by the precision of linear layers; others keep 16 bits.
_EXPERTS = {"fp8-tensorwise": "fp8-tensorwise", "fp8-rowwise": "fp8-tensorwise", "fp8-block": "fp8-block",
            "mxfp8": "fp8-tensorwise", "nvfp4": "nvfp4"}  # fmt: skip

#: Numbers of the products of latent attention by that of linear layers.
_LATENT = ("fp8-tensorwise", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")

#: Precisions whose numbers the kernel before a product writes.
_FUSED = ("fp8-tensorwise", "mxfp8", "nvfp4")

#: Bytes of an element of keys and values by the name of its type.
CACHES: Mapping[str, float] = {"16-bit": 2.0, "fp8": 1.0}

#: Kernels of layers that have several.
_KERNELS: Mapping[type, int] = {Experts: LAYER_KERNELS, Latent: LATENT_KERNELS}

#: Longest context of a table of attention.
LONGEST = 1 << 20


class Engine(NamedTuple):
    """Settings of a replica's engine.

    Attributes:
        ranks: boards, all of one node, that share every layer.
        precision: of linear layers of blocks, one of :data:`daydream.operators.variants.PRECISIONS`.
        cache: numbers of keys and values, one of :data:`CACHES`.
        sequences: of a batch at most.
        tokens: of an iteration at most.
        memory_share: of a board that weights, activations and cache may take together.
        reduces: whose all-reduces run, ``auto`` for the faster of vLLM's own and NCCL's, or ``nccl``.
        draft: tokens that a decoding sequence drafts for an iteration, which computes them all.
        acceptance: share of drafted tokens that are accepted where those before were.
        experts: boards that experts are divided among, none of them in parts; 0 where tensor ranks share each expert.
    """

    ranks: int = 1
    precision: str = "16-bit"
    cache: str = "16-bit"
    sequences: int = 256
    tokens: int = 8192
    memory_share: float = 0.9
    reduces: str = "auto"
    draft: int = 0
    acceptance: float = 0.7
    experts: int = 0

    @property
    def groups(self) -> int:
        """Groups of tensor ranks that share experts, each with sequences of its own."""
        return max(self.experts // self.ranks, 1)

    @property
    def boards(self) -> int:
        """Boards of a replica."""
        return self.ranks * self.groups

    @property
    def tokens_an_iteration(self) -> float:
        """Tokens that a decoding sequence has of an iteration in the mean (Leviathan et al. 2023, equation 1)."""
        return float(sum(self.acceptance**each for each in range(self.draft + 1)))


@dataclass(frozen=True, eq=False, kw_only=True)
class IterationCosts:
    """Seconds of iterations.

    Attributes:
        body: of all layers but attention, by tokens; as many entries as :attr:`Engine.tokens`, and one.
        head: of the last norm and the logits, by sequences.
        decode: attention of sequences with a query each.
        prefill: attention of prompts' queries.
        launch: seconds in which the host launches an iteration kernel by kernel, where no graph is captured.
        blocks: pages of keys and values that fit; 0 where not even the weights do.
        weights: bytes of parameters on a board, with those of what drafts.
        draft: costs of the model that drafts, or None.
    """

    model: ServedModel
    device: DeviceSpec
    engine: Engine
    body: Floats
    head: Floats
    decode: Grid
    prefill: Grid
    launch: float
    blocks: int
    weights: float
    draft: IterationCosts | None = None

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.blocks * PAGE

    @property
    def cache_bytes(self) -> float:
        """Bytes of keys and values that a board keeps of a token."""
        drafted = self.draft.cache_bytes if self.draft is not None else 0.0
        return self.model.cache_elements(self.engine.ranks) * CACHES[self.engine.cache] + drafted

    def seconds(self, decoding: int, context: float, prompt: int = 0, seen: float = 0.0) -> float:
        """Seconds of the boards for one iteration.

        Args:
            decoding: sequences with a new token each.
            context: tokens that each of these has in the cache, in the mean.
            prompt: tokens of prompts.
            seen: keys that each of these sees, in the mean.
        """
        draft = self.engine.draft
        verified = decoding * (1 + draft)
        total = float(self.body[verified + prompt] + self.head[max(verified, 1)])
        if self.draft is not None:
            total += self.draft.seconds(decoding, context, decoding * draft + prompt, seen)
            total += (draft - 1) * self.draft.seconds(decoding, context)
        if decoding:
            total += interpolated(self.decode, decoding, context)
        if prompt:
            total += interpolated(self.prefill, prompt, seen)
        return total

    def roofline(self, decoding: int, context: float) -> float:
        """Seconds of a decoding step at the rates that its board sustains: weights and cache read once, or the
        arithmetic of products."""
        engine, model = self.engine, self.model
        size = _element_bytes(engine.precision)
        active = model.active_elements(decoding)
        cached = decoding * context * model.cache_elements(engine.ranks) * CACHES[engine.cache]
        moved = active * size / engine.ranks + cached
        flops = 2 * model.active_elements(1) * decoding / engine.ranks
        instruction = self.device.best_matrix_instruction(model.dtype if size == 2 else "float8_e4m3fn")
        assert instruction is not None
        return max(moved / self.device.dram.bandwidth_bytes_per_second, flops / instruction.sustained_flops)


def iteration_costs(
    model: ServedModel, device: DeviceSpec, engine: Engine, draft: ServedModel | None = None
) -> IterationCosts:
    """The tables of a replica.

    Args:
        model: that is served.
        device: its boards.
        engine: its settings.
        draft: what drafts :attr:`Engine.draft` tokens, on the same boards; None where they are looked up in the prompt.

    Raises:
        InputError: the board has no such kernels, or the node not as many boards.
    """
    # Servers run for hours.
    device = settled(device)
    _check_board(device, engine)
    _check_experts(model, engine)
    drafting = None if draft is None or not engine.draft else iteration_costs(draft, device, engine._replace(draft=0))
    sizes = batch_sizes(engine.tokens)
    price = partial(_seconds, device=device, engine=engine, dtype=model.dtype)
    body = price(model.body, sizes)[np.searchsorted(sizes, np.arange(engine.tokens + 1))]
    verified = engine.sequences * (1 + engine.draft)
    heads = batch_sizes(verified)
    head = price(model.head, heads)[np.searchsorted(heads, np.arange(verified + 1))]
    weights = model.weight_bytes(engine.ranks, _element_bytes(engine.precision), engine.experts)
    weights += drafting.weights if drafting is not None else 0.0
    return IterationCosts(
        model=model, device=device, engine=engine, body=body, head=head,
        decode=_attention_grid(model, device, engine, decoding=True),
        prefill=_attention_grid(model, device, engine, decoding=False),
        launch=_launch_seconds(model, device) + (engine.draft * drafting.launch if drafting is not None else 0.0),
        blocks=_blocks(model, device, engine, weights, drafting), weights=weights, draft=drafting,
    )  # fmt: skip


def _check_board(device: DeviceSpec, engine: Engine) -> None:
    if device.compute_capability is not None and device.compute_capability < CAPABILITY:
        raise InputError("--device", f"{device.name} has no FlashAttention, as servers run it", "choose another")
    if engine.ranks == 1:
        return
    node = node_for(device)
    if engine.ranks > node.boards:
        problem = f"{node.name} has {node.boards} boards, {engine.ranks} are to share a layer"
        raise InputError("--tensor", problem, f"write {node.boards} at most, and --replicas")


def _check_experts(model: ServedModel, engine: Engine) -> None:
    if not engine.experts:
        return
    counts = [part.experts for part in model.body if isinstance(part, Experts)]
    if not counts:
        raise InputError("--expert", f"{model.title} has no layers of experts", "leave it out")
    if engine.experts % engine.ranks or any(count % engine.experts for count in counts):
        problem = f"got {engine.experts}, for {counts[0]} experts and {engine.ranks} tensor ranks"
        raise InputError("--expert", problem, "write a multiple of --tensor that divides the experts")


def _element_bytes(precision: str) -> float:
    """Bytes of an element of a narrow layer's weights, its share of scales included."""
    return 2.0 if precision == PRECISIONS[0] else ELEMENT_BYTES.get(precision, 1.0)


def batch_sizes(most: int) -> Ints:
    """Numbers of tokens at which a captured graph or a tile ends, up to the largest batch.

    >>> batch_sizes(40).tolist(), batch_sizes(700).tolist()[-3:]
    ([1, 2, 4, 8, 16, 24, 32, 40], [512, 640, 700])
    """
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, GRAPHS + 1, 16), *range(GRAPHS + TILE, 2048, TILE)]
    step, size = 2 * TILE, 2048
    while size < most:
        steps.append(size)
        size += step
        step += TILE * (size % 4096 == 0)
    return np.array([*(each for each in steps if each < most), most], np.int64)


def _seconds(parts: Mapping[Part, int], sizes: Ints, *, device: DeviceSpec, engine: Engine, dtype: str) -> Floats:
    """Seconds of parts for each number of tokens, attention apart."""
    total = np.zeros(len(sizes))
    tokens = sizes.tolist()
    loops: list[tuple[Any, int]] = []
    for part, count in parts.items():
        if isinstance(part, Loop):
            share = engine.ranks if part.divided else 1
            loops += [(scaled_loop(part, -(-each // share)), count) for each in tokens]
            continue
        if isinstance(part, Product) and part.narrow and engine.precision != PRECISIONS[0]:
            n, k = _sides(part, engine.ranks)
            if n % _SIDE == 0 and k % _SIDE == 0:
                total += count * _narrow_seconds(engine.precision, sizes, n, k, device)
                continue
        options = _operators(part, engine, dtype)
        if options:
            times = ([{**one, **_of_tokens(one, size)} for size in tokens] for one in options)
            priced = [[each.seconds for each in library_times(one, device)] for one in times]
            total += count * np.min(priced, axis=0)
        if isinstance(part, Experts) and engine.groups > 1:
            total += 2 * count * _exchange_seconds(part, sizes, device, engine)
    prices = operator_prices([operator for operator, _ in loops], device)
    counts = np.array([count for _, count in loops], np.float64)
    seconds = np.array([price.seconds for price in prices], np.float64) * counts
    return total + seconds.reshape(-1, len(sizes)).sum(axis=0)


def _exchange_seconds(part: Experts, sizes: Ints, device: DeviceSpec, engine: Engine) -> Floats:
    """Seconds in which tokens reach their experts, or come back, by DeepEP's kernels; each board sends its share."""
    node = node_for(device)
    check_ranks(engine.experts, node)
    per_node = min(engine.experts, node.boards)
    choices = 2.0 * part.hidden * part.top_k / engine.ranks
    return np.array(
        [deepep_seconds(choices * size, part.top_k, engine.experts, node, per_node) for size in sizes.tolist()]
    )


def _of_tokens(operator: Mapping[str, Any], size: int) -> dict[str, Any]:
    name = {"experts": "tokens", "all_reduce": "bytes"}.get(operator["op"], "m")
    return {name: operator[name] * size}


def _operators(part: Part, engine: Engine, dtype: str) -> list[dict[str, Any]]:
    """A part for one token as operators, of which the fastest runs; none for what is priced elsewhere."""
    ranks, precision = engine.ranks, engine.precision
    if isinstance(part, Product):
        n, k = _sides(part, ranks)
        return [{"op": "matmul", "m": 1, "n": n, "k": k, "dtype": dtype, "transpose_b": True}]
    if isinstance(part, Experts):
        numbers = _EXPERTS.get(precision, "bfloat16")
        divided = {"expert_parallel": engine.experts} if engine.experts else {"tensor_parallel": ranks}
        return [{"op": "experts", "tokens": engine.groups, **part._asdict(), **divided, "precision": numbers}]
    if isinstance(part, Sum) and ranks > 1:
        # Engines take their own kernel for short messages and NCCL's for long ones.
        common = {"op": "all_reduce", "bytes": part.elements * 2, "ranks": ranks}
        return [{**common, "kernels": kernels} for kernels in ("nccl", "vllm")[: 1 + (engine.reduces == "auto")]]
    return []


def _sides(part: Product, ranks: int) -> tuple[int, int]:
    """Columns and summed elements of a board's part of a product."""
    n = _share(part.n, ranks) if part.divided == "n" else part.n
    return n, _share(part.k, ranks) if part.divided == "k" else part.k


def _narrow_seconds(precision: str, sizes: Ints, n: int, k: int, device: DeviceSpec) -> Floats:
    """Seconds of narrow products.

    Servers calibrate the scale of a whole tensor, and scales of a few elements need no more than what a thread has:
    norms and activations write such numbers themselves. A scale of a row, or of 128 elements, takes a kernel.
    """
    ones = np.ones(len(sizes))
    sides = (sizes.astype(np.float64), n * ones, k * ones)
    fused = precision in _FUSED
    times = (trained_times if fused else scaled_times)(precision, *sides, device)
    return times.product.seconds if fused else times.seconds


def _share(size: int, ranks: int) -> int:
    if size % ranks:
        problem = f"{ranks} boards cannot share a layer of {size} columns"
        raise InputError("--tensor", problem, "choose a number that divides it")
    return size // ranks


def _attention_grid(model: ServedModel, device: DeviceSpec, engine: Engine, *, decoding: bool) -> Grid:
    """Seconds of all layers' attention, and of latent attention with its products."""
    most = engine.sequences if decoding else engine.tokens
    rows = np.unique(np.array([*(1 << each for each in range(most.bit_length())), most]))
    keys = np.array([1 << each for each in range(LONGEST.bit_length())][3:])
    if decoding and most > 64:
        # Rounds of blocks make steps between powers of two.
        rows = np.unique(np.concatenate([rows, np.arange(64, min(most, 512), 64)]))
    total = np.zeros((len(rows), len(keys)))
    for part, count in model.attentions.items():
        operators = [_attention(part, row, key, model.dtype, engine, decoding=decoding)
                     for row in rows.tolist() for key in keys.tolist()]  # fmt: skip
        seconds = [each.seconds for each in library_times(operators, device)]
        total += count * np.reshape(seconds, total.shape)
    return Grid(rows.astype(np.float64), keys.astype(np.float64), total)


def _attention(
    part: Attention | Latent, rows: int, keys: int, dtype: str, engine: Engine, *, decoding: bool
) -> dict[str, Any]:
    narrow = engine.cache == "fp8"
    heads = max(part.heads // engine.ranks, 1)
    queries = 1 + engine.draft
    if isinstance(part, Latent):
        batch, tokens = (rows, queries) if decoding else (1, rows)
        context = keys if decoding else max(keys - rows // 2, 0)
        precision = engine.precision if engine.precision in _LATENT else "bfloat16"
        return {"op": "latent_attention", **part._asdict(), "heads": heads, "batch": batch, "tokens": tokens,
                "context": context, "precision": precision, "cache": "fp8" if narrow else "bfloat16"}  # fmt: skip
    # A prompt's queries see different numbers of keys, of which the mean counts: no mask, but as many pairs.
    return {"op": "attention", "b": rows if decoding else 1, "heads": heads,
            "kv_heads": max(part.kv_heads // engine.ranks, 1), "queries": queries if decoding else rows,
            "keys": min(keys, part.window) if part.window else keys, "head_dim": part.head_dim,
            "value_dim": part.value_dim, "causal": False, "page": PAGE,
            "dtype": "float8_e4m3fn" if narrow else dtype}  # fmt: skip


def _launch_seconds(model: ServedModel, device: DeviceSpec) -> float:
    """Seconds of the host for launching the kernels of an iteration one by one."""
    from daydream.prediction.host import FORWARD_SHARE, KERNEL_SHARE

    shares = 0.0
    for part, count in (*model.body.items(), *model.head.items()):
        shares += count * (FORWARD_SHARE + KERNEL_SHARE * (_KERNELS.get(type(part), 1) - 1))
    return shares * device.framework_calls.call_seconds


def _blocks(
    model: ServedModel, device: DeviceSpec, engine: Engine, weights: float, draft: IterationCosts | None
) -> int:
    """Pages of keys and values that fit next to weights, activations of the largest batch, and logits in float32."""
    capacity = device.dram.capacity_bytes
    if capacity is None:
        raise InputError("--device", f"{device.name} does not say how much memory it has", "choose another")
    head = next((part.n for part in model.head if isinstance(part, Product)), 0)
    activations = model.live_bytes * engine.tokens + 4.0 * head * engine.sequences
    available = capacity * engine.memory_share - context_bytes(device) - weights - activations
    cached = model.cache_elements(engine.ranks) * CACHES[engine.cache] + (draft.cache_bytes if draft is not None else 0)
    return max(int(available / (PAGE * cached)), 0)
