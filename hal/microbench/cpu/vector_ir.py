"""The loops that load a core, as LLVM IR: vectors of exactly the machine's width, nothing for a compiler to improve.

A compiler asked for the same loops in C or through Numba chooses the width itself (on AVX-512 machines often half of
it), and would measure its own choice.
"""

from __future__ import annotations

from collections.abc import Callable

from hal.microbench.cpu import product_ir
from hal.spec.parts import CPU_AHEAD_BYTES, CPU_LINE_BYTES

#: Vectors per turn of the loops over memory.
UNROLL = 8

#: float32 values of a page of 4 KiB.
PAGE_ELEMENTS = 1024

#: Instructions that do nothing, for every multiply-add of the loop that measures how many a core starts.
IDLE = 3

_PLACES = 4
#: What the copy moves at a time; its arrays hold a multiple.
COPY_ELEMENTS = _PLACES * PAGE_ELEMENTS

_LOOP = """
define void @{name}({signature}) {{
entry:
{before}
  br label %pass
pass:
  %turn = phi i64 [ 0, %entry ], [ %turn.next, %pass.end ]
{carried}
  br label %loop
loop:
  %i = phi i64 [ 0, %pass ], [ %i.next, %loop ]
{body}
  %i.next = add i64 %i, {step}
  %more = icmp ult i64 %i.next, %count
  br i1 %more, label %loop, label %pass.end
pass.end:
  %turn.next = add i64 %turn, 1
  %again = icmp ult i64 %turn.next, %passes
  br i1 %again, label %pass, label %done
done:
{after}
  ret void
}}
"""


def module(lanes: int, registers: int) -> str:
    """All loops for vectors of ``lanes`` float32 values on a core with that many vector registers."""
    vector = f"<{lanes} x float>"
    declared = (
        f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})\n"
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n"
    )
    count = chains(registers)
    loops = (
        _read(lanes),
        _read(lanes, places=UNROLL),
        _add(lanes),
        _copy(lanes),
        _fma(lanes, count),
        _fma(lanes, count, IDLE),
        _SCALAR,
    )
    return declared + "".join(loops) + product_ir.tile(lanes, tile_rows(registers)) + "\n!0 = !{i32 1}\n"


def chains(registers: int) -> int:
    """Independent multiply-adds: as many as leave room for two operands and two temporaries."""
    return registers - 4


def tile_rows(registers: int) -> int:
    """Rows of a register tile of two vectors each: its accumulators are the chains."""
    return chains(registers) // 2


def _each(count: int, line: Callable[[int], str]) -> str:
    return "\n".join(line(index) for index in range(count))


def _at(name: str, base: str, index: int, lanes: int) -> str:
    """``%name.at`` points at the ``index``-th vector after element ``%i`` of ``base``."""
    return f"  %{name}.o = add i64 %i, {index * lanes}\n  %{name}.at = getelementptr float, ptr {base}, i64 %{name}.o"


def _read(lanes: int, places: int = 1) -> str:
    """Reads with one exclusive or per vector, into as many accumulators; ``read_apart`` reads in ``places`` equal parts
    of the array at a time."""
    kind = f"<{lanes} x i32>"
    width = UNROLL // places

    def at(j: int) -> str:
        place, vector = divmod(j, width)
        return (
            f"  %v{j}.p = mul i64 %count, {place}\n  %v{j}.i = add i64 %i, {vector * lanes}\n"
            f"  %v{j}.o = add i64 %v{j}.p, %v{j}.i\n  %v{j}.at = getelementptr float, ptr %a, i64 %v{j}.o"
        )

    carried = _each(UNROLL, lambda j: f"  %p{j} = phi {kind} [ zeroinitializer, %entry ], [ %y{j}, %pass.end ]")
    phis = _each(UNROLL, lambda j: f"  %x{j} = phi {kind} [ %p{j}, %pass ], [ %y{j}, %loop ]")
    loads = _each(
        UNROLL,
        lambda j: f"{at(j)}\n  %v{j} = load {kind}, ptr %v{j}.at, align {4 * lanes}\n  %y{j} = xor {kind} %x{j}, %v{j}",
    )
    stores = _each(
        UNROLL,
        lambda j: f"  %s{j} = getelementptr {kind}, ptr %out, i64 {j}\n  store {kind} %y{j}, ptr %s{j}, align 4",
    )
    return _LOOP.format(
        name="read" if places == 1 else "read_apart",
        signature="ptr %a, ptr %out, i64 %whole, i64 %passes",
        before=f"  %count = udiv i64 %whole, {places}",
        carried=carried,
        body=f"{phis}\n{loads}",
        step=width * lanes,
        after=stores,
    )


def _ahead(base: str, index: int, lanes: int, written: int = 0) -> str:
    """A request for the line that the ``index``-th vector begins, `CPU_AHEAD_BYTES` further on; empty where it begins
    none."""
    if 4 * index * lanes % CPU_LINE_BYTES:
        return ""
    place = f"{base}{index}.ahead"
    return (
        f"  %{place} = getelementptr i8, ptr %{base}{index}.at, i64 {CPU_AHEAD_BYTES}\n"
        f"  call void @llvm.prefetch.p0(ptr %{place}, i32 {written}, i32 3, i32 1)\n"
    )


