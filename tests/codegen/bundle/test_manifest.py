"""The manifest: its JSON, its schema, and that one reads what the other wrote."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from codegen.bundle.manifest import manifest_schema, read_manifest, to_json
from codegen.bundle.records import (
    FORMAT,
    Argument,
    KernelRecord,
    Manifest,
    ProfileRecord,
    ReferenceLaunch,
    ReferenceRecord,
    VerificationRecord,
)

KERNEL = KernelRecord(
    rank=1, entry="roller_m_kernel", source="kernel_1.cu", binary=None, schedule="kernel_1.schedule.json",
    grid=(3, 1, 1), block=(64, 1, 1), shared_bytes=512, dynamic_shared_bytes=0, registers=None, spill_bytes=None,
    seconds=3.25e-6, bound="dram", stage_seconds={"dram": 1e-6}, tiles={"shared": {"m": 32}}, policy="scale up",
    verified=None, verification=None,
)  # fmt: skip
MANIFEST = Manifest(
    format=FORMAT, name="m", device="v100-sxm2-16gb", architecture="sm_70", statements=("C[m] = A[m]",), axes={"m": 7},
    fused_axes={}, accumulate="float32", arguments=(Argument(name="A", role="input", dtype="float32", shape=(7,)),),
    notes=(), kernels=(KERNEL,),
)  # fmt: skip


def test_a_manifest_reads_as_it_was_written(tmp_path: Path) -> None:
    checked = VerificationRecord(
        passed=True, method="opencl", relative_error=1e-7, tolerance=1e-4, axis_sizes={"m": 7}, reason=""
    )
    emulated = replace(
        checked, method="cuda, emulated", engine="emulator", checks=("values", "races"), seeds=(0, 1, 2),
        needless=("line 41: __syncthreads();",),
    )  # fmt: skip
    profiled = ProfileRecord(
        predicted_rank=2, spread_seconds=1e-8, repeats=20, launches=100, prediction_error=-0.1, relative_error=1e-7,
        tolerance=1e-4, struck_out="", loaded="cubin", board="NVIDIA H100", capability="9.0", versions={"cupy": "14"},
    )  # fmt: skip
    launch = ReferenceLaunch(entry="m_reference_0", grid=(1, 1, 1), block=(256, 1, 1), tensors=("A", "C"))
    reference = ReferenceRecord(
        source="reference.cu", launches=(launch,), workspace={"C": 7}, tolerance=1e-4, ranges={"A": (-1.0, 1.0)}
    )
    measured = replace(KERNEL, profiled_seconds=2e-6, profile=profiled, zero_output=True)
    for manifest in (
        MANIFEST,
        replace(MANIFEST, kernels=(measured,), reference=reference),
        replace(MANIFEST, kernels=(replace(KERNEL, verified=True, verification=checked, binary="k.cubin"),)),
        replace(MANIFEST, kernels=(replace(KERNEL, verified=True, verification=emulated),)),
    ):
        (tmp_path / "manifest.json").write_bytes(to_json(manifest))
        assert read_manifest(tmp_path) == manifest


def test_a_manifest_from_before_engines_were_recorded_is_read(tmp_path: Path) -> None:
    checked = {
        "passed": True, "method": "opencl", "relative_error": 1e-7, "tolerance": 1e-4, "axis_sizes": {"m": 7},
        "reason": "",
    }  # fmt: skip
    data = json.loads(to_json(MANIFEST))
    data["kernels"][0] |= {"verified": True, "verification": checked}
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    record = read_manifest(tmp_path).kernels[0].verification
    assert record is not None and (record.method, record.engine, record.checks, record.seeds) == ("opencl", "", (), ())


def test_json_is_indented_in_order_of_declaration_and_ends_its_line() -> None:
    text = to_json(MANIFEST).decode()
    assert text.endswith("}\n") and not text.endswith("\n\n")
    assert text.splitlines()[1] == '  "format": 1,'
    # What only some bundles have comes last, and is left out of the others.
    assert list(json.loads(text)) == required(Manifest)
    assert list(json.loads(text)["kernels"][0]) == required(KernelRecord)


def required(record: Any) -> list[str]:
    """Names of the fields that every record has."""
    return [field.name for field in fields(record) if field.default is MISSING and field.default_factory is MISSING]


def test_times_and_sizes_carry_their_unit_in_the_key() -> None:
    kernel_keys = {field.name for field in fields(KernelRecord)}
    for key in {field.name for field in fields(Manifest)} | kernel_keys:
        assert not key.endswith(("_us", "_ms", "_ns", "_time", "_kib"))
    assert {"seconds", "stage_seconds", "shared_bytes", "spill_bytes"} <= kernel_keys


@pytest.mark.slow
def test_the_schema_takes_a_manifest_and_nothing_less() -> None:
    schema = manifest_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    data = json.loads(to_json(MANIFEST))
    jsonschema.validate(data, schema)
    for key in data:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({k: v for k, v in data.items() if k != key}, schema)


@pytest.mark.parametrize(
    ("change", "where"),
    [({"kernels": [{}]}, "kernels"), ({"axes": {"m": "7"}}, "axes"), ({"format": "one"}, "format")],
)
def test_another_shape_is_refused_with_the_place(tmp_path: Path, change: dict[str, Any], where: str) -> None:
    data = json.loads(to_json(MANIFEST)) | change
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(msgspec.ValidationError, match=where):
        read_manifest(tmp_path)
