"""``python -m bench.daydream.breakdown``: memory of training steps by TBD's kinds, against TBD's measurements.

TBD (thesis, section 3.4.4) takes the largest amount of every kind that is ever allocated, and finds feature maps to be
62 to 89 % of the sum. The same is predicted here of steps of three networks of its kinds. A framework of 2017 shares
one pool between maps and their gradients, so that these count with the maps there; here they are kinds of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from torch import nn

from bench.pictures import new_figure, save
from daydream.capture.meta_kernels import board_kernels
from daydream.capture.sources import load_subject
from daydream.capture.step import Subject, capture
from daydream.graph.memory import MemoryKind
from daydream.memory.predicted import StepMemory
from daydream.prediction.step import predicted
from hal.catalog import load_device

#: The board: TBD's Quadro P4000 has the same GP104 and 8 GB.
DEVICE = "p4"

#: Words of IWSLT15 (table 3.3), of a sentence, and numbers of a word.
WORDS, LENGTH, WIDTH = 17_188, 30, 512

#: TBD's range of feature maps (observation 10): least and most of all models, and who has them.
LEAST, MOST = 0.62, 0.89
MEASURED: Mapping[str, str] = {"ResNet-50": "89 %", "Transformer": "62 to 89 %", "LSTM": "89 % (Sockeye)"}

#: Kinds as they are drawn, from the left, with their colours.
KINDS: Mapping[MemoryKind, str] = {
    MemoryKind.FEATURE_MAPS: "#6699cc",
    MemoryKind.TEMPORARY: "#bbd4ee",
    MemoryKind.WORKSPACE: "#ee6677",
    MemoryKind.WEIGHTS: "#228833",
    MemoryKind.GRADIENTS: "#ccbb44",
    MemoryKind.OPTIMIZER: "#aa3377",
    MemoryKind.INPUTS: "#bbbbbb",
}


class Translator(nn.Module):
    """Sequence to sequence in five layers of LSTM: two read, three write.

    Every word that is written attends to all that were read through a layer of its own, as in Sockeye and NMT.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.reader, self.writer = nn.LSTM(WIDTH, WIDTH, 2), nn.LSTM(WIDTH, WIDTH, 3)
        self.key, self.query, self.fit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.mixed, self.scores = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, source: Any, target: Any) -> Any:
        read, written = self.reader(self.source(source))[0], self.writer(self.target(target))[0]
        read, written = read.transpose(0, 1), written.transpose(0, 1)
        fits = self.fit(torch.tanh(self.query(written)[:, :, None] + self.key(read)[:, None])).squeeze(-1)
        context = torch.softmax(fits, -1) @ read
        return self.scores(torch.tanh(self.mixed(torch.cat([context, written], -1)))).flatten(0, 1)


class Attending(nn.Module):
    """The transformer of six layers each way with heads of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Transformer(WIDTH, 8, dim_feedforward=4 * WIDTH, batch_first=True)
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Any, target: Any) -> Any:
        return self.scores(self.layers(self.source(source), self.target(target))).flatten(0, 1)


def _text(model: Callable[[], nn.Module], batch: int, *, batch_first: bool) -> Subject:
    """A model that reads and writes sentences."""
    with torch.device("meta"):
        sizes = (batch, LENGTH) if batch_first else (LENGTH, batch)
        sentences = [torch.zeros(sizes, dtype=torch.long) for _ in range(2)]
        answers = torch.zeros(batch * LENGTH, dtype=torch.long)
        made = model()

    def loss(scores: Any) -> Any:
        return nn.functional.cross_entropy(scores, answers)

    return Subject(title=type(made).__name__, model=made, args=sentences, loss=loss, batch=batch, optimizer="sgd")


#: The networks, each with batches; of text, sentences.
NETWORKS: Mapping[str, tuple[tuple[int, ...], Callable[[int], Subject]]] = {
    "ResNet-50": ((8, 16, 32), lambda batch: load_subject("timm:resnet50", batch=batch, training=True)),
    "Transformer": ((32, 64, 128), lambda batch: _text(Attending, batch, batch_first=True)),
    "LSTM": ((32, 64, 128), lambda batch: _text(Translator, batch, batch_first=False)),
}


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """A network at a batch: the largest amount of every kind, in bytes."""

    network: str
    batch: int
    largest: Mapping[MemoryKind, int]
    memory: StepMemory

    @property
    def whole(self) -> int:
        """TBD's sum."""
        return sum(self.largest.values())

    def share(self, *kinds: MemoryKind) -> float:
        """Of some kinds in the sum."""
        return sum(self.largest[kind] for kind in kinds) / self.whole


