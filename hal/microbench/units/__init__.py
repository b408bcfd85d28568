"""Units of a GPU: rates of multiply-adds and matrix instructions, registers, barriers, power, library products."""
