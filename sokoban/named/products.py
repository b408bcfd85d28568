"""Matrix products, single and batched."""

from __future__ import annotations

from sokoban.named.base import Operator, Program, Size


class MatMul(Operator, tag="matmul", kw_only=True, frozen=True):
    """``C[m,n] = sum(k, A[m,k] * B[k,n])``; a transposed operand is stored the other way around."""

    m: Size
    n: Size
    k: Size
    transpose_a: bool = False
    transpose_b: bool = False

    def program(self) -> Program:
        a, b = _matmul_operands(self.transpose_a, self.transpose_b)
        stem = f"matmul_{self.m}x{self.n}x{self.k}" + "_ta" * self.transpose_a + "_tb" * self.transpose_b
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        return Program(f"C[m,n] = sum(k, A[{a}] * B[{b}])", sizes, "C", ("m", "n"), stem)


class BatchMatMul(Operator, tag="batch_matmul", kw_only=True, frozen=True):
    """``C[b,m,n] = sum(k, A[b,m,k] * B[b,k,n])``; a transposed operand swaps its last two dimensions."""

    b: Size
    m: Size
    n: Size
    k: Size
    transpose_a: bool = False
    transpose_b: bool = False

    def program(self) -> Program:
        a, b = _matmul_operands(self.transpose_a, self.transpose_b)
        flags = "_ta" * self.transpose_a + "_tb" * self.transpose_b
        stem = f"batch_matmul_{self.b}x{self.m}x{self.n}x{self.k}{flags}"
        sizes = {"b": self.b, "m": self.m, "n": self.n, "k": self.k}
        return Program(f"C[b,m,n] = sum(k, A[b,{a}] * B[b,{b}])", sizes, "C", ("b", "m", "n"), stem)


def _matmul_operands(transpose_a: bool, transpose_b: bool) -> tuple[str, str]:
    return "k,m" if transpose_a else "m,k", "n,k" if transpose_b else "k,n"
