"""Division of a step among boards: how many ways, in which order the boards stand, what each keeps of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from daydream.passes.distributed.ddp import USUAL_BUCKET_MB
from hal.spec.node import NodeSpec
from hal.support.errors import InputError

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Shard = Literal["none", "zero1", "zero2", "fsdp"]
#: How ranks that share a sequence get at each other's keys and values.
ContextExchange = Literal["ring", "all-gather", "ulysses"]
#: Whose kernels carry tokens to their experts and back.
Dispatch = Literal["nccl", "deepep"]
#: What lies in the host's memory: states of the optimizer with what it updates, or parameters and gradients, too.
Offload = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks of a step in three directions, neighbours in the tensor direction first, as Megatron numbers them.

    Attributes:
        data: copies of the model that work on samples of their own.
        context: boards that share every sample's tokens; in the exchange of gradients they count as copies.
        expert: boards that share the experts of every layer: out of those of the data and context directions, and of
            tensor ranks where these hold a part of the sequence each.
        tensor: boards that share every layer.
        pipeline: stages, one after the other.
        schedule: in which order a stage takes micro-batches: ``gpipe`` forward all, then backward all; ``1f1b``
            one forward, one backward; ``interleaved`` the same with several chunks of the model on a stage.
        chunks: of the model on a stage, 1 but for ``interleaved``.
        micro_batches: that every copy of the model works on in a step.
        shard: what the ranks of the data direction share: ``none`` (DDP), ``zero1`` the optimizer's states, ``zero2``
            gradients, too, which are exchanged with every micro-batch, ``fsdp`` parameters, gradients and states.
        bucket_bytes: of gradients that are exchanged together by DDP.
        overlap: whether exchanges of gradients begin while the backward pass still runs.
        sequence: whether tensor ranks hold a part of the sequence each between the layers that they share.
        overlap_tensor: whether exchanges within layers overlap the products that they feed, in as many parts as
            there are tensor ranks (user buffers of Transformer Engine, async tensor parallelism of PyTorch).
        master: whether parameters of 16 bits are kept in float32, too, for the optimizer.
        narrow: whether weights of narrow products are kept and gathered in narrow numbers alone (Megatron's
            ``fp8_param_gather``); FSDP gathers them so.
        reduce_bytes: of an element of a gradient that is exchanged; 0 for that of the gradient itself.
        waits: whether a stage's host waits for its device after every message, as Megatron's does behind
            ``batch_isend_irecv``; else it runs ahead.
        exchange_context: how ranks of the context direction get at each other's keys and values.
        dispatch: whose kernels carry tokens to their experts and back.
        imbalance: tokens of the busiest rank's experts over the mean.
        overlap_experts: whether shared experts run while tokens are carried.
        overlap_batches: whether tokens of a micro-batch are carried next to the kernels of another one (DualPipe,
            Megatron's ``overlap_moe_expert_parallel_comm``).
        offload: what lies in the host's memory and is updated there.
        blocks: blocks of every part of a pipeline, chunk after chunk; empty for equal parts.
        blocking: whether a stage's kernels wait until what they made has been sent.
    """

    data: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: Schedule = "1f1b"
    chunks: int = 1
    micro_batches: int = 1
    shard: Shard = "none"
    bucket_bytes: float = USUAL_BUCKET_MB * 2**20
    overlap: bool = True
    sequence: bool = False
    overlap_tensor: bool = False
    master: bool = True
    narrow: bool = False
    reduce_bytes: int = 0
    waits: bool = False
    exchange_context: ContextExchange = "ring"
    dispatch: Dispatch = "nccl"
    imbalance: float = 1.0
    overlap_experts: bool = False
    overlap_batches: bool = False
    offload: Offload = "none"
    blocks: tuple[int, ...] = ()
    blocking: bool = False

    @property
    def ranks(self) -> int:
        """Boards of the step."""
        return self.sharers * self.tensor * self.pipeline

    @property
    def sharers(self) -> int:
        """Boards with the same part of the model, which exchange its gradients."""
        return self.data * self.context

    def group(self, *, experts: bool = False) -> int:
        """Boards that exchange gradients of the same parameters: of experts those with the same ones."""
        return self.token_ranks // self.expert if experts else self.sharers

    @property
    def token_ranks(self) -> int:
        """Boards of a stage with tokens of their own between attention layers."""
        return self.sharers * (self.tensor if self.sequence else 1)

    @property
    def words(self) -> str:
        """The layout in a few words.

        >>> Layout(data=4, tensor=2, shard="fsdp").words
        'fsdp 4, tensor 2'
        """
        shared: str = self.shard if self.shard != "none" else "data"
        named = [
            (shared, self.data), ("context", self.context), ("expert", self.expert), ("tensor", self.tensor),
            ("pipeline", self.pipeline),
        ]  # fmt: skip
        return ", ".join(f"{name} {count}" for name, count in named if count > 1) or "one board"

    @property
    def assumed(self) -> tuple[str, ...]:
        """Suppositions of the plan, a sentence each."""
        said = []
        if self.context > 1:
            said.append(
                f"{self.context} ranks share every sample's tokens, {self.exchange_context}, equally by zig-zag"
            )
        if self.expert > 1:
            said.append(
                f"tokens reach experts by {self.dispatch}, the busiest rank's {self.imbalance:g} times the mean, "
                + (
                    "next to another micro-batch"
                    if self.overlap_batches
                    else "next to shared experts"
                    if self.overlap_experts
                    else "waited for"
                )
            )
        if self.narrow:
            said.append("weights of narrow products are kept and gathered in narrow numbers alone")
        if self.offload != "none":
            said.append("the host updates what ranks keep, at half of its memory's bandwidth")
        if self.tensor > 1:
            said.append(f"exchanges within layers {'overlap products' if self.overlap_tensor else 'are waited for'}")
        return tuple(said)

    def check(self, node: NodeSpec | None) -> None:
        """Refuses what no job can be.

        Raises:
            InputError: a number is out of range, the boards do not fill their nodes, or the schedule does not fit.
        """
        for name in ("data", "context", "expert", "tensor", "pipeline", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')}", f"got {getattr(self, name)}", "write 1 or more")
        if self.shard == "zero2" and self.pipeline > 1:
            raise InputError("--shard zero2", "gradients of stages stay until the last micro-batch", "use zero1")
        if self.overlap_tensor and self.tensor == 1:
            raise InputError("--overlap-tensor", "is of several tensor ranks", "add --tensor, or leave it out")
        self._check_sharing(node)
        if self.schedule == "interleaved":
            if self.chunks < 2 or self.pipeline < 2:
                raise InputError("--schedule interleaved", "needs several stages of several chunks", "add --chunks 2")
            if self.micro_batches % self.pipeline:
                problem = f"{self.micro_batches} micro-batches do not go through {self.pipeline} stages in turns"
                raise InputError("--micro-batches", problem, f"write a multiple of {self.pipeline}")
        elif self.chunks > 1:
            raise InputError("--chunks", f"{self.schedule} has one chunk on a stage", "add --schedule interleaved")
        if node is not None:
            self._check_node(node)

    def _check_sharing(self, node: NodeSpec | None) -> None:
        """Refuses experts and hosts that cannot be shared so."""
        if self.token_ranks % self.expert:
            problem = (
                f"{self.expert} do not divide the {self.token_ranks} ranks of a stage that have tokens of their own"
            )
            raise InputError("--expert", problem, "write a number that does")
        if self.overlap_batches and self.micro_batches == 1:
            raise InputError("--overlap-batches", "is of several micro-batches", "add --micro-batches, or leave it out")
        if self.imbalance < 1:
            raise InputError(
                "--imbalance", f"got {self.imbalance:g}", "write the busiest rank over the mean, 1 or more"
            )
        if self.offload == "parameters" and self.shard != "fsdp":
            raise InputError("--offload parameters", "is of FSDP", "add --shard fsdp, or write --offload optimizer")
        if self.offload != "none" and (node is None or node.host is None):
            name = "the board's node" if node is None else node.name
            raise InputError("--offload", f"nothing is known of the host of {name}", "describe it: docs/nodes.md")

    def _check_node(self, node: NodeSpec) -> None:
        """Refuses ranks that do not fill nodes."""
        if self.ranks > node.boards and self.ranks % node.boards:
            problem = f"{self.ranks} ranks do not fill nodes of {node.boards} boards"
            raise InputError("--data", problem, f"write numbers whose product is a multiple of {node.boards}")
        if self.ranks > node.boards and node.network is None:
            raise InputError("--node", f"{node.name} stands alone, {self.ranks} ranks need several", "name another")
        small, large = sorted((self.tensor, node.boards))
        if large % small:
            problem = f"{self.tensor} do not divide the {node.boards} boards of {node.name}"
            raise InputError("--tensor", problem, "write a number that does")

    # Who stands where

    def tensor_per_node(self, node: NodeSpec) -> int:
        """Ranks of a tensor group that share a node."""
        return min(self.tensor, node.boards)

    def data_per_node(self, node: NodeSpec, *, experts: bool = False) -> int:
        """Ranks of a node that exchange gradients of the same parameters; ``experts`` as for :meth:`group`."""
        alike = 1 if self.sequence else self.tensor
        rank_count = self.expert * alike if experts else self.tensor
        return min(self.group(experts=experts), max(node.boards // rank_count, 1))

    def expert_per_node(self, node: NodeSpec) -> int:
        """Ranks of a node that share experts."""
        return min(self.expert, node.boards if self.sequence else max(node.boards // self.tensor, 1))

    def context_per_node(self, node: NodeSpec) -> int:
        """Ranks of a node that share a sample's tokens."""
        return min(self.context, max(node.boards // self.tensor, 1))

    def same_node(self, stage: int, other: int, node: NodeSpec) -> bool:
        """True if a rank of one stage finds its neighbour of another in its own node."""
        size = self.tensor * self.sharers
        return stage * size // node.boards == other * size // node.boards and abs(stage - other) * size < node.boards


def orders(layout: Layout, stage: int) -> list[tuple[bool, int, int]]:
    """Order of a stage's passes: whether forward, which micro-batch, which chunk.

    1F1B is that of PipeDream-Flush, the interleaved one Megatron's (Narayanan et al. 2021, section 2.2.2).

    >>> passes = orders(Layout(pipeline=2, micro_batches=3), 0)
    >>> [("F" if forward else "B") + str(number) for forward, number, _ in passes]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    count, chunks, stages = layout.micro_batches, layout.chunks, layout.pipeline
    if layout.schedule == "interleaved":
        group = stages * chunks

        def place(step: int, *, forward: bool) -> tuple[bool, int, int]:
            chunk = step % group // stages
            return forward, step // group * stages + step % stages, chunk if forward else chunks - 1 - chunk

        total = count * chunks
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
        forwards = [place(step, forward=True) for step in range(total)]
        backwards = [place(step, forward=False) for step in range(total)]
    else:
        forwards = [(True, number, 0) for number in range(count)]
        backwards = [(False, number, 0) for number in range(count)]
        ahead = count if layout.schedule == "gpipe" else min(stages - stage - 1, count)
    done = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        done += [forward, backward]
    return done + backwards[len(forwards) - ahead :]
