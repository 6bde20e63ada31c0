"""`kestrel inspect`: what a checkpoint is and what running it takes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykestrel.cli import options

if TYPE_CHECKING:
    from pykestrel.checkpoint import Summary, TensorInfo

_CONTEXTS = (512, 2048, 4096, 32768)


@click.command("inspect")
@click.argument("directory", required=False, metavar="[DIR]", type=click.Path(path_type=Path))
@options.model_option
@click.option("--tensors", is_flag=True, help="List every tensor instead of one line per kind.")
@click.option(
    "--context",
    type=click.IntRange(1, 2**31 - 1),
    metavar="N",
    help="Show the memory needed for this context length.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def command(
    directory: Path | None,
    model_path: Path | None,
    tensors: bool,
    context: int | None,
    as_json: bool,
) -> None:
    """Show the checkpoint in DIR: configuration, tensors, sizes, memory needed.

    Only headers are read.
    """
    from pykestrel.checkpoint import summarize

    if directory is not None and model_path is not None:
        raise click.UsageError("give the directory once: as DIR or with --model")
    summary = summarize(options.resolve_model(directory or model_path))
    if as_json:
        click.echo(json.dumps(_as_dict(summary), ensure_ascii=False))
        return
    click.echo(f"{summary.directory}\n\nconfig.json")
    for name, value in sorted(summary.config.items()):
        click.echo(f"  {name:<28} {json.dumps(value, ensure_ascii=False)}")
    click.echo("\ntensors")
    for line in _every_tensor(summary) if tensors else _tensor_kinds(summary):
        click.echo(f"  {line}")
    n_files = len({tensor.file for tensor in summary.tensors})
    click.echo(
        f"  {len(summary.tensors)} tensors, {summary.n_parameters:,} values, "
        f"{size(summary.tensor_bytes)} in {n_files} file{'s' if n_files != 1 else ''}"
    )
    _print_memory(summary, context)
    click.echo(f"\nlibrary\n  {_library_verdict(summary.directory)}")


def size(n_bytes: int) -> str:
    """A size for readers: decimal units, three digits."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _tensor_kinds(summary: Summary) -> list[str]:
    """One line for all tensors that differ only in the numbers in their names."""
    kinds: dict[tuple[str, str, tuple[int, ...]], list[TensorInfo]] = defaultdict(list)
    for tensor in summary.tensors:
        pattern = re.sub(r"\.\d+(?=\.)", ".*", tensor.name)
        kinds[pattern, tensor.dtype, tensor.shape].append(tensor)
    return [
        f"{pattern:<48} {dtype:<5} {list(shape)!s:<16} x{len(members):<4}"
        f" {size(sum(member.n_bytes for member in members))}"
        for (pattern, dtype, shape), members in kinds.items()
    ]


def _every_tensor(summary: Summary) -> list[str]:
    return [
        f"{t.name:<48} {t.dtype:<5} {list(t.shape)!s:<16} {size(t.n_bytes)}"
        for t in summary.tensors
    ]


def _print_memory(summary: Summary, context: int | None) -> None:
    kv = summary.kv_bytes_per_token
    click.echo(f"\nmemory: weights {size(summary.tensor_bytes)} as stored, and for the context")
    click.echo("  " + " ".join(["tokens".rjust(8), *(f"kv {name}".rjust(10) for name in kv)]))
    longest = summary.max_context
    lengths = {n for n in _CONTEXTS if n <= longest} | ({longest} if longest else set())
    for n_tokens in sorted({1, context} if context is not None else {1, *lengths}):
        cells = [size(n_tokens * n_bytes).rjust(10) for n_bytes in kv.values()]
        click.echo("  " + " ".join([str(n_tokens).rjust(8), *cells]))


def _library_verdict(directory: Path) -> str:
    """Whether the library opens it: only it knows every rule."""
    from pykestrel._errors import KestrelError, LoadError
    from pykestrel.model import Model

    try:
        with Model(directory) as model:
            info = model.info
    except LoadError:
        return "libkestrel is not installed; `kestrel doctor` says more"
    except KestrelError as error:
        return f"refuses it: {error}"
    return (
        f"opens it: {info.model_type}, {info.n_layers} layers, {info.n_parameters:,} parameters, "
        f"{'tied' if info.tied_head else 'untied'} head, {info.weight_type} weights, "
        f"one decode reads {size(info.decode_bytes)}, fingerprint {info.fingerprint:016x}"
    )


def _as_dict(summary: Summary) -> dict[str, Any]:
    return {
        "directory": str(summary.directory),
        "config": summary.config,
        "n_parameters": summary.n_parameters,
        "tensor_bytes": summary.tensor_bytes,
        "max_context": summary.max_context,
        "kv_bytes_per_token": summary.kv_bytes_per_token,
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.n_bytes, "file": t.file}
            for t in summary.tensors
        ],
        "library": _library_verdict(summary.directory),
    }
