"""`debugkit dump`: the stages of one run as .npy files, and what `debugkit diff` shares with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from debugkit.errors import DebugkitError, ExitCode
from debugkit.specs import Spec, run
from debugkit.stages import Dump, Trouble, is_dump


def ends_like_diff(command: Callable[..., ExitCode]) -> Callable[..., None]:
    """Exit codes as diff(1) has them: 0 equal, 1 different, 2 trouble, with one sentence."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        code, sentence = ExitCode.USAGE, ""
        try:
            code = command(*args, **options)
        except DebugkitError as error:
            sentence = str(error)
        except BrokenPipeError:  # `debugkit diff ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            sentence = f"{error.filename or 'output'}: {error.strerror}."
        except KeyboardInterrupt:
            code, sentence = ExitCode.INTERRUPTED, "Interrupted."
        if sentence:
            click.echo(f"debugkit: {sentence}", err=True)
        sys.exit(int(code))

    return run


ids_option = click.option(
    "--ids", metavar="1,2,3", help="Token ids, between commas or blanks; - reads them from stdin."
)
prompt_option = click.option(
    "--prompt", metavar="TEXT", help="A user's message; the model's template makes the ids."
)
raw_option = click.option("--raw", is_flag=True, help="Encode --prompt as it is: no template.")
only_option = click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Keep these stages only: 'layer.3.*', '*.attn.q', logits. May be repeated.",
)


@click.command("dump")
@click.option(
    "--model",
    "text",
    default="embedded",
    show_default=True,
    metavar="SPEC",
    help="DIR?weight_type=q4&isa=portable&threads=1&kv=f32&chunk=7&door=decode&library=FILE, "
    "oracle:DIR or transformers:DIR.",
)
@ids_option
@prompt_option
@raw_option
@only_option
@click.option("--force", is_flag=True, help="Replace OUT if it is a dump.")
@click.option("--into", is_flag=True, hidden=True)  # OUT exists and is filled as it stands
@click.argument("out", type=click.Path(path_type=Path))
@ends_like_diff
def command(
    text: str,
    ids: str | None,
    prompt: str | None,
    raw: bool,
    only: tuple[str, ...],
    force: bool,
    into: bool,
    out: Path,
) -> ExitCode:
    """Write the stages of one run to the directory OUT: layer.12.attn.q.npy and so on.

    Each file holds float32 [rows, width], a row per token; index.json says what was run and which
    stages there are. OUT appears when all of it is written.

    \b
    debugkit dump --prompt "Say hello in one word." out
    debugkit dump --model 'DIR?weight_type=q4&kv=f32' --ids 1,2,3 --only '*.attn.q' out
    """
    from pykestrel._directory import fresh_directory

    spec = Spec.parse(text)
    token_ids = read_ids(ids, prompt, raw, [spec])
    if into:
        run(spec, token_ids, out, only)
        return ExitCode.OK
    out = out.absolute()
    check_destination(out, force)
    with fresh_directory(out, "dump") as directory:
        dump = run(spec, token_ids, directory, only)
    n_bytes = sum(path.stat().st_size for path in out.iterdir())
    click.echo(
        f"{out}: {len(dump.entries)} stages of {len(token_ids)} tokens, {n_bytes / 1e6:.1f} MB"
    )
    return ExitCode.OK


def check_destination(out: Path, force: bool) -> None:
    """Trouble unless a dump may be written as `out`; only another dump is ever replaced."""
    if not out.parent.is_dir():
        raise Trouble(f"{out} cannot be made: {out.parent} is not a directory.")
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink() or not is_dump(out):
        raise Trouble(f"{out} exists and is not a dump, so it is left alone.")
    if not force:
        raise Trouble(f"{out} exists; --force replaces it.")


def read_ids(
    ids: str | None, prompt: str | None, raw: bool, specs: Sequence[Spec]
) -> tuple[int, ...]:
    """The ids of --ids or --prompt, or those of the first spec that is a dump."""
    if ids is not None and prompt is not None:
        raise Trouble("--ids and --prompt exclude each other.")
    if ids is not None:
        return _parse_ids(sys.stdin.read() if ids == "-" else ids)
    dumps = [spec for spec in specs if spec.kind == "dump"]
    if prompt is not None:
        if dumps:
            raise Trouble(f"{dumps[0].text} holds its own ids; leave --prompt out.")
        return _encode(specs[0].path, prompt, raw)
    if not dumps:
        raise Trouble("which tokens? Give --ids 1,2,3 or --prompt TEXT.")
    return Dump.open(dumps[0].path).token_ids


def _parse_ids(text: str) -> tuple[int, ...]:
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit()) or int(word) >= 2**31:
            raise Trouble(f"{word!r} is no token id.")
    if not words:
        raise Trouble("there are no token ids.")
    return tuple(int(word) for word in words)


def _encode(directory: Path, prompt: str, raw: bool) -> tuple[int, ...]:
    """As `kestrel run` does: through the model's template, unless `raw`."""
    from pykestrel import ChatTemplate, KestrelError, Tokenizer

    try:
        tokenizer = Tokenizer.load(directory)
        if raw:
            ids = tokenizer.encode(prompt, add_special=True)
        else:
            rendered = ChatTemplate.load(directory).render(
                [{"role": "user", "content": prompt}],
                guard=tokenizer.guard,
                add_generation_prompt=True,
            )
            ids = tokenizer.encode_rendered(rendered)
    except KestrelError as error:
        raise Trouble(f"{error}") from error
    if not ids:
        raise Trouble("the prompt has no tokens.")
    return tuple(ids)
