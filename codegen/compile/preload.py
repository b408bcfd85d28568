"""Imported by the server process that build workers are forked from: what every one of them needs, once."""

import codegen.gpu.source.nvrtc
import codegen.gpu.source.text
import codegen.verify.cpu  # noqa: F401
