"""Programs of our own after the titles of KernelBench that have no measured row, by number, with sizes of ours."""
