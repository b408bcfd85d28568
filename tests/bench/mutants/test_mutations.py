"""Texts are taken apart as they are written, and changed in one place each."""

from __future__ import annotations

import pytest

from bench.mutants.mutations import mutations_of
from bench.mutants.text import KernelText
from bench.mutants.variants import CHOSEN, one_text

SIGNATURE = 'extern "C" __global__ void __launch_bounds__(64) f(float* __restrict__ X_ptr, float* __restrict__ Y_ptr)'
DECLARED = """\
  __shared__ alignas(64) float a_ptr[64];
  __shared__ alignas(64) float b_ptr[64];
"""


def kernel_of(*lines: str) -> KernelText:
    body = "".join(f"  {line}\n" for line in lines)
    return KernelText(f"// made up\n{SIGNATURE};\n{SIGNATURE} {{\n{DECLARED}{body}}}\n", "f")


def changes(line: str, *kinds: str) -> set[str]:
    """What the mutants of these kinds have in place of a line."""
    kernel = kernel_of(line)
    mutants = [each.applied(kernel.source) for each in mutations_of(kernel) if each.kind in kinds]
    return {mutant.splitlines()[5].strip() for mutant in mutants}


def test_every_synchronization_is_taken_out_alone() -> None:
    kernel = kernel_of("copy_async_commit();", "copy_async_wait_1();", "async_proxy_fence();", "__syncthreads();")
    found = [(each.kind, each.text, kernel.line_of(each.start)) for each in mutations_of(kernel)]
    assert found == [
        ("commit", "((void)0)", 6),
        ("wait", "((void)0)", 7),
        ("late wait", "copy_async_wait_2()", 7),
        ("fence", "((void)0)", 8),
        ("barrier", "((void)0)", 9),
    ]
    assert changes("warp_group_finish_64(sums_ptr);", "wait", "late wait") == {
        "((void)0);",
        "emulator::wait_for_products(EMULATOR_SITE, 1);",
    }


@pytest.mark.parametrize(
    ("line", "kind", "expected"),
    [
        ("Y_ptr[i] = 1.0f;", "global index", {"Y_ptr[((i) + 1)] = 1.0f;", "Y_ptr[((i) - 1)] = 1.0f;"}),
        (
            "*(float4*)(a_ptr + (i * 4)) = v;",
            "shared index",
            {"*(float4*)(a_ptr + (((i * 4)) + 4)) = v;", "*(float4*)(a_ptr + (((i * 4)) - 4)) = v;"},
        ),
        (
            "((volatile float*)a_ptr)[0] = v;",
            "shared index",
            {"((volatile float*)a_ptr)[((0) + 1)] = v;", "((volatile float*)a_ptr)[((0) - 1)] = v;"},
        ),
        (
            "copy_async_16(a_ptr, (t * 16), (&(X_ptr[t])));",
            "operand",
            {
                "copy_async_16(a_ptr, (((t * 16)) + 16), (&(X_ptr[t])));",
                "copy_async_16(a_ptr, (((t * 16)) - 16), (&(X_ptr[t])));",
            },
        ),
        (
            "copy_async_16(a_ptr, (t * 16), (&(X_ptr[t])));",
            "global index",
            {
                "copy_async_16(a_ptr, (t * 16), (&(X_ptr[((t) + 4)])));",
                "copy_async_16(a_ptr, (t * 16), (&(X_ptr[((t) - 4)])));",
            },
        ),
        (
            "load_matrix_x4(f_ptr, 0, a_ptr, o);",
            "operand",
            {"load_matrix_x4(f_ptr, 0, a_ptr, ((o) + 16));", "load_matrix_x4(f_ptr, 0, a_ptr, ((o) - 16));"},
        ),
        (
            "nvcuda::wmma::load_matrix_sync(f_ptr[i], (&(a_ptr[o])), 24);",
            "shared index",
            {
                "nvcuda::wmma::load_matrix_sync(f_ptr[i], (&(a_ptr[((o) + 16)])), 24);",
                "nvcuda::wmma::load_matrix_sync(f_ptr[i], (&(a_ptr[((o) - 16)])), 24);",
            },
        ),
        ("b_ptr[0] = v;", "buffer", {"a_ptr[0] = v;"}),
        (
            "for (int i = 0; i < 8; ++i) {}",
            "trip count",
            {"for (int i = 0; i < 9; ++i) {}", "for (int i = 0; i < 7; ++i) {}"},
        ),
        ("t = __shfl_down_sync(m, v, 4, 32);", "shuffle", {f"t = __shfl_down_sync(m, v, {n}, 32);" for n in (2, 8)}),
        ("mask_ptr[0] = 0xffffffffu;", "shuffle", {"mask_ptr[0] = 0x7fffffffu;"}),
        (
            "if (i < 5) {}",
            "guard",
            {"if (!(i < 5)) {}", "if (true) {}", "if (i < 6) {}", "if (i < 4) {}"},
        ),
        ("j = min((i * 2), 9);", "guard", {"j = ((i * 2));", "j = min((i * 2), 10);"}),
        (
            "copy_async_4_guarded(a_ptr, 0, x, (i < 3));",
            "guard",
            {f"copy_async_4_guarded(a_ptr, 0, x, {text});" for text in ("!((i < 3))", "true", "(i < 4)", "(i < 2)")},
        ),
    ],
)  # fmt: skip
def test_an_operand_is_changed_by_as_much_as_is_accessed_at_a_time(line: str, kind: str, expected: set[str]) -> None:
    assert changes(line, kind) == expected


