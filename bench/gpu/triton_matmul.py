"""A matrix product in Triton, tuned on the spot: what a user without our compiler would write.

Blocks of the output are walked in groups of rows, so that their operands stay in L2; masks serve every size. Imported
on a machine with Triton only.
"""
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def _configs() -> list[Any]:
    """Block m, n, k, stages, warps: large products, medium ones, short and thin ones."""
    shapes = [
        (128, 256, 64, 3, 8), (128, 128, 64, 3, 8), (128, 128, 32, 4, 4), (64, 128, 32, 4, 4), (128, 64, 32, 4, 4),
        (64, 64, 32, 3, 4), (32, 64, 64, 4, 4), (16, 128, 64, 4, 4),
    ]  # fmt: skip
    return [
        triton.Config({"BM": m, "BN": n, "BK": k, "GROUP": 8}, num_stages=stages, num_warps=warps)
        for m, n, k, stages, warps in shapes
    ]


def _worth_compiling(configs: list[Any], named_args: dict[str, Any], **more: Any) -> list[Any]:
    """Without those whose operands do not fit into shared memory, and in float32 those that would be unrolled for
    minutes: without matrix units a step's multiply-adds are written out one by one."""
    width = named_args["a"].element_size()
    ieee = width == 4 and more.get("KIND", named_args.get("KIND")) != "tf32"
    fitting = []
    for config in configs:
        m, n, k = (config.kwargs[key] for key in ("BM", "BN", "BK"))
        fits = (m + n) * k * width * config.num_stages <= 200 << 10
        if fits and not (ieee and m * n * k > 128 * 128 * 32):
            fitting.append(config)
    return fitting


def _bench(call: Any, quantiles: Any) -> Any:
    """Time one configuration, in a fifth of the time that Triton takes by itself."""
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


@triton.autotune(
    configs=_configs(),
    key=["m", "n", "k", "KIND"],
    prune_configs_by={"early_config_prune": _worth_compiling},
    do_bench=_bench,
)
@triton.jit
def _kernel(  # noqa: PLR0917
    a, b, c, m, n, k,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_cb, stride_cm, stride_cn,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    blocks_m, blocks_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    group = program // (GROUP * blocks_n)
    first = group * GROUP
    height = tl.minimum(blocks_m - first, GROUP)
    row = first + (program % (GROUP * blocks_n)) % height
    column = (program % (GROUP * blocks_n)) // height

    rows = (row * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (column * BN + tl.arange(0, BN)).to(tl.int64)
    steps = tl.arange(0, BK)
    a_at = a + batch * stride_ab + rows[:, None] * stride_am + steps[None, :] * stride_ak
    b_at = b + batch * stride_bb + steps[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        inside = start + steps < k
        x = tl.load(a_at, mask=(rows[:, None] < m) & inside[None, :], other=0.0)
        y = tl.load(b_at, mask=inside[:, None] & (columns[None, :] < n), other=0.0)
        total = tl.dot(x, y, total, input_precision="tf32" if KIND == "tf32" else "ieee")
        a_at += BK * stride_ak
        b_at += BK * stride_bk
    c_at = c + batch * stride_cb + rows[:, None] * stride_cm + columns[None, :] * stride_cn
    tl.store(c_at, total.to(c.dtype.element_ty), mask=(rows[:, None] < m) & (columns[None, :] < n))


def matmul(a: Any, b: Any, tf32: bool) -> Any:
    """``a @ b`` for matrices or batches of them, any strides; float32 products round to TF32 only with ``tf32``."""
    single = a.dim() == 2
    a3, b3 = (a[None], b[None]) if single else (a, b)
    batch, m, k = a3.shape
    n = b3.shape[-1]
    out = torch.empty((batch, m, n), device=a.device, dtype=a.dtype)
    kind = "tf32" if tf32 else str(a.dtype)[6:]

    def grid(sizes: dict[str, int]) -> tuple[int, int]:
        return (triton.cdiv(m, sizes["BM"]) * triton.cdiv(n, sizes["BN"]), batch)

    _kernel[grid](a3, b3, out, m, n, k, *a3.stride(), *b3.stride(), *out.stride(), KIND=kind)
    return out[0] if single else out
