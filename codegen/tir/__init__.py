"""The words that every lowering is written in: values, guarded reads, statements, the function around them."""
