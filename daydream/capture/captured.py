"""A captured step: its operators with sizes, types, modules and storages, before any board is named."""

from __future__ import annotations

from dataclasses import dataclass, field

from daydream.graph.graph import Phase
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.trace.trace import NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedOperator:
    """One call of an ATen operator.

    Attributes:
        name: as the profiler writes it, ``aten::addmm``.
        overload: of the operator, ``default`` as a rule.
        inputs: its arguments in the order of its schema, defaults included.
        outputs: the tensors that it returns, those of lists one after the other.
        module: index of the innermost module around it in :attr:`Capture.modules`; in the backward pass that of the
            operator whose gradient it makes; -1 outside all.
        phase: of the step.
        forward: index of the operator whose gradient it makes, -1 for forward operators and where that is unknown.
        launches: whether a device would run kernels for it: views, allocations and work on the host launch none.
        read: storages of its arguments.
        written: storages of its results, without those of new tensors that share an argument's storage.
        made: storages that did not exist before it.
        freed: storages without an owner when the next operator starts.
    """

    name: str
    overload: str
    inputs: Inputs
    outputs: tuple[RecordedTensor, ...]
    module: int
    phase: Phase
    forward: int = NONE
    launches: bool = True
    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CapturedModule:
    """A module: its path, ``""`` for the model itself, and its class."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedParameter:
    """A parameter of the model.

    Attributes:
        name: its path.
        tensor: sizes and type.
        storage: index of its memory.
        trained: whether it has a gradient.
        order: at which place its gradient is complete in the backward pass, from 0; -1 where there is none.
    """

    name: str
    tensor: RecordedTensor
    storage: int
    trained: bool
    order: int = NONE


@dataclass(frozen=True, slots=True)
class CapturedStorage:
    """Memory that tensors share: bytes, and ``parameter``, ``buffer``, ``input``, ``optimizer``, ``step`` for what the
    step itself makes, or ``host`` for what is not on the device."""

    bytes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Capture:
    """One step of a model.

    Attributes:
        title: the model as the user named it.
        operators: in the order in which they were called.
        modules: of the model, the model itself first.
        parameters: of the model.
        storages: by the number that operators name them by.
        batch: samples of the step; None where that is unknown.
        training: whether a backward pass and an update belong to the step.
        dtype: one of :data:`daydream.capture.options.DTYPES`.
        attention: version of fused attention that runs.
        assumed: what the capture had to suppose, a sentence each.
        blocks: paths of the equal modules that the model repeats the most of, in order.
        precision: of linear layers within the blocks (:data:`daydream.operators.variants.PRECISIONS`).
        expert_kernels: of grouped products (:data:`daydream.operators.variants.EXPERT_KERNELS`).
        packed: tokens of the documents that a sample is packed of; 0 where it is one.
        tf32: whether convolutions of float32 may round their operands to TF32 (``torch.backends.cudnn.allow_tf32``).
    """

    title: str
    operators: tuple[CapturedOperator, ...]
    modules: tuple[CapturedModule, ...]
    parameters: tuple[CapturedParameter, ...]
    storages: tuple[CapturedStorage, ...]
    batch: int | None = None
    training: bool = False
    dtype: str = "float32"
    attention: str = "auto"
    assumed: tuple[str, ...] = field(default=())
    blocks: tuple[str, ...] = ()
    precision: str = ""
    expert_kernels: str = "pytorch"
    packed: int = 0
    tf32: bool = True
