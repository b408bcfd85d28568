"""A captured step priced on a board: which kernels, when, and how right that is; jobs put on boards."""
