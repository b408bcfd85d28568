"""Numbers of the kernels of layers with a state, one set a kernel, whatever board and shape.

Chosen on half of the shapes of L40S, H100 and B200 (``today`` of AIConfigurator's performance database, vLLM 0.24);
docs/accuracy.md has the errors on the other half. Cycles are those of the boost clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StreamedConstants:
    """A kernel whose threads walk tokens of a channel, or rows of a state.

    Attributes:
        start_cycles: of a kernel of one token, the gap before it included.
        step_cycles: added for each further token that a thread walks one after the other.
        element_cycles: of a unit for each element.
        l2_share: of the board's L2 rate.
        dram_share: of the board's DRAM rate.
        overlap: exponent of the sum of arithmetic and memory.
    """

    start_cycles: float
    step_cycles: float = 0.0
    element_cycles: float
    l2_share: float
    dram_share: float
    overlap: float


@dataclass(frozen=True, kw_only=True)
class ChunkedConstants:
    """Kernels of a rule in chunks of tokens.

    Attributes:
        start_cycles: of all kernels with nothing to do, gaps included.
        block_cycles: of a unit for the first chunk of a head of a sequence, its state read and written.
        chunk_cycles: of a unit for every further chunk.
        token_cycles: added for every token of the longest chunk: rows of its triangle are solved one after the other.
        resident: heads of a unit at a time.
        widths: bytes of a token and head over those of its value that are moved through memory.
        l2_share: of the board's L2 rate.
        dram_share: of the board's DRAM rate.
        overlap: exponent of the sum of arithmetic and memory.
        kernels: how many are launched.
    """

    start_cycles: float
    block_cycles: float
    chunk_cycles: float
    token_cycles: float = 0.0
    resident: float = 1.0
    widths: float
    l2_share: float
    dram_share: float
    overlap: float
    kernels: int = 1


STREAMED: Mapping[str, StreamedConstants] = {
    "convolution": StreamedConstants(
        start_cycles=4580, step_cycles=347, element_cycles=0.413, l2_share=0.743, dram_share=0.818, overlap=5.66
    ),
    "convolution step": StreamedConstants(
        start_cycles=3740, element_cycles=1.11, l2_share=0.785, dram_share=0.801, overlap=12.7
    ),
    "rule step": StreamedConstants(start_cycles=8460, element_cycles=0.0, l2_share=0.942, dram_share=0.936, overlap=4),
}  # fmt: skip

CHUNKED: Mapping[str, ChunkedConstants] = {
    "flashinfer, warp groups": ChunkedConstants(
        start_cycles=6530, block_cycles=16_600, chunk_cycles=5940, widths=2.09, l2_share=0.249, dram_share=0.688,
        overlap=2.96,
    ),
    "flashinfer, unit pairs": ChunkedConstants(
        start_cycles=5480, block_cycles=36_300, chunk_cycles=4740, widths=5.18, l2_share=0.976, dram_share=0.854,
        overlap=4.45,
    ),
    "triton": ChunkedConstants(
        start_cycles=18_200, block_cycles=25_200, chunk_cycles=3910, token_cycles=414, resident=2, widths=8.86,
        l2_share=0.186, dram_share=0.379, overlap=1.95, kernels=6,
    ),
}  # fmt: skip