def _add(lanes: int) -> str:
    """c = a + b, each line asked for ahead, as kernels do (`codegen.cpu.vectors`)."""
    kind = f"<{lanes} x float>"
    body = _each(
        UNROLL,
        lambda j: (
            f"{_at(f'a{j}', '%a', j, lanes)}\n{_at(f'b{j}', '%b', j, lanes)}\n{_at(f'c{j}', '%c', j, lanes)}\n"
            f"{_ahead('a', j, lanes)}{_ahead('b', j, lanes)}{_ahead('c', j, lanes, written=1)}"
            f"  %a{j} = load {kind}, ptr %a{j}.at, align {4 * lanes}\n"
            f"  %b{j} = load {kind}, ptr %b{j}.at, align {4 * lanes}\n"
            f"  %c{j} = fadd {kind} %a{j}, %b{j}\n  store {kind} %c{j}, ptr %c{j}.at, align {4 * lanes}"
        ),
    )
    signature = "ptr %a, ptr %b, ptr %c, i64 %count, i64 %passes"
    return _LOOP.format(
        name="add", signature=signature, before="", carried="", body=body, step=UNROLL * lanes, after=""
    )


def _copy(lanes: int) -> str:
    """c = a as the C library copies long arrays: stores past the caches, four neighbouring pages at a time."""
    kind, width = f"<{lanes} x float>", UNROLL // _PLACES
    start = f"""  %within = and i64 %i, {PAGE_ELEMENTS - 1}
  %page = sub i64 %i, %within
  %pages = mul i64 %page, {_PLACES}
  %start = add i64 %pages, %within"""

    def move(j: int) -> str:
        place, vector = divmod(j, width)
        offset = f"  %o{j} = add i64 %start, {place * PAGE_ELEMENTS + vector * lanes}"
        pointers = "\n".join(f"  %{name}{j}.at = getelementptr float, ptr %{name}, i64 %o{j}" for name in "ac")
        return (
            f"{offset}\n{pointers}\n  %v{j} = load {kind}, ptr %a{j}.at, align {4 * lanes}\n"
            f"  store {kind} %v{j}, ptr %c{j}.at, align {4 * lanes}, !nontemporal !0"
        )

    return _LOOP.format(
        name="copy",
        signature="ptr %a, ptr %c, i64 %whole, i64 %passes",
        before=f"  %count = udiv i64 %whole, {_PLACES}",
        carried="",
        body=f"{start}\n{_each(UNROLL, move)}",
        step=width * lanes,
        after="",
    )


def _fma(lanes: int, count: int, idle: int = 0) -> str:
    """``count`` chains of x = x * a + b; with ``idle`` instructions that do nothing after each it is called "issue"."""
    kind = f"<{lanes} x float>"
    before = (
        f"  %a = load {kind}, ptr %operands, align 4\n"
        f"  %b.at = getelementptr {kind}, ptr %operands, i64 1\n  %b = load {kind}, ptr %b.at, align 4"
    )
    carried = _each(count, lambda j: f"  %p{j} = phi {kind} [ %a, %entry ], [ %y{j}, %pass.end ]")
    phis = _each(count, lambda j: f"  %x{j} = phi {kind} [ %p{j}, %pass ], [ %y{j}, %loop ]")
    products = _each(
        count,
        lambda j: (
            f"  %y{j} = call {kind} @llvm.fma.v{lanes}f32({kind} %x{j}, {kind} %a, {kind} %b)"
            + idle * '\n  call void asm sideeffect "nop", ""()'
        ),
    )
    stores = _each(
        count,
        lambda j: f"  %s{j} = getelementptr {kind}, ptr %out, i64 {j}\n  store {kind} %y{j}, ptr %s{j}, align 4",
    )
    return _LOOP.format(
        name="issue" if idle else "fma",
        signature="ptr %operands, ptr %out, i64 %count, i64 %passes",
        before=before,
        carried=carried,
        body=f"{phis}\n{products}",
        step=1,
        after=stores,
    )


_LINKS, _ADDITIONS = 16, 64
_CHAIN = _each(_LINKS, lambda j: f"  %p{j + 1} = load ptr, ptr %p{j}, align 8")
_COUNT = _each(
    _ADDITIONS,
    # The empty assembly hides from LLVM that the additions are one product.
    lambda j: f"  %h{j} = add i64 %x{j}, %one\n" + f'  %x{j + 1} = call i64 asm sideeffect "", "=r,0"(i64 %h{j})',
)
_SCALAR = f"""
define void @chase(ptr %first, ptr %out, i64 %count) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %p0 = phi ptr [ %first, %entry ], [ %p{_LINKS}, %loop ]
{_CHAIN}
  %i.next = add i64 %i, {_LINKS}
  %more = icmp ult i64 %i.next, %count
  br i1 %more, label %loop, label %done
done:
  store ptr %p{_LINKS}, ptr %out, align 8
  ret void
}}

define void @count(i64 %one, ptr %out, i64 %count) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %x0 = phi i64 [ 0, %entry ], [ %x{_ADDITIONS}, %loop ]
{_COUNT}
  %i.next = add i64 %i, {_ADDITIONS}
  %more = icmp ult i64 %i.next, %count
  br i1 %more, label %loop, label %done
done:
  store i64 %x{_ADDITIONS}, ptr %out, align 8
  ret void
}}

define void @barrier(ptr %counter, i64 %threads, i64 %rounds) {{
entry:
  br label %round
round:
  %i = phi i64 [ 0, %entry ], [ %i.next, %arrived ]
  %i.next = add i64 %i, 1
  %all = mul i64 %i.next, %threads
  %before = atomicrmw add ptr %counter, i64 1 acq_rel
  br label %wait
wait:
  %seen = load atomic i64, ptr %counter acquire, align 8
  %here = icmp uge i64 %seen, %all
  br i1 %here, label %arrived, label %wait
arrived:
  %more = icmp ult i64 %i.next, %rounds
  br i1 %more, label %round, label %done
done:
  ret void
}}
"""
