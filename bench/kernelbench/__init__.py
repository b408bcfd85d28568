"""KernelBench's problems as operators of ours: said, predicted, proved, or a reason for each that is not."""
