"""Mutants of emitted kernels: does the proof notice when one of them is wrong?"""