def breakdown(network: str, batch: int) -> Breakdown:
    """A network's training step at a batch."""
    _, subject_of = NETWORKS[network]
    with board_kernels("eager"):
        step = capture(subject_of(batch), training=True)
    memory = predicted(step, [load_device(DEVICE)])[0].memory
    largest = {kind: int(memory.footprint.by_kind(kind).max()) for kind in KINDS}
    return Breakdown(network=network, batch=batch, largest=largest, memory=memory)


def table(rows: list[Breakdown]) -> Table:
    """The rows in numbers."""
    made = Table(title=f"Memory of training steps on {load_device(DEVICE).title}, MB, and shares of feature maps")
    heads = ("network", "batch", *(kind.value for kind in KINDS), "maps", "with their gradients", "at the peak", "TBD")
    for column, text in enumerate(heads):
        made.add_column(text, justify="right" if column else "left")
    for row in rows:
        amounts = [f"{row.largest[kind] / 1e6:.1f}" for kind in KINDS]
        both = row.share(MemoryKind.FEATURE_MAPS, MemoryKind.TEMPORARY)
        shares = [row.share(MemoryKind.FEATURE_MAPS), both, row.memory.feature_map_share]
        made.add_row(row.network, str(row.batch), *amounts, *(f"{s:.0%}" for s in shares), MEASURED[row.network])
    return made


def draw(rows: list[Breakdown], path: Path) -> None:
    """A bar of shares for each row, with TBD's range."""
    figure = new_figure(10.5, 4.6)
    axes = figure.subplots()
    places = [place + 0.6 * list(NETWORKS).index(row.network) for place, row in enumerate(rows)]
    offsets = [0.0] * len(rows)
    for kind, colour in KINDS.items():
        widths = [100 * row.share(kind) for row in rows]
        label = "gradients of maps, other temporaries" if kind is MemoryKind.TEMPORARY else kind.value
        axes.barh(places, widths, left=offsets, color=colour, label=label, height=0.8)
        offsets = [start + width for start, width in zip(offsets, widths, strict=True)]
    for place, row in zip(places, rows, strict=True):
        for kinds in ((MemoryKind.FEATURE_MAPS,), (MemoryKind.FEATURE_MAPS, MemoryKind.TEMPORARY)):
            share = row.share(*kinds)
            axes.text(100 * share - 0.5, place, f"{share:.0%}", ha="right", va="center", fontsize=9)
        axes.text(101, place, f"{row.whole / 1e9:.2f} GB", ha="left", va="center", fontsize=9)
    axes.axvspan(100 * LEAST, 100 * MOST, color="black", alpha=0.13, lw=0, zorder=0)
    for bound, name in ((LEAST, "Deep Speech 2"), (MOST, "ResNet-50, Sockeye")):
        axes.axvline(100 * bound, color="black", lw=1, ls="--")
        backed = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        text = f"{bound:.0%} {name}"
        axes.text(100 * bound, places[0] - 0.75, text, ha="center", va="bottom", fontsize=9, bbox=backed)
    axes.set_yticks(places, [f"{row.network}, batch {row.batch}" for row in rows])
    axes.set_ylim(places[-1] + 0.6, places[0] - 1.3)
    axes.set_xlim(0, 112)
    axes.set_xlabel("share of the largest amounts, %; shaded: feature maps as TBD measured them (thesis, 3.4.4)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    save(figure, path)


@click.command("breakdown")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("out/memory.png"), show_default=True,
    help="The picture.",
)  # fmt: skip
def main(out: Path) -> None:
    """Predict what three training steps hold, by TBD's kinds."""
    from hal.support.tables import print_table

    rows = [breakdown(network, batch) for network, (batches, _) in NETWORKS.items() for batch in batches]
    print_table(table(rows))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, out)


if __name__ == "__main__":
    main()
