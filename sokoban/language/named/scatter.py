"""Rows added to those of a result that an integer tensor names: an embedding's gradient, tokens back from experts."""

from __future__ import annotations

from sokoban.language.named.base import Operator, Program, Size


class ScatterAdd(Operator, tag="scatter_add", kw_only=True, frozen=True):
    """``Y[I[t],:] += X[t,:]`` for ``t`` from 0 on, of a ``Y`` that is 0 before.

    Every element of ``Y`` is added up in the order of ``t``. What ``I`` names outside of ``Y`` is added nowhere.

    Attributes:
        rows: of ``Y``.
        columns: of ``X`` and ``Y``.
        count: rows of ``X``, and places in ``I``.
    """

    rows: Size
    columns: Size
    count: Size

    def program(self) -> Program:
        return Program(
            text="Y[n,c] = sum(t, select(I[t] == n, X[t,c], 0))",
            sizes={"n": self.rows, "c": self.columns, "t": self.count},
            output="Y",
            axes=("n", "c"),
            stem=f"scatter_add_{self.count}x{self.columns}_to_{self.rows}",
            dtypes={"I": "int32"},
        )
