"""Imported by the server process that build workers are forked from: what every one of them needs, once."""

import codegen.device_compiler
import codegen.targets
import codegen.verify
import codegen.verify_native  # noqa: F401
