"""``python -m bench.backend.zoo``: forty networks of timm and transformers, random weights, small inputs. Each runs
and agrees with PyTorch, whatever the backend takes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from daydream.capture.models.torchvision_operators import import_torchvision
from hal.support.atomic import write_atomic

#: Names of timm, and the side of their images.
TIMM = {
    "resnet18": 64, "resnext50_32x4d": 64, "resnetv2_50": 64, "seresnet50": 64, "ecaresnet26t": 64, "densenet121": 64,
    "vgg11": 64, "inception_v3": 96, "xception41": 96, "efficientnet_b0": 64, "mobilenetv2_100": 64,
    "mobilenetv3_small_100": 64, "mnasnet_100": 64, "ghostnet_100": 64, "regnety_004": 64, "repvgg_a0": 64,
    "hrnet_w18_small": 64, "dla34": 64, "res2net50_26w_4s": 64, "convnext_atto": 64, "convmixer_768_32": 64,
    "vit_tiny_patch16_224": 224, "deit_tiny_patch16_224": 224, "swin_tiny_patch4_window7_224": 224,
    "mixer_s32_224": 224, "poolformer_s12": 64, "levit_128": 224, "mobilevit_xxs": 64, "maxvit_rmlp_pico_rw_256": 256,
    "cait_xxs24_224": 224,
}  # fmt: skip

#: Model types of transformers.
TRANSFORMERS = ("bert", "roberta", "distilbert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "t5", "opt")


def network(name: str, batch: int = 1) -> tuple[Any, tuple[Any, ...]]:
    """A network of two to all of its layers, and its inputs."""
    import torch

    import_torchvision()
    if name in TIMM:
        import timm

        return timm.create_model(name).eval(), (torch.randn(batch, 3, TIMM[name], TIMM[name]),)
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(name)
    small = {
        "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_decoder_layers": 2,
        "vocab_size": 1000, "hidden_size": 128, "n_embd": 128, "dim": 128, "d_model": 128, "word_embed_proj_dim": 128,
        "intermediate_size": 256, "hidden_dim": 256, "d_ff": 256, "ffn_dim": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "n_head": 4, "n_heads": 4, "num_heads": 4, "d_kv": 32, "head_dim": 32,
        # No two runs drop the same.
        **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout_rate"), 0.0),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    }  # fmt: skip
    for key, value in small.items():
        if getattr(config, key, None) is not None or key in ("pad_token_id", "use_cache"):
            setattr(config, key, value)
    tokens = torch.randint(3, 1000, (2, 24))
    factory: Any = AutoModel
    return factory.from_config(config).eval(), (tokens, None, tokens) if name == "t5" else (tokens,)


def gradients(module: Any, outputs: Any) -> dict[str, Any]:
    """Gradients of a module's parameters by name, for one that comes back of random numbers."""
    import torch

    module.zero_grad()
    outputs.backward(torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)))
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


def off_by(results: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest difference of gradients, each relative to the largest number of its parameter's, or to a thousandth of
    the largest of all where it is less: those before a batch norm are rounding errors alone."""
    largest = max(float(each.abs().max()) for each in expected.values())
    return max(
        float((results[name] - each).abs().max()) / max(float(each.abs().max()), 1e-3 * largest)
        for name, each in expected.items()
    )


def examined(name: str, fallback: str, cache: str, training: bool) -> dict[str, Any]:
    """The largest difference from PyTorch, relative to the largest number, and what was taken; in training that of
    gradients."""
    import torch

    from bench.backend.run import difference, first_tensor
    from roller.dynamo.backend import backend

    torch.manual_seed(0)
    module, inputs = network(name, 8 if training else 1)
    module.train(training)
    decisions: list[Any] = []
    chosen = backend(device="cpu", fallback=fallback, cache=cache or None, competes=False)  # type: ignore[arg-type]
    chosen.listeners.append(decisions.extend)
    keywords = {"decoder_input_ids": inputs[2]} if len(inputs) == 3 else {}
    compiled: Any = torch.compile(module, backend=chosen)
    with torch.set_grad_enabled(training):
        expected = first_tensor(module(inputs[0], **keywords))
        wanted = gradients(module, expected) if training else {}
        result = first_tensor(compiled(inputs[0], **keywords))
        error = off_by(gradients(module, result), wanted) if training else difference(result, expected)
    total = sum(decision.multiply_adds for decision in decisions)
    taken = [decision for decision in decisions if decision.is_taken]
    return {
        "network": name,
        "error": error,
        "taken": len(taken),
        "products": len(decisions),
        "share": sum(decision.multiply_adds for decision in taken) / max(1, total),
        "reasons": sorted({decision.reason for decision in decisions if decision.reason}),
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--network", "names", multiple=True, help="Which; all by default.")
@click.option("--fallback", type=click.Choice(["inductor", "eager"]), default="inductor", show_default=True)
@click.option("--cache", default="", help="Kernels of ours; below ~/.cache/roller by default.")
@click.option("--training", is_flag=True, help="Hold gradients of a step against PyTorch's, to 1e-3.")
@click.option("--timeout", default=900.0, show_default=True, help="Seconds of a network.")
@click.option(
    "--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results into this file."
)
def main(
    *, names: tuple[str, ...], fallback: str, cache: str, training: bool, timeout: float, out: Path | None
) -> None:
    """Run every network with the backend, a process each; exit code 1 where one fails or is off by more than 1e-4, in
    training 1e-3."""
    rows: list[dict[str, Any]] = []
    for name in names or (*TIMM, *TRANSFORMERS):
        command = [sys.executable, "-m", __spec__.name, "--one", json.dumps([name, fallback, cache, training])]
        try:
            done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=timeout, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            failure = (done.stderr.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired:
            lines, failure = [], f"still running after {timeout:g} s"
        rows.append(json.loads(lines[-1]) if lines else {"network": name, "failure": failure})
        click.echo(json.dumps(rows[-1]), err=True)
        if out is not None:
            write_atomic(out, json.dumps(rows, indent=1) + "\n")
    Console(width=150).print(table(rows))
    if any("failure" in row or not row["error"] <= (1e-3 if training else 1e-4) for row in rows):
        raise SystemExit(1)


def table(rows: list[dict[str, Any]]) -> Table:
    """A row for every network."""
    shown = Table(
        "network", "error", "products in kernels of ours", "of the multiply-adds", "why others stay", box=None
    )
    for row in rows:
        if "failure" in row:
            shown.add_row(row["network"], "fails", "", "", row["failure"])
        else:
            taken = f"{row['taken']} of {row['products']}"
            shown.add_row(
                row["network"], f"{row['error']:.0e}", taken, f"{row['share']:.0%}", "; ".join(row["reasons"])
            )
    return shown


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(examined(*json.loads(sys.argv[2]))))
    else:
        main()
