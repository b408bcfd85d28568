"""Long lines in parts: a scan, places along an axis or values by rank, that different blocks share.

A kernel of lines has a block for every line, or several lines to a block: few lines leave units idle, however long they
are. A cumulative sum of ``P`` parts of ``C`` elements is the chain::

    T[l,p]   = sum(c, X[l, p*C + c])
    U[l,p]   = cumsum(p, T[l,p])
    Y[l,p,c] = U[l, p-1 | pad=0] + cumsum(c, X[l, p*C + c])

with a fourth kernel where the last part is shorter, which copies what there is. The places of the ``k`` largest values
are found among the ``k`` largest of every part::

    G[l,p,r] = p*C + argmax(c, X[l, p*C + c], r)
    Q[l,r]   = argmax(q, X[l, G[l,q]], r)
    Y[l,r]   = G[l, Q[l,r]]

of equal values the first of the first part, as of whole lines, and the values themselves in two kernels.

Totals come in the order of the line, whichever block is first, so that results are the same in every run. One pass with
decoupled look-back (D. Merrill and M. Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016) would
read a scan's elements once instead of twice, and add up in an order that changes from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hal.spec.device import DeviceSpec
from roller.algorithms.chain import SPLIT_LINE, ChainProgram, Considered, needed_sizes
from roller.algorithms.line import NAME as WHOLE
from roller.algorithms.line import WholeLine, covering_sizes, line_parts
from roller.algorithms.line_parts import LineParts, can_cut
from roller.algorithms.slices import Slices
from roller.algorithms.split_k import ALIGNED, NEAR_BOUND, nearest_divisor
from roller.construct.construct import construct
from roller.construct.program import ProgramPart
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.problem import Problem
from sokoban.language.expression import Reduction
from sokoban.schedule.cutting import resize
from sokoban.schedule.patches import LineSchedule
from sokoban.schedule.tile import TileSchedule

#: Parts that every unit gets of all lines together.
PARTS_PER_UNIT = (1, 4, 16, 64, 256)
#: Whole parts are preferred if there are as many within this factor.
SNAP = 2.0
#: Fewest elements of a part: with fewer a block does little more than wait for them.
LEAST_ELEMENTS = 64

#: What kernels do, by how many there are.
_SCAN_LABELS = ("", "adds up what parts come to", "scans parts behind what comes before them", "copies the line")
_PLACE_LABELS = ("", "finds the best of all parts", "says where they are")


@dataclass(frozen=True)
class SlicedLine:
    """A scan, places or ranks by parts of the line; see :class:`roller.algorithms.chain.Split`."""

    slices: Slices

    def problems(self, form: KernelForm) -> tuple[Problem, ...]:
        """The kernels, in order."""
        return tuple(each.line_kernel if each.is_line else each for each in LineParts(form, self.slices).forms)

    def cut_down(
        self, form: KernelForm, schedules: Sequence[TileSchedule | LineSchedule]
    ) -> tuple[KernelForm, SlicedLine]:
        """A small operator of the same structure; see :class:`roller.algorithms.chain.Split`."""
        parts, axis = LineParts(form, self.slices), self.slices.axis
        wanted = [(each, covering_sizes(each, schedule)) for each, schedule in zip(parts.forms, schedules, strict=True)]
        small = needed_sizes(parts.sizes, wanted)
        ranks = form.line_kernel.ranks
        length = max(small[axis], ranks)
        count = min(self.slices.count, max(small[parts.part], -(-small[parts.candidate] // ranks), 2))
        short = 0 if parts.is_whole else min(self.slices.count * self.slices.length - form.sizes[axis], length - 1)
        sizes = {name: small[name] for name in form.sizes} | {axis: count * length - short}
        return resize(form, sizes), SlicedLine(Slices(axis, count, length))

    def tolerance(self, form: KernelForm) -> float | None:
        """The dtype's: sums of sums err less than one long sum."""
        return None


def consider_lines(placed: PlacedForm, top_k: int, *, in_parts: bool) -> Considered:
    """The ``top_k`` best programs of a scan or place, lines whole or ``in_parts``.

    Raises:
        InputError: the device has no kernels.
    """
    parts = line_parts(placed.form, placed.device)
    chains = [ChainProgram(WHOLE, part.label, placed.form, WholeLine(), (part,)) for part in parts[:top_k]]
    split = list(_split_lines(placed, parts[0])) if in_parts else []
    ranked = sorted((*chains, *split), key=lambda program: program.estimate.seconds)
    return Considered(WHOLE, tuple(ranked[:top_k]), scored=len(parts) + len(split))


def _split_lines(placed: PlacedForm, whole: ProgramPart) -> Iterator[ChainProgram]:
    """Lines in parts, priced, where the best kernel of whole lines leaves units idle."""
    form, device = placed.form, placed.device
    walk = form.line_kernel.walk
    reads_places = isinstance(walk, Reduction) and walk.is_place
    if not can_cut(form) or (reads_places and device.teu.lane != "thread"):
        return  # Kernels of processors read no places.
    least = NEAR_BOUND * placed.least_seconds + 3 * device.launch_overhead_seconds
    if form.line_kernel.lines >= device.unit_count * PARTS_PER_UNIT[-1] or whole.estimate.seconds <= least:
        return
    for slices in _counts(form, device):
        yield _program(form, slices, device)


def _counts(form: KernelForm, device: DeviceSpec) -> list[Slices]:
    """Parts that give every unit one or a few."""
    kernel = form.line_kernel
    lengths = dict[int, int]()
    for parts in PARTS_PER_UNIT:
        wanted = min(parts * device.unit_count / kernel.lines, kernel.length / max(LEAST_ELEMENTS, 4 * kernel.ranks))
        count = nearest_divisor(kernel.length, wanted, SNAP)
        if count is None and wanted >= 2:
            length = -(-kernel.length // (round(wanted) * ALIGNED)) * ALIGNED
            count = -(-kernel.length // length)
            lengths.setdefault(count, length)
        elif count is not None:
            lengths.setdefault(count, kernel.length // count)
    return [Slices(kernel.axis, count, length) for count, length in sorted(lengths.items()) if count >= 2]


def _program(form: KernelForm, slices: Slices, device: DeviceSpec) -> ChainProgram:
    text = slices.text.replace("slice", "part")
    labels = _SCAN_LABELS if form.line_kernel.is_scan else _PLACE_LABELS
    parts = []
    for label, each in zip(labels, LineParts(form, slices).forms, strict=False):
        part = line_parts(each, device)[0] if each.is_line else _tiles(each, device)
        parts.append(replace(part, label=label or f"goes along each of {text}"))
    return ChainProgram(SPLIT_LINE, text, form, SlicedLine(slices), tuple(parts))


def _tiles(form: KernelForm, device: DeviceSpec) -> ProgramPart:
    best = construct(form, device, 1).programs[0]
    return ProgramPart("", best.form, best.schedule, best.estimate, best.policy)
