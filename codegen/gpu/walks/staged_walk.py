"""How two tiles arrive that a step multiplies one after the other, while warps multiply what came before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StagedWalk:
    """The copies and waits of a walk, as texts around its products.

    Attributes:
        stages: buffers of either tile: with one, either arrives while the other is used; with two, a whole step
            arrives during the one before it.
        own: what copies a block's own rows, before the first step.
        first, second: what copies the tiles of a step, of products that come in this order.
        first_bytes, second_bytes: of either tile, as text.
        first_step, step, number: the first step, and the current one as copies and as ``steps`` count it.
        held: text after the first wait, which brings a warp's own rows into registers; empty where they stay in shared
            memory.
    """

    stages: int
    own: str
    first: str
    second: str
    first_bytes: str
    second_bytes: str
    first_step: str
    step: str
    number: str
    held: str

    def prologue(self) -> str:
        """What is under way before the first step."""
        names = (self.first,) if self.stages == 1 else (self.first, self.second)
        first = "\n    ".join(f"copy_{name}({self.first_step}, 0);" for name in names)
        return f"""\
  if (steps > 0) {{
    copy_{self.own}();
    {first}
    copy_async_commit();
  }}"""

    def before_first(self) -> str:
        """Waits for the first tile, and starts what comes next."""
        first, second = self.first[:-1], self.second[:-1]
        if self.stages == 1:
            return f"""\
    const int {self.first}_now = {first}_buffers, {self.second}_now = {second}_buffers;
    copy_async_wait_0();
    __syncthreads();
    copy_{self.second}({self.step}, 0);
    copy_async_commit();{self.held}"""
        return f"""\
    const int buffer = {self.number} % 2, {self.first}_now = {first}_buffers + buffer * {self.first_bytes};
    const int {self.second}_now = {second}_buffers + buffer * {self.second_bytes};
    copy_async_wait_0();
    __syncthreads();
    if ({self.number} + 1 < steps) {{
      copy_{self.first}({self.step} + 1, 1 - buffer);
      copy_{self.second}({self.step} + 1, 1 - buffer);
      copy_async_commit();
    }}{self.held}"""

    def before_second(self) -> str:
        """Waits for the second tile where it shares a buffer with those of all other steps."""
        if self.stages > 1:
            return ""
        return f"""\
    copy_async_wait_0();
    __syncthreads();
    if ({self.number} + 1 < steps) {{
      copy_{self.first}({self.step} + 1, 0);
      copy_async_commit();
    }}"""


def held_rows(number: str, loads: str) -> str:
    """What brings a warp's own rows into registers at the first step, ``loads`` those of depth ``d``."""
    return f"""
    if ({number} == 0) {{
#pragma unroll
      for (int d = 0; d < DEPTH / 16; ++d) {{
{loads}
      }}
    }}"""