def test_the_buffer_of_a_step_becomes_that_of_the_next_one() -> None:
    loop = "for (int step = 0; step < 5; ++step) {{ i = {}; }}"
    for text, changed in (
        ("(((step + 2) % 3) * 64)", "(((((step + 2)) + 1) % 3) * 64)"),
        ("((step & 3) * 64)", "((((step) + 1) & 3) * 64)"),
        (
            "((((int64_t)step) + (int64_t)1) & (int64_t)1)",
            "((((((int64_t)step) + (int64_t)1)) + 1) & (int64_t)1)",
        ),
    ):
        assert changes(loop.format(text), "stage") == {loop.format(changed).replace("{{", "{").replace("}}", "}")}
    assert changes(loop.format("(step * 64)"), "stage") == set()


def test_what_nothing_reads_is_left_alone() -> None:
    kernel = kernel_of("int cse_v1 = min(X_ptr[0], 5);", "Y_ptr[cse_v2] = 1.0f;")
    assert {each.kind for each in mutations_of(kernel)} == {"global index"}
    assert {kernel.line_of(each.start) for each in mutations_of(kernel)} == {7}


def test_kernels_that_differ_in_numbers_have_one_shape() -> None:
    first, second = kernel_of("Y_ptr[i + 4] = 1.0f;"), kernel_of("Y_ptr[i + 12] = 0x1p+1f;")
    assert first.shape == second.shape != kernel_of("Y_ptr[i - 4] = 1.0f;").shape
    assert [each.site for each in mutations_of(first)] == [0, 1]


def test_variants_of_a_kernel_have_its_lines_and_shared_arrays_in_common() -> None:
    kernel = kernel_of("Y_ptr[0] = X_ptr[0];")
    sources = [kernel.source, kernel.source.replace("Y_ptr[0]", "Y_ptr[1]")]
    lines = one_text(kernel, sources).splitlines()
    assert [line for line in lines if "__shared__" in line] == [
        "__shared__ alignas(64) float a_ptr[64]; __shared__ alignas(64) float b_ptr[64];"
    ]
    for variant, text in enumerate(("Y_ptr[0] = X_ptr[0];", "Y_ptr[1] = X_ptr[0];")):
        # Line 3 is that of the definition; the arrays' lines are empty.
        (at,) = (number for number, line in enumerate(lines) if line.strip() == text)
        assert lines[at - 4] == '#line 3 "kernel.cu"' and f" f_{variant}(" in lines[at - 3]
        assert lines[at - 2].strip() == lines[at - 1].strip() == ""
    assert f"float* __restrict__ Y_ptr, int* __restrict__ {CHOSEN}) {{" in lines[-6]
    assert lines[-3] == "    case 1: f_1(X_ptr, Y_ptr); break;"
