"""The hardware abstraction layer: what the compiler knows of a device, and the error that bad input raises.

Names are imported when they are first used: code on a machine with a GPU needs the error alone, and not msgspec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.support.lazy import imported_on_use

if TYPE_CHECKING:
    from hal.catalog import all_devices, device_aliases, device_names, load_device, provenance_of
    from hal.node_catalog import all_nodes, load_node, node_names, usual_node
    from hal.spec.device import DeviceSpec
    from hal.spec.file import device_schema
    from hal.spec.node import NodeSpec
    from hal.spec.numbers import leaves
    from hal.spec.parts import (
        Clocks,
        CodeGenerator,
        Dtype,
        Framework,
        Kind,
        Limits,
        MatrixInstruction,
        MemoryLayer,
        SharedBy,
        Teu,
        Throughput,
    )
    from hal.support.errors import InputError

#: Module -> the names it gives to the package.
_HOMES = {
    "hal.catalog": (
        "all_devices",
        "device_aliases",
        "device_names",
        "load_device",
        "provenance_of",
    ),
    "hal.node_catalog": ("all_nodes", "load_node", "node_names", "usual_node"),
    "hal.spec.device": ("DeviceSpec",),
    "hal.spec.file": ("device_schema",),
    "hal.spec.node": ("NodeSpec",),
    "hal.spec.numbers": ("leaves",),
    "hal.spec.parts": (
        "Clocks",
        "CodeGenerator",
        "Dtype",
        "Framework",
        "Kind",
        "Limits",
        "MatrixInstruction",
        "MemoryLayer",
        "SharedBy",
        "Teu",
        "Throughput",
    ),
    "hal.support.errors": ("InputError",),
}

__getattr__ = imported_on_use(__name__, _HOMES)

__all__ = [
    "Clocks",
    "CodeGenerator",
    "DeviceSpec",
    "Dtype",
    "Framework",
    "InputError",
    "Kind",
    "Limits",
    "MatrixInstruction",
    "MemoryLayer",
    "NodeSpec",
    "SharedBy",
    "Teu",
    "Throughput",
    "all_devices",
    "all_nodes",
    "device_aliases",
    "device_names",
    "device_schema",
    "leaves",
    "load_device",
    "load_node",
    "node_names",
    "provenance_of",
    "usual_node",
]
