"""GCC's sanitizers for kernels that LLVM compiles: the loads and stores of a kernel, after LLVM has optimised it, are
announced to the sanitizer's runtime as GCC announces those of C.

So every access of the kernel's machine code is checked, vectors of any width at once. Local arrays of a kernel have no
red zones between them.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from codegen.generators import linker

#: What announces an access to the runtime: a function of the address and the bytes.
_TOLD_BY = {
    "address": {"load": "__asan_loadN", "store": "__asan_storeN"},
    "thread": {"load": "__tsan_read_range", "store": "__tsan_write_range"},
}
_LOAD = re.compile(r"^\s+%[\w.]+ = load (?P<type><\d+ x \w+>|\w+), ptr (?P<address>%[\w.]+)")
_STORE = re.compile(r"^\s+store (?P<type><\d+ x \w+>|\w+) .*, ptr (?P<address>%[\w.]+)(?:,|$)")
#: Runs of bytes, copied and filled, which become calls or vector instructions.
_RUN = re.compile(
    r"^\s+(?:tail )?call void @llvm\.mem(?:cpy|move|set)\.[\w.]+\(ptr [^,%]*(?P<store>%[\w.]+), "
    r"(?:ptr [^,%]*(?P<load>%[\w.]+)|i8 [^,]+), i64 (?P<bytes>[^,]+),"
)
#: Elements of a vector that are read or written where its mask says so, side by side or each at a place of its own.
_MASKED = re.compile(
    r"@llvm\.masked\.(?P<what>load|gather|store|scatter)\.v(?P<lanes>\d+)(?P<type>[fip]\d+)\..*?"
    r"(?P<where><\d+ x ptr>|\bptr) [^,%]*(?P<address>%[\w.]+), "
    r"(?P<mask><\d+ x i1> (?:splat \(i1 \w+\)|<[^>]*>|%[\w.]+))"
)
_VECTOR = re.compile(r"<(\d+) x (\w+)>")
_BYTES = {"half": 2, "float": 4, "double": 8, "ptr": 8}
#: What else may reach memory: loads and stores of another form, calls that are given pointers.
_REACHES = re.compile(
    r"^\s+(?:%[\w.]+ = )?(?:load|store|cmpxchg|atomicrmw|(?:tail )?call .*@(?P<name>[\w.]+)\(.*\bptr\b)"
)
_DEFINED = re.compile(r"^define .*@([\w.]+)\(", re.MULTILINE)
#: What asks for memory ahead of its use, wherever that is.
_HARMLESS = ("llvm.prefetch.", "llvm.lifetime.", "llvm.assume")


@dataclass(frozen=True)
class Outcome:
    """How a program under a sanitizer ended: its exit status, and what it wrote to stderr."""

    status: int
    report: str

    @property
    def is_clean(self) -> bool:
        return self.status == 0 and not self.report


def sanitizer_missing(sanitizer: str, folder: Path) -> str | None:
    """Why no program runs under a sanitizer here; None where one does."""
    source = folder / "nothing.c"
    source.write_text("int main(void) { return 0; }\n")
    try:
        outcome = run(linked(folder / "nothing", [source], sanitizer))
    except subprocess.CalledProcessError as error:
        return f"the C compiler has no -fsanitize={sanitizer}: {error.stderr.strip()[-200:]}"
    return None if outcome.is_clean else f"-fsanitize={sanitizer} does not run here: {outcome.report.strip()[-200:]}"


def linked(program: Path, parts: Sequence[Path], sanitizer: str, *options: str) -> Path:
    """C files and objects, compiled and linked with a sanitizer."""
    command = [str(linker()), "-std=c11", "-O1", "-g1", "-w", f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]
    command += [*options, *map(os.fspath, parts), "-o", os.fspath(program), "-lm", "-lpthread"]
    subprocess.run(command, capture_output=True, text=True, check=True)
    return program


def run(program: Path, *arguments: Path) -> Outcome:
    """The program, run to its end; a sanitizer ends it at the first fault."""
    environment = {**os.environ, "ASAN_OPTIONS": "redzone=256:detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    command = [*_in_place(), program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    return Outcome(done.returncode, done.stderr)


@lru_cache(maxsize=1)
def _in_place() -> tuple[str, ...]:
    """What runs a program without random addresses, some of which leave ThreadSanitizer no room for its own."""
    prefix = ("setarch", "-R")
    try:
        is_allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return ()
    return prefix if is_allowed else ()


def announced(assembly: str, sanitizer: str) -> str:
    """LLVM's text of a kernel, in which every access is announced to the sanitizer before it is made.

    >>> text = "define void @f(ptr %p) {\\n  %1 = load <4 x float>, ptr %p, align 4\\n  ret void\\n}"
    >>> announced(text, "thread").splitlines()[1]
    '  call void @__tsan_read_range(ptr %p, i64 16)'

    Raises:
        ValueError: something reaches memory in another way.
    """
    names = _TOLD_BY[sanitizer]
    lines, harmless = [], (*_HARMLESS, *_DEFINED.findall(assembly))
    for line in assembly.splitlines():
        if masked := _MASKED.search(line):
            lines += _masked(masked, f"announced.{len(lines)}", names)
        accesses = _accesses(line)
        lines += [f"  call void @{names[what]}(ptr {address}, i64 {size})" for what, address, size in accesses]
        other = None if masked or accesses else _REACHES.match(line)
        if other and not (other["name"] or "").startswith(harmless):
            raise ValueError(f"reaches memory unseen: {line.strip()}")
        lines.append(line)
    return "\n".join([*lines, *(f"declare void @{name}(ptr, i64)" for name in names.values()), ""])


def _masked(access: re.Match[str], name: str, names: Mapping[str, str]) -> list[str]:
    """What tells of the elements of an access that its mask lets through: of the others no bytes."""
    lines, size = [], int(access["type"][1:]) // 8
    function = names["load" if access["what"] in ("load", "gather") else "store"]
    for lane in range(int(access["lanes"])):
        own = f"%{name}.{lane}"
        address = f"getelementptr i8, ptr {access['address']}, i64 {lane * size}"
        if access["where"] != "ptr":
            address = f"extractelement {access['where']} {access['address']}, i64 {lane}"
        lines += [
            f"  {own}.at = {address}",
            f"  {own}.on = extractelement {access['mask']}, i64 {lane}",
            f"  {own}.bytes = select i1 {own}.on, i64 {size}, i64 0",
            f"  call void @{function}(ptr {own}.at, i64 {own}.bytes)",
        ]
    return lines


def _accesses(line: str) -> list[tuple[str, str, str]]:
    """What a line does to memory: ``"load"`` or ``"store"``, the address, the bytes."""
    if load := _LOAD.match(line):
        return [("load", load["address"], str(_bytes(load["type"])))]
    if store := _STORE.match(line):
        return [("store", store["address"], str(_bytes(store["type"])))]
    if many := _RUN.match(line):
        return [(what, many[what], many["bytes"]) for what in ("load", "store") if many[what]]
    return []


def object_of(assembly: str) -> bytes:
    """Machine code for this processor of LLVM's text."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2, reloc="pic"
    )
    module = llvm.parse_assembly(assembly)
    module.verify()
    return machine.emit_object(module)


def _bytes(kind: str) -> int:
    vector = _VECTOR.fullmatch(kind)
    if vector:
        return int(vector[1]) * _bytes(vector[2])
    return _BYTES[kind] if kind in _BYTES else -(-int(kind.removeprefix("i")) // 8)
