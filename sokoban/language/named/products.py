"""Matrix products, single and batched."""

from __future__ import annotations

from dataclasses import replace

from sokoban.language.expression import RESULT_DTYPE
from sokoban.language.named.base import OperandDType, Operator, OutputDType, Program, Size


class Product(Operator, kw_only=True, frozen=True):
    """The types of a matrix product: ``dtype`` of its operands ``A`` and ``B``, ``output_dtype`` of everything else,
    its output, bias and residual. Left out it is that of the operands, or int32 and float32 where those are too narrow.
    """

    dtype: OperandDType = "float32"  # type: ignore[assignment]
    output_dtype: OutputDType | None = None
    transpose_a: bool = False
    transpose_b: bool = False

    @property
    def flags(self) -> str:
        """Part of a derived name for transposed operands, and for an output of a type of its own."""
        output = f"_to_{self.output_dtype}" if self.output_dtype else ""
        return "_ta" * self.transpose_a + "_tb" * self.transpose_b + output

    def typed(self, program: Program) -> Program:
        """The program with the dtypes of its tensors."""
        output = self.output_dtype or RESULT_DTYPE.get(self.dtype, self.dtype)
        return replace(program, dtypes=dict.fromkeys(("A", "B"), self.dtype), default_dtype=output)

    @property
    def operands(self) -> tuple[str, str]:
        """The indices of ``A`` and ``B``; a transposed operand is stored the other way around."""
        return "k,m" if self.transpose_a else "m,k", "n,k" if self.transpose_b else "k,n"


class MatMul(Product, tag="matmul", kw_only=True, frozen=True):
    """``C[m,n] = sum(k, A[m,k] * B[k,n])``; a transposed operand is stored the other way around."""

    m: Size
    n: Size
    k: Size

    def program(self) -> Program:
        a, b = self.operands
        stem = f"matmul_{self.m}x{self.n}x{self.k}{self.flags}"
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        return self.typed(
            Program(text=f"C[m,n] = sum(k, A[{a}] * B[{b}])", sizes=sizes, output="C", axes=("m", "n"), stem=stem)
        )


class BatchMatMul(Product, tag="batch_matmul", kw_only=True, frozen=True):
    """``C[b,m,n] = sum(k, A[b,m,k] * B[b,k,n])``; a transposed operand swaps its last two dimensions."""

    b: Size
    m: Size
    n: Size
    k: Size

    def program(self) -> Program:
        a, b = self.operands
        stem = f"batch_matmul_{self.b}x{self.m}x{self.n}x{self.k}{self.flags}"
        sizes = {"b": self.b, "m": self.m, "n": self.n, "k": self.k}
        return self.typed(
            Program(
                text=f"C[b,m,n] = sum(k, A[b,{a}] * B[b,{b}])", sizes=sizes, output="C", axes=("b", "m", "n"), stem=stem
            )
        )
