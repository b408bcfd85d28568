"""The few words that every lowering is written in:
values, guarded reads, statements, the function around them, Lowered and LoweringError."""
