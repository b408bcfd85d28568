"""The inner loops of a matrix product as LLVM IR: packed panels, a register tile, nothing else.

As in every fast library (Goto and van de Geijn 2008): a sliver of B stays in the first cache, a block of A in the
second, and a tile of C in registers while k runs. C is stored tile by tile.
"""

from __future__ import annotations

_PRODUCT = """
define void @product(ptr %a, ptr %b, ptr %c, i64 %m.tiles, i64 %n.tiles, i64 %k) {{
entry:
  br label %column
column:
  %j = phi i64 [ 0, %entry ], [ %j.next, %column.end ]
  br label %row
row:
  %i = phi i64 [ 0, %column ], [ %i.next, %row.end ]
  %a.size = mul i64 %k, {rows}
  %a.start = mul i64 %i, %a.size
  %b.size = mul i64 %k, {columns}
  %b.start = mul i64 %j, %b.size
  %c.row = mul i64 %j, %m.tiles
  %c.tile = add i64 %c.row, %i
  %c.start = mul i64 %c.tile, {tile}
  %a.tile = getelementptr float, ptr %a, i64 %a.start
  %b.tile = getelementptr float, ptr %b, i64 %b.start
  %c.at = getelementptr float, ptr %c, i64 %c.start
  br label %step
step:
  %p = phi i64 [ 0, %row ], [ %p.next, %step ]
{phis}
  %a.offset = mul i64 %p, {rows}
  %b.offset = mul i64 %p, {columns}
  %a.p = getelementptr float, ptr %a.tile, i64 %a.offset
  %b.p = getelementptr float, ptr %b.tile, i64 %b.offset
  %b0 = load {kind}, ptr %b.p, align {align}
  %b1.at = getelementptr {kind}, ptr %b.p, i64 1
  %b1 = load {kind}, ptr %b1.at, align {align}
{products}
  %p.next = add i64 %p, 1
  %p.more = icmp ult i64 %p.next, %k
  br i1 %p.more, label %step, label %row.end
row.end:
{stores}
  %i.next = add i64 %i, 1
  %i.more = icmp ult i64 %i.next, %m.tiles
  br i1 %i.more, label %row, label %column.end
column.end:
  %j.next = add i64 %j, 1
  %j.more = icmp ult i64 %j.next, %n.tiles
  br i1 %j.more, label %column, label %done
done:
  ret void
}}
"""


def tile(lanes: int, rows: int) -> str:
    """C += A B for panels of ``rows`` rows of A and two vectors of B, ``lanes`` float32 values each.

    A is packed as [m.tiles][k][rows], B as [n.tiles][k][2 lanes], C as [n.tiles][m.tiles][rows][2 lanes].
    """
    kind = f"<{lanes} x float>"
    phis, products, stores = [], [], []
    for row in range(rows):
        products.append(
            f"  %a{row}.at = getelementptr float, ptr %a.p, i64 {row}\n"
            f"  %a{row} = load float, ptr %a{row}.at, align 4\n"
            f"  %l{row} = insertelement {kind} poison, float %a{row}, i32 0\n"
            f"  %v{row} = shufflevector {kind} %l{row}, {kind} poison, <{lanes} x i32> zeroinitializer"
        )
        for half in (0, 1):
            name = f"{row}.{half}"
            phis.append(f"  %x{name} = phi {kind} [ zeroinitializer, %row ], [ %y{name}, %step ]")
            products.append(
                f"  %y{name} = call {kind} @llvm.fma.v{lanes}f32({kind} %v{row}, {kind} %b{half}, {kind} %x{name})"
            )
            stores.append(
                f"  %c{name} = getelementptr {kind}, ptr %c.at, i64 {2 * row + half}\n"
                f"  %o{name} = load {kind}, ptr %c{name}, align {4 * lanes}\n"
                f"  %n{name} = fadd {kind} %o{name}, %y{name}\n"
                f"  store {kind} %n{name}, ptr %c{name}, align {4 * lanes}"
            )
    return _PRODUCT.format(
        rows=rows,
        columns=2 * lanes,
        tile=2 * lanes * rows,
        kind=kind,
        align=4 * lanes,
        phis="\n".join(phis),
        products="\n".join(products),
        stores="\n".join(stores),
    )
