"""Problems after titles of KernelBench, by number, with sizes and programs of our own: for who has no copy of it."""
