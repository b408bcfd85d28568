"""What the commands share: options, tables, schemas, microbench."""
