"""Texts that kernels of attention and of its gradients by matrix instructions share: products of fragments, and masks.

A warp has ``FRAGMENTS`` fragments of rows; sums lie in ``[FRAGMENTS][columns / 8][4]`` registers of each lane. What a
step walks has as many rows as the constant tells whose name is given as ``step``.
"""

from __future__ import annotations


def cleared(sums: str, width: str) -> str:
    """Sums of ``width`` columns, none so far."""
    return f"""\
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int n = 0; n < {width} / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {sums}[m][n][c] = 0.0f;"""


def row_fragments(fragments: str, place: str, pitch: str, *, indent: str = "    ") -> str:
    """The loads of a warp's own rows at depth ``d``, into ``fragments[m]`` as the text calls them."""
    return f"""\
#pragma unroll
{indent}  for (int m = 0; m < FRAGMENTS; ++m)
{indent}    load_matrix_x4({fragments}, 0, shared, {place} + m * 16 * {pitch} + d * 32);"""


def _walked_load(walked: str, pitch: str, *, down: str, across: str, turn: bool) -> str:
    """The load of a fragment of a step, at the place of the tile in the variables ``down`` and ``across``."""
    function = "load_matrix_x4_trans" if turn else "load_matrix_x4"
    return f"{function}(walked_fragment, 0, shared, {walked} + {down} * 16 * {pitch} + {across} * 32);"


def product_of_rows(
    sums: str, warp_fragments: str, walked: str, pitch: str, *, depth: str, step: str, product: str, loads: str,
    is_turned: bool = False,
) -> str:  # fmt: skip
    """The product of a warp's own rows and those of a step, along the rows of both, ``depth`` elements.

    Args:
        warp_fragments: the fragments of a warp's own rows; ``loads`` brings those of depth ``d``, empty where they are
            held.
        walked: where a lane finds rows of the step, and ``pitch`` the bytes from one to the next.
        product: the function that multiplies fragments.
        is_turned: whether the rows of a step lie side by side: ``walked`` is where a lane finds columns of the tile.
    """
    down, across = ("d", "n") if is_turned else ("n", "d")
    load = _walked_load(walked, pitch, down=down, across=across, turn=is_turned)
    return f"""\
{cleared(sums, step)}
#pragma unroll
    for (int d = 0; d < {depth} / 16; ++d) {{
{loads}#pragma unroll
      for (int n = 0; n < {step} / 16; ++n) {{
        unsigned walked_fragment[4];
        {load}
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) {{
          {product}({sums}[m][2 * n], 0, {warp_fragments}, 0, walked_fragment, 0);
          {product}({sums}[m][2 * n + 1], 0, {warp_fragments}, 0, walked_fragment, 2);
        }}
      }}
    }}"""


def product_of_columns(
    sums: str, factors: str, walked: str, pitch: str, *, width: str, step: str, product: str, pair: str,
    is_turned: bool = False, loads: str = "",
) -> str:  # fmt: skip
    """The product of factors, which lie where the sums of another product did, and ``width`` columns of a step.

    Args:
        loads: what brings fragment ``weights[m]`` of the factors, rows ``n`` of a step; empty where they lie in
            registers.
        walked: where a lane finds columns of the step, and ``pitch`` the bytes from one of its rows to the next.
        product, pair: the functions that multiply fragments, and that make two elements of floats.
        is_turned: whether the columns lie one after the other: ``walked`` is where a lane finds rows of the tile.
    """
    down, across = ("e", "n") if is_turned else ("n", "e")
    load = _walked_load(walked, pitch, down=down, across=across, turn=not is_turned)
    of_registers = f"""\
#pragma unroll
        for (int c = 0; c < 4; ++c)
          weights[m][c] = {pair}({factors}[m][2 * n + c / 2][c % 2 * 2], {factors}[m][2 * n + c / 2][c % 2 * 2 + 1]);"""
    return f"""\
#pragma unroll
    for (int n = 0; n < {step} / 16; ++n) {{
      unsigned weights[FRAGMENTS][4];
#pragma unroll
      for (int m = 0; m < FRAGMENTS; ++m)
{loads or of_registers}
#pragma unroll
      for (int e = 0; e < {width} / 16; ++e) {{
        unsigned walked_fragment[4];
        {load}
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) {{
          {product}({sums}[m][2 * e], 0, weights[m], 0, walked_fragment, 0);
          {product}({sums}[m][2 * e + 1], 0, weights[m], 0, walked_fragment, 2);
        }}
      }}
    }}"""


def unseen_keys(step: str, first_key: str, value: str) -> str:
    """Logits of keys that a row does not see, where a step has any. A row of a warp's fragments is its
    lane's fourth, or eight more."""
    return f"""\
    if ({first_key} + {step} > KEYS_ALL || (CAUSAL && {first_key} + {step} > first_query + AHEAD + 1) ||
        (WINDOW && {first_key} <= last_query + AHEAD - WINDOW)) {{
#pragma unroll
      for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {{
          const int query = (first_row + (warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i) / GROUP;
          const int keys_end = CAUSAL ? min(query + AHEAD + 1, KEYS_ALL) : KEYS_ALL;
          const int keys_begin = WINDOW ? query + AHEAD + 1 - WINDOW : 0;
#pragma unroll
          for (int n = 0; n < {step} / 8; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {{
              const int key = {first_key} + n * 8 + lane % 4 * 2 + j;
              if (key >= keys_end || key < keys_begin) logits[m][n][2 * i + j] = {value};
            }}
        }}
    }}"""
