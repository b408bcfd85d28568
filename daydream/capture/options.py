"""Options of capturing a step, and the words that they take."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16", "tf32", "amp", "amp-bfloat16")
#: SGD with momentum 0.9, Adam, AdamW.
OPTIMIZERS = ("sgd", "adam", "adamw", "none")
#: Names that models of transformers have for a cache of keys and values, the newest first.
CACHES = ("cache", "past_key_values")
#: How optimizers walk over the parameters: an operator each, one per kind of arithmetic, or one for all.
IMPLEMENTATIONS = ("for-loop", "foreach", "fused")


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Options of capturing a step.

    Attributes:
        batch: samples; None for what the model's source says, else 1.
        sequence: tokens of a text; None for the source's.
        image: height and width of images; None for the source's.
        class_name: of a model of transformers; None for the configuration's.
        mode: ``training`` or ``inference``.
        dtype: ``float32``; ``tf32``, the same with products by way of TensorFloat-32; ``bfloat16``, ``float16``;
            ``amp`` and ``amp-bfloat16``: float32 with autocast to float16 and to bfloat16.
        optimizer: ``sgd``, ``adam``, ``adamw`` or ``none``; None for the source's.
        implementation: of the optimizer, ``for-loop``, ``foreach`` or ``fused``.
        clip: gradients are scaled so that the norm of all of them stays in bounds (``clip_grad_norm_``).
        attention: kernels of ``scaled_dot_product_attention``, one of
            :data:`daydream.operators.variants.VERSIONS`.
        flash: whether ``auto`` means flash attention, as on boards from sm_80, or memory-efficient attention.
        channels_last: images and convolutions' weights lie with their channels last.
        tf32: whether convolutions of float32 may round their operands to TF32, as PyTorch lets them by default.
        assume: what is supposed of values that the model reads, ``nonzero=SHARE`` or ``item=VALUE`` each.
        checkpoint: ``none``, ``full``, ``selective``, ``attention``, or a pattern of modules' paths.
        parameters: type that parameters have under autocast, ``bfloat16`` or ``float16`` as FSDP's mixed precision
            gathers them; empty for float32.
        precision: of linear layers within the repeated blocks, one of :data:`daydream.operators.variants.PRECISIONS`.
        packed: tokens of the documents that a sample is packed of, which do not see each other; None for one document.
        expert_kernels: of grouped products, one of :data:`daydream.operators.variants.EXPERT_KERNELS`.
        lora: adapters that are trained in place of the model, ``rank=16,modules=q_proj,v_proj``; empty for none.
        cached: tokens of each sample whose keys and values are in a cache already, in inference.
    """

    batch: int | None = None
    sequence: int | None = None
    image: int | None = None
    class_name: str | None = None
    mode: str = "training"
    dtype: str = "float32"
    optimizer: str | None = None
    implementation: str = "foreach"
    clip: bool = False
    attention: str = "auto"
    flash: bool = True
    channels_last: bool = False
    tf32: bool = True
    assume: tuple[str, ...] = ()
    checkpoint: str = "none"
    parameters: str = ""
    precision: str = ""
    lora: str = ""
    expert_kernels: str = "pytorch"
    packed: int | None = None
    cached: int = 0

    @property
    def tokens(self) -> int | None:
        """Tokens of a sample: those asked for, else one behind cached ones, else what the source says."""
        return self.sequence or (1 if self.cached else None)

    @property
    def built_with(self) -> str:
        """Attention that models are built with: where it is computed again it stays one call, whatever it runs as."""
        return "auto" if self.checkpoint == "attention" else self.attention
