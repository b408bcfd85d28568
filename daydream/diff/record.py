"""The comparison for programs: JSON of a published schema. Times are seconds, means of the steps."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from daydream.diff.compare import Amount, Change, Difference, OperatorChange, Side, Status
from daydream.report.analysis import critical_record, seconds


class AmountRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks in a step: their number, their time, and the standard error of that over the steps."""

    count: float
    seconds: float
    standard_error_seconds: float


class ChangeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel, or a kind of GPU tasks, before and after."""

    name: str
    status: Status
    before: AmountRecord
    after: AmountRecord
    change_seconds: float


class OperatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An operator before and after, on the GPU and on the CPU, with its kernels, the largest change first."""

    name: str
    status: Status
    before: AmountRecord
    after: AmountRecord
    change_seconds: float
    cpu_status: Status
    cpu_before: AmountRecord
    cpu_after: AmountRecord
    cpu_change_seconds: float
    kernels: list[ChangeRecord]


class SideRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One recording; times are None where they are not known."""

    trace: str
    device: str | None
    steps: list[str]
    measured_seconds: float | None
    simulated_seconds: float | None
    gpu_seconds: float | None
    critical_path_seconds: dict[str, float | None]
    unknown_share_of_gpu_time: float | None
    warnings: list[str]


class DiffRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``daydream diff --json``: operators that changed by more than noise, the largest change first."""

    before: SideRecord
    after: SideRecord
    operators: list[OperatorRecord]
    operators_unchanged: int
    kinds: list[ChangeRecord]


def diff_record(difference: Difference, warnings: tuple[tuple[str, ...], tuple[str, ...]]) -> DiffRecord:
    """The comparison as JSON, with the warnings of both recordings."""
    return DiffRecord(
        before=_side(difference.before, warnings[0]),
        after=_side(difference.after, warnings[1]),
        operators=[_operator(each) for each in difference.operators],
        operators_unchanged=difference.same,
        kinds=[_change(each) for each in difference.kinds],
    )


def diff_schema() -> dict[str, Any]:
    """The JSON Schema of ``daydream diff --json``."""
    schema = msgspec.json.schema(DiffRecord)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Daydream comparison", **schema}


def schema_text() -> str:
    """The schema as indented JSON, as it stands in this package's ``diff.schema.json``."""
    return json.dumps(diff_schema(), indent=2) + "\n"


def _amount(amount: Amount) -> AmountRecord:
    return AmountRecord(
        count=round(amount.count, 3),
        seconds=round(amount.us * 1e-6, 9),
        standard_error_seconds=round(amount.error_us * 1e-6, 9),
    )


def _change(change: Change) -> ChangeRecord:
    return ChangeRecord(
        name=change.name,
        status=change.status,
        before=_amount(change.before),
        after=_amount(change.after),
        change_seconds=round(change.change_us * 1e-6, 9),
    )


def _operator(change: OperatorChange) -> OperatorRecord:
    return OperatorRecord(
        name=change.name,
        status=change.status,
        before=_amount(change.before),
        after=_amount(change.after),
        change_seconds=round(change.change_us * 1e-6, 9),
        cpu_status=change.cpu_status,
        cpu_before=_amount(change.cpu_before),
        cpu_after=_amount(change.cpu_after),
        cpu_change_seconds=round(change.cpu_change_us * 1e-6, 9),
        kernels=[_change(each) for each in change.kernels],
    )


def _side(side: Side, warnings: tuple[str, ...]) -> SideRecord:
    return SideRecord(
        trace=side.path,
        device=side.board or None,
        steps=list(side.steps),
        measured_seconds=seconds(side.measured_us),
        simulated_seconds=seconds(side.simulated_us),
        gpu_seconds=seconds(side.gpu_us),
        critical_path_seconds=critical_record(side.critical_us),
        unknown_share_of_gpu_time=round(side.unknown, 6) if side.unknown == side.unknown else None,
        warnings=list(warnings),
    )
