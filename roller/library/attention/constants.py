"""The numbers of the attention model that belong to kernels rather than to a board."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roller.library.attention.tiles import Family
from sokoban.model.gpu.power import POWER_SECONDS, STEP_POWER


@dataclass(frozen=True, kw_only=True)
class KernelConstants:
    """Costs of one family of kernels, whatever the board. Cycles are of the boost clock."""

    # Share of the shorter of products and softmax that is not hidden behind the longer on a full unit: most of it where
    # a warp does one after the other, less where warp groups take turns (FlashAttention 3) or have one task each.
    exposed: float
    # Rate of the products alone over that of the board's best library product, which waits for its operands at times.
    product_share: float = 1.0
    # The same of a backward pass, where it differs.
    backward_exposed: float | None = None
    # float32 instructions per score besides its exponential: scale, maximum, sum, conversion, rescaling of the output.
    # Blackwell's kernels do some exponentials as polynomials, on the lanes instead of the special function units.
    score_instructions: float
    # Further ones per score of a tile that is masked element by element: comparison with a limit per row, selection.
    # None of their own in FlashAttention 2, whose exposed arithmetic covers them.
    mask_instructions: float = 0.0
    # Bytes per cycle that one unit takes out of L2, by the copies that the kernel keeps in flight; 64 is the port.
    unit_bytes: float
    # Share of the loads of a step that a block waits for, and others of its unit do not: 1 without stages.
    exposed_loads: float = 0.0
    # Cycles of a step in which a block waits for its own loads and products; other blocks of the unit do not.
    step_cycles: float = 0.0
    # Cycles of a block around its steps, from the first loads to the last store: alone on its unit, and what it takes
    # of the unit's time with others resident.
    block_cycles: float = 0.0
    block_busy_cycles: float
    # Part of the longest block that is still running when the others have ended, where blocks differ in length: half
    # where they start in any order, little if the longest start first.
    tail: float
    # Cycles before the first block of a call starts: the start of a graph, fetching arguments and descriptors.
    start_cycles: float
    # The kernel that combines splits, and each split of a row in it.
    combine_cycles: float = 0.0
    split_cycles: float = 0.0
    # A kernel that copies queries or results into another order of heads.
    copy_cycles: float = 0.0
    # Sorting the sequences of a call by length, per sequence.
    sequence_cycles: float = 0.0
    # Share of the matrix rate of the forward pass that the five products of a backward pass reach, whose operands go
    # through shared memory more often. From the papers' rates for 128 elements per head; no measured rows.
    backward_share: float


@dataclass(frozen=True, kw_only=True)
class AttentionConstants:
    """The numbers that all families share; see the comments.

    Chosen on the rows of a random half of (heads, kv_heads, head_dim, window) of the tensor_core data set (A100 SXM,
    H100 SXM, L40S, B200), by the mean of the relative error, at most 1 per row; none belongs to a shape.
    """

    # Exponentials that a unit computes per cycle, whatever the rate of its Tensor Cores (CUDA programming guide), and
    # on Blackwell Ultra, whose special function units take twice as many (Verda 2025, 'NVIDIA GB300 NVL72').
    exponentials: float = 16.0
    ultra_exponentials: float = 32.0
    # Cycles between two instructions of a warp that has its scheduler for itself: each waits for the one before it.
    lone_warp: float = 2.0
    # Cycles per step for looking up where a page lies.
    page_cycles: float = 183.0
    # Bytes of a call over the L2 capacity: repeated calls find everything in L2 below the first, nothing above the
    # second.
    reuse_full: float = 0.656
    reuse_none: float = 1.38
    # Steps of a unit after which half of DRAM's time is hidden behind the rest: the first loads have nothing to hide
    # behind them, nor do the last steps.
    hidden_steps: float = 6.24
    # How soon blocks count as different in length: the inverse of the share by which the longest exceeds the mean.
    uneven: float = 20.0
    # Those of :func:`sokoban.model.gpu.power.power_limited`.
    power: float = STEP_POWER
    power_seconds: float = POWER_SECONDS
    # The kernel that writes new keys and values into their pages: its own cycles, those of a round of its blocks (one
    # per token), bytes moved per byte written, and threads of a block at most (one per element of a token's keys).
    update_cycles: float = 361.0
    update_round_cycles: float = 3880.0
    update_traffic: float = 2.9
    update_threads: float = 512.0
    kernels: Mapping[Family, KernelConstants] = field(
        default_factory=lambda: {
            "FlashAttention 2": KernelConstants(
                exposed=0.786, score_instructions=8.11, unit_bytes=33.0, step_cycles=747.0, block_cycles=3850.0,
                block_busy_cycles=1360.0, tail=0.528, start_cycles=2980.0, combine_cycles=4080.0, split_cycles=327.0,
                copy_cycles=1220.0, backward_share=1.0,
            ),
            "FlashAttention 3": KernelConstants(
                exposed=0.56, backward_exposed=0.86, score_instructions=3.0, mask_instructions=11.2, unit_bytes=23.5,
                block_busy_cycles=3680.0, tail=0.257, start_cycles=8010.0, split_cycles=55.7, sequence_cycles=37.8,
                backward_share=0.82,
            ),
            # cuDNN 9 on Hopper, whose tiles are taken for FlashAttention 3's: less of the softmax is exposed, and a
            # mask costs a comparison and a selection. Chosen with all 30 calls of its own benchmark on H200 in view.
            "cuDNN": KernelConstants(
                exposed=0.35, backward_exposed=0.62, score_instructions=3.0, mask_instructions=3.0, unit_bytes=23.5,
                block_busy_cycles=3680.0, tail=0.257, start_cycles=8010.0, split_cycles=55.7, sequence_cycles=37.8,
                backward_share=0.75,
            ),
            "FlashAttention 4": KernelConstants(
                exposed=0.317, score_instructions=1.49, mask_instructions=5.95, unit_bytes=39.7,
                block_busy_cycles=9300.0, tail=0.23, start_cycles=3090.0, backward_share=0.7,
            ),
            # cuDNN 9.22 on Blackwell, with the tiles of FlashAttention 4: products run at the full rate of the unit's
            # clock. Chosen on 16 calls each of GB200 and GB300 of its own benchmark (cudnn-frontend, April 2026: Llama
            # 3.1 and DeepSeek-V3, 2,048 and 8,192 tokens, with and without a mask); calls of 4,096 and 16,384 tokens
            # are 7.0 % off forward and 10.3 % backward.
            "cuDNN, unit pairs": KernelConstants(
                exposed=0.23, backward_exposed=0.494, product_share=1.11, score_instructions=0.3,
                mask_instructions=5.31, unit_bytes=39.7, block_busy_cycles=4000.0, tail=0.23, start_cycles=3090.0,
                backward_share=0.684,
            ),
            "TensorRT-LLM": KernelConstants(
                exposed=0.335, score_instructions=1.29, mask_instructions=5.95, unit_bytes=44.4,
                block_busy_cycles=1890.0, tail=0.552, start_cycles=8890.0, split_cycles=199.0, backward_share=0.7,
            ),
            # FlashAttention 1 as its Triton kernels of 2022 run it: one stage, so that loads, products and softmax
            # follow each other; a mask on every tile; factors of the output through memory and back in every step.
            # Instructions and stages from the source, the waiting and the share of the backward pass from what
            # FlashAttention 2's paper (Dao 2023, section 4.1) has on an A100: 1.3 to 1.5 and 2 times its own.
            "Triton": KernelConstants(
                exposed=1.0, score_instructions=11.1, unit_bytes=33.0, exposed_loads=1.0, step_cycles=900.0,
                block_cycles=3850.0, block_busy_cycles=1360.0, tail=0.528, start_cycles=2980.0,
                backward_share=0.55,
            ),
        }
    )  # fmt: skip


CONSTANTS = AttentionConstants()
