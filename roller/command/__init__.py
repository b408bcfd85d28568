"""What the commands share: options, tables, published JSON Schemas, the micro-benchmarks' command."""
