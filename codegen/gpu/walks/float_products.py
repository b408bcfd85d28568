"""Texts that kernels of attention and of its gradients by multiply-adds share: products out of tiles in shared memory.

Threads form a grid over a tile of logits: a thread has ``thread_rows`` rows, ``threads / lanes`` apart, and every
``lanes``-th row of a step, or four columns of it in turn with its neighbours. The texts are in the words of
:mod:`codegen.gpu.walks.language`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sokoban.schedule.attention import RowTiles


@dataclass(frozen=True)
class FloatProducts:
    """Products of a schedule's threads, which walk ``step`` rows at a time."""

    schedule: RowTiles
    step: int

    @property
    def rows(self) -> int:
        """Rows of a thread."""
        return self.schedule.thread_rows

    @property
    def apart(self) -> int:
        """From one row of a thread to the next."""
        return self.schedule.threads // self.schedule.lanes

    @property
    def logits(self) -> int:
        """Rows of a step that a thread multiplies each of its own by."""
        return self.step // self.schedule.lanes

    def of_rows(self, sums: str, own: int, walked: int, pitch: int, depth: int) -> str:
        """Products of a thread's rows and of those it walks, ``depth`` elements each, four at a time.

        Args:
            own, walked: where both tiles begin, and ``pitch`` the floats from row to row of them.
        """
        products = "".join(
            f"          {sums}[i][j] = FMA(rows[i].{name}, other.{name}, {sums}[i][j]);\n" for name in "xyzw"
        )
        return f"""\
#pragma unroll
    for (int i = 0; i < {self.rows}; ++i)
#pragma unroll
      for (int j = 0; j < {self.logits}; ++j) {sums}[i][j] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < {depth}; d += 4) {{
      float4 rows[{self.rows}];
#pragma unroll
      for (int i = 0; i < {self.rows}; ++i)
        rows[i] = *(LOCAL const float4*)(shared + {own} + (first + i * {self.apart}) * {pitch} + d);
#pragma unroll
      for (int j = 0; j < {self.logits}; ++j) {{
        const float4 other =
            *(LOCAL const float4*)(shared + {walked} + (lane + j * {self.schedule.lanes}) * {pitch} + d);
#pragma unroll
        for (int i = 0; i < {self.rows}; ++i) {{
{products}        }}
      }}
    }}"""

    def of_columns(self, sums: str, factors: int, factor_pitch: int, walked: int, pitch: int, columns: int) -> str:
        """Products of factors in shared memory and four ``columns`` at a time of four rows that are walked.

        Args:
            factors, walked: where both tiles begin, and their floats from row to row.
            columns: sums of a row that a thread has.
        """
        products = "".join(self._of_row(number, sums, pitch) for number in range(4))
        place = f"shared + {factors} + (first + i * {self.apart}) * {factor_pitch} + walked"
        return f"""\
#pragma unroll 2
    for (int walked = 0; walked < {self.step}; walked += 4) {{
      float4 factors[{self.rows}];
#pragma unroll
      for (int i = 0; i < {self.rows}; ++i) factors[i] = *(LOCAL const float4*)({place});
#pragma unroll
      for (int c = 0; c < {columns // 4}; ++c) {{
        const int column = {walked} + walked * {pitch} + (lane + c * {self.schedule.lanes}) * 4;
{products}      }}
    }}"""

    def _of_row(self, number: int, sums: str, pitch: int) -> str:
        """Products of the factors of one walked row of four with four columns of it."""
        products = "".join(
            f"          {sums}[i][c * 4 + {at}] = "
            f"FMA(factors[i].{'xyzw'[number]}, row{number}.{name}, {sums}[i][c * 4 + {at}]);\n"
            for at, name in enumerate("xyzw")
        )
        return f"""\
        const float4 row{number} = *(LOCAL const float4*)(shared + column + {number * pitch});
#pragma unroll
        for (int i = 0; i < {self.rows}; ++i) {{
{products}        }}
"""
