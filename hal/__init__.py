"""The hardware abstraction layer: what the compiler knows of a device, and the error that bad input raises."""

from hal.catalog import all_devices, device_aliases, device_names, device_schema, load_device, provenance_of
from hal.device import (
    Clocks,
    CodeGenerator,
    DeviceSpec,
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
from hal.errors import InputError
from hal.keypaths import leaves

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
    "SharedBy",
    "Teu",
    "Throughput",
    "all_devices",
    "device_aliases",
    "device_names",
    "device_schema",
    "leaves",
    "load_device",
    "provenance_of",
]
