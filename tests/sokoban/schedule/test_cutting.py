"""Operators cut down to a few tiles keep their remainders and their margins."""

from __future__ import annotations

from sokoban.kernel.stages import operator_form
from sokoban.language.expression import loads
from sokoban.language.parser import parse_program
from sokoban.schedule.cutting import cut_down, resize
from sokoban.schedule.tile import TileSchedule, sizes
from tests.sokoban.schedules import form_of, matmul_schedule

SCHEDULE = matmul_schedule((32, 32), (4, 4), 8)


def test_an_axis_is_cut_to_two_tiles_and_the_remainder() -> None:
    form = form_of(op="matmul", m=1000, n=64, k=4099)
    # 1000 = 31 * 32 + 8; 64 = 2 * 32; 4099 = 512 * 8 + 3.
    small = cut_down(form, SCHEDULE)
    assert dict(small.sizes) == {"m": 2 * 32 + 8, "n": 64, "k": 2 * 8 + 3}
    assert [tensor.shape for tensor in small.expr.inputs] == [(72, 19), (19, 64)]
    assert small.expr.output.shape == (72, 64)
    assert dict(cut_down(form_of(op="matmul", m=40, n=3, k=5), SCHEDULE).sizes) == {"m": 40, "n": 3, "k": 5}


def test_a_pipeline_keeps_more_steps_than_it_has_buffers() -> None:
    form = form_of(op="matmul", m=1000, n=64, k=4099)
    assert dict(cut_down(form, SCHEDULE.with_(stages=4)).sizes)["k"] == 5 * 8 + 3
    convolution = form_of(op="conv2d", n=8, c=50, h=40, w=50, f=64, kh=3, kw=3)
    c, kh, kw = convolution.reduced
    steps = TileSchedule(block=sizes({}), thread=sizes({}), step=sizes({c: 4, kh: 1, kw: 1}))
    # Of the taps the three columns and two rows make six steps; of the channels 50 = 12 * 4 + 2.
    cut = cut_down(convolution, steps.with_(stages=3)).sizes
    assert (cut[c], cut[kh], cut[kw]) == (2 * 4 + 2, 2, 3)
    cut = cut_down(convolution, steps.with_(step=sizes({c: 4, kh: 3, kw: 3}), stages=3)).sizes
    assert (cut[c], cut[kh], cut[kw]) == (4 * 4 + 2, 3, 3)


def test_columns_of_rows_are_cut_by_their_threads() -> None:
    form = form_of(op="softmax", shape=[1000, 5000])
    row, column = form.spatial[0], form.columns[0]
    schedule = TileSchedule(block=sizes({row: 4}), thread=sizes({row: 1}), reduce_threads=sizes({column: 64}))
    # Vectors of up to four for each of 64 threads: 5000 = 19 * 256 + 136.
    # Rows in which threads look for the largest element are 32 at least.
    assert dict(cut_down(form, schedule).sizes) == {row: 8 * 4 + 0, column: 2 * 256 + 136}
    form = form_of(op="reduce", function="sum", shape=[1000, 5000], axes=[1])
    schedule = schedule.with_(block=sizes({form.spatial[0]: 4}), thread=sizes({form.spatial[0]: 1}))
    schedule = schedule.with_(reduce_threads=sizes({form.reduced[0]: 64}))
    assert dict(cut_down(form, schedule).sizes) == {form.spatial[0]: 2 * 4 + 0, form.reduced[0]: 2 * 256 + 136}


def test_a_padded_input_keeps_its_margins() -> None:
    form = form_of(op="conv2d", n=1, c=3, h=40, w=50, f=4, kh=3, kw=3, padding=1)
    small = resize(form, {**form.sizes, "oh": 8, "ow": 10})
    assert small.expr.tensor_by_name["X"].shape[-2:] == (8, 10)
    part = form_of(expr="C[i] = X[i + 2] + Z[i]", sizes={"i": 100}, shapes={"X": [120]})
    assert resize(part, {"i": 10}).expr.inputs[0].shape == (30,)


def test_rows_of_a_tensor_that_is_read_in_two_ways_stay_aligned() -> None:
    operator = {"expr": "C[i,j] = sum(k, A[i,k] * B[k,j]) + A[i,3*j]", "sizes": {"i": 64, "j": 64, "k": 256}}
    small = resize(form_of(**operator, dtype="float16"), {"i": 16, "j": 23, "k": 32})
    assert small.expr.tensor_by_name["A"].shape == (16, 72)


def test_what_one_product_reads_of_another_is_there_where_an_axis_has_two_parts_in_them() -> None:
    text = "H[i,j] = sum(k, A[i,k] * B[k,j]); Y[i,j] = sum(k, H[i,k] * C[k,j])"
    form = operator_form(parse_program(text, {"i": 64, "j": 64, "k": 64}, {}))
    small = resize(form, {"i": 7, "j": 16, "k": 40})
    assert small.sizes == {"i": 7, "j": 40, "k": 40}
    assert [tensor.shape for tensor in small.expr.tensors if tensor.name == "H"] == [(7, 40)]


def test_a_tensor_read_with_a_pad_and_without_one_holds_what_has_none() -> None:
    # Over the whole operator the padded read goes further, over the one cut down the other.
    text = "Y[i,j] = X[j,i] + X[3*i, j | pad=0]"
    form = operator_form(parse_program(text, {"i": 20, "j": 500}, {}, shapes={"X": [500, 20]}))
    assert resize(form, {"i": 2, "j": 40}).expr.inputs[0].shape[0] >= 40


def test_a_padded_load_stays_within_the_dimensions_that_it_never_left() -> None:
    text = "P[f,w] = sum(c, X[c, w + 1 | pad=0] * W[c,f]); Y[f,w] = P[f,w] + X[f + w, 0 | pad=0]"
    form = operator_form(parse_program(text, {"f": 29, "w": 28, "c": 33}, {}, shapes={"X": [33, 25], "W": [33, 29]}))
    shapes = {tensor.name: tensor.shape for tensor in resize(form, {"f": 5, "w": 28, "c": 33}).expr.inputs}
    assert shapes["X"][0] == 33, "a kernel guards no read by c"


def test_tables_are_cut_to_few_rows_and_places_to_these() -> None:
    text = "Y[t,d] = E[I[t], d] + V[I[t] | pad=0] + E[t, d]"
    expr = parse_program(text, {"t": 5000, "d": 64}, {}, shapes={"E": [50000, 64], "V": [3000]})
    small = resize(operator_form(expr), {"t": 10, "d": 64})
    shapes = {tensor.name: tensor.shape for tensor in small.expr.inputs}
    # Rows of E are read in order, too, and there are as many beyond as before.
    assert shapes == {"E": (45010, 64), "I": (10,), "V": (128,)}
    bounds = [load.indices[0].bounds(small.sizes) for load in loads(small.final.value) if load.places]
    assert bounds == [(0, 45009), (-1, 128)] and small.final == small.expr.statements[-1]
