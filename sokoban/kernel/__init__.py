"""One kernel in canonical form, and what follows from it before it has a schedule: matrix roles, rates on a device."""
