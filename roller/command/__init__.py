"""Common parts of the commands: options, tables, published JSON Schemas, the micro-benchmarks' command."""
