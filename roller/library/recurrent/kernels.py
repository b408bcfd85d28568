"""Times of the kernels of layers that keep a state for each sequence.

A gated delta network (Yang, Kautz and Hatamizadeh, *Gated Delta Networks*, ICLR 2025) mixes keys, queries and values by
a causal convolution of a few taps and then, head by head, keeps a state of key x value numbers: a token decays it,
takes out what it had for its key and writes its value. With many tokens kernels go by chunks of 64, inside of which all
tokens are products; with one token a sequence they read and write the state. Mamba-2 (Dao and Gu, ICML 2024) has the
same kernels without the triangle of each chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Floats
from roller.library.recurrent.families import CHUNKED, STREAMED, ChunkedConstants, StreamedConstants
from roller.library.scaled.products import generation_of
from roller.library.scaled.tiled import KEPT_SHARE, l2_bytes

#: Tokens of a chunk, and those that a thread of the convolution walks.
CHUNK_TOKENS, WALKED_TOKENS = 64, 8

#: Bytes of an element of a state and of activations.
STATE_BYTES, ELEMENT_BYTES = 4, 2

#: Exponent of how sharply L2 loses what the kernel before left when it is more than it holds.
_SHARPNESS = 6

#: Taps of the convolution that its state keeps: all but that of the token itself.
KEPT_TAPS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Calls of one kernel, an entry each.

    Attributes:
        batch: sequences.
        tokens: new ones of each.
        key_heads: heads of queries and keys.
        value_heads: heads of values and of the state.
        key_dim: elements of a key.
        value_dim: elements of a value.
    """

    batch: Floats
    tokens: Floats
    key_heads: Floats
    value_heads: Floats
    key_dim: Floats
    value_dim: Floats

    @property
    def channels(self) -> Floats:
        """Of the convolution: queries, keys and values."""
        return np.asarray(2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim)

    @property
    def states(self) -> Floats:
        """Elements of the states of all sequences."""
        return np.asarray(self.batch * self.value_heads * self.key_dim * self.value_dim)


@dataclass(frozen=True, eq=False)
class RecurrentTimes:
    """Seconds of calls by their parts, and the kernels launched for each."""

    seconds: Floats
    compute: Floats
    memory: Floats
    kernels: int


def convolution_times(
    calls: Sequences, device: DeviceSpec, streamed: Mapping[str, StreamedConstants] | None = None
) -> RecurrentTimes:
    """The causal convolution of many tokens, or of one token a sequence, whose state then moves on."""
    constants = (streamed or STREAMED)["convolution"]
    elements = calls.batch * calls.tokens * calls.channels
    walked = np.minimum(calls.tokens, WALKED_TOKENS)
    moved = 2 * ELEMENT_BYTES * elements
    return _streamed(constants, elements, moved, moved, walked, device)


def convolution_step_times(
    calls: Sequences, device: DeviceSpec, streamed: Mapping[str, StreamedConstants] | None = None
) -> RecurrentTimes:
    """The causal convolution of one token a sequence: its state is read, moved on by a token and written."""
    elements = calls.batch * calls.channels
    moved = (2 * KEPT_TAPS + 2) * ELEMENT_BYTES * elements
    constants = (streamed or STREAMED)["convolution step"]
    return _streamed(constants, elements, moved, moved / 2, np.ones_like(elements), device)


def rule_step_times(
    calls: Sequences, device: DeviceSpec, streamed: Mapping[str, StreamedConstants] | None = None
) -> RecurrentTimes:
    """The rule for one token a sequence: its state is read and written."""
    moved = 2 * STATE_BYTES * calls.states
    constants = (streamed or STREAMED)["rule step"]
    return _streamed(constants, calls.states, moved, moved / 2, np.ones_like(moved), device)


def rule_times(
    calls: Sequences,
    device: DeviceSpec,
    family: str,
    chunked: Mapping[str, ChunkedConstants] | None = None,
    *,
    has_triangle: bool = True,
) -> RecurrentTimes:
    """The rule for many tokens, chunk by chunk: a block keeps the state of a head of a sequence.

    ``has_triangle``: whether tokens of a chunk take out what those before them wrote, as delta rules do.
    """
    constants = (chunked or CHUNKED)[family]
    chunks = np.ceil(calls.tokens / CHUNK_TOKENS)
    heads = calls.batch * calls.value_heads / (device.unit_count * constants.resident)
    waves = np.where(heads > 1, np.ceil(heads), 1.0)
    triangle = constants.token_cycles * np.minimum(calls.tokens, CHUNK_TOKENS) * has_triangle
    cycles = waves * (constants.block_cycles + constants.chunk_cycles * (chunks - 1)) + triangle
    values = calls.batch * calls.tokens * calls.value_heads * calls.value_dim * ELEMENT_BYTES
    moved = constants.widths * values + 2 * STATE_BYTES * calls.states
    compute = cycles / device.clocks.boost_hz
    memory = _memory(moved, moved / 2, device, constants.l2_share, constants.dram_share)
    start = constants.start_cycles / device.clocks.boost_hz
    return RecurrentTimes(start + _overlapped(compute, memory, constants.overlap), compute, memory, constants.kernels)


def family_of(device: DeviceSpec) -> str:
    """Kernels of the rule for many tokens: FlashInfer's where it has some, else Triton's."""
    generation = generation_of(device, "bfloat16")
    return "triton" if generation == "warps" else f"flashinfer, {generation}"


def _streamed(
    constants: StreamedConstants, elements: Floats, moved: Floats, data: Floats, walked: Floats, device: DeviceSpec
) -> RecurrentTimes:
    compute = constants.element_cycles * elements / device.unit_count / device.clocks.boost_hz
    memory = _memory(moved, data, device, constants.l2_share, constants.dram_share)
    start = (constants.start_cycles + constants.step_cycles * (walked - 1)) / device.clocks.boost_hz
    return RecurrentTimes(start + _overlapped(compute, memory, constants.overlap), compute, memory, 1)


def _memory(moved: Floats, data: Floats, device: DeviceSpec, l2_share: float, dram_share: float) -> Floats:
    """Seconds of so many bytes moved; L2 has ``data`` bytes from before as far as it holds them."""
    kept = 1 / (1 + np.minimum(data / (KEPT_SHARE * l2_bytes(device)), 100.0) ** _SHARPNESS)
    cache = device.l2 or device.dram
    missed = (1 - kept) / (dram_share * device.dram.bandwidth_bytes_per_second)
    return np.asarray(moved * (missed + kept / (l2_share * cache.bandwidth_bytes_per_second)))


def _overlapped(compute: Floats, memory: Floats, overlap: float) -> Floats:
    return np.asarray((compute**overlap + memory**overlap) ** (1 / overlap))
