"""``roller compile``: an answer known from before, or kernels built, written and printed one operator after another."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roller.command.options import progress

if TYPE_CHECKING:
    from codegen.bundle.records import Bundle
    from hal.spec.device import DeviceSpec
    from roller.compile.pipeline import CompiledOperator


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """Operators of a file for a board, and what was asked of their kernels."""

    file: Path
    device: DeviceSpec
    out: Path
    top_k: int
    verify: int
    method: str
    algorithms: str | None
    cached: bool
    as_json: bool
    start: float

    @cached_property
    def key(self) -> str:
        """The key of the answer among those kept."""
        from roller.command.known import answer_key

        return answer_key(self.file, self.device, self.top_k, self.verify, self.method, self.algorithms)

    def show_known(self) -> bool:
        """Write and print an answer that was kept; False where there is none."""
        from roller.command.known import known_answer, show_known

        known = known_answer(self.key)
        if known is not None:
            show_known(known, self.device, self.out, self.start, as_json=self.as_json)
        return known is not None

    def build(self, pool: Executor) -> tuple[list[tuple[CompiledOperator, Bundle]], list[CompiledOperator]]:
        """Every operator with its bundle as it was written, and the operators without a kernel."""
        from codegen.compile.cache import known_first
        from roller.algorithms import parse_algorithms
        from roller.command.tables import compiled_json, refused_json
        from roller.compile.bundles import write_bundle
        from roller.compile.pipeline import compile_operators
        from sokoban.language.operators import load_operators

        expressions = load_operators(self.file)
        results = compile_operators(
            expressions,
            self.device,
            top_k=self.top_k,
            verify=self.verify,
            pool=known_first(pool) if self.cached else pool,
            method=self.method,
            algorithms=parse_algorithms(self.algorithms),
        )
        finished, without = [], []
        with progress(len(expressions), show=not self.as_json) as advance:
            for compiled in results:
                advance(compiled.expr.name)
                if compiled.error:
                    without.append(compiled)
                    if self.as_json:
                        click.echo(refused_json(compiled, self.device))
                    continue
                bundle = write_bundle(compiled, self.device, self.out)
                if self.as_json:
                    click.echo(compiled_json(compiled, bundle))
                finished.append((compiled, bundle))
        return finished, without

    def keep(self, finished: list[tuple[CompiledOperator, Bundle]], *, is_whole: bool) -> None:
        """Keep a whole answer, unless something in it may be otherwise the next time."""
        from roller.command.known import keep_answer
        from roller.command.tables import is_lasting, known_operator

        is_whole = is_whole and all(is_lasting(compiled, self.verify) for compiled, _ in finished)
        keep_answer(self.key, [known_operator(compiled, bundle) for compiled, bundle in finished] if is_whole else [])
