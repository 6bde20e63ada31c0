"""`kestrel tokenize`: the tokens of a text, or the text of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from pykestrel.cli import options


@click.command("tokenize")
@click.argument("text", required=False)
@options.model_option
@click.option(
    "--ids",
    "as_ids",
    is_flag=True,
    help="TEXT is token ids, between spaces or commas: print their text.",
)
@click.option("--chat", is_flag=True, help="The prompt that TEXT becomes as a user message.")
@click.option(
    "--no-special",
    is_flag=True,
    help='Read the written form of a control token ("<|im_end|>") as plain text.',
)
@click.option("--json", "as_json", is_flag=True, help="Print the ids as one JSON array.")
@options.chat_options
def command(
    text: str | None, model_path: Path | None, as_ids: bool, as_json: bool, **given: Any
) -> None:  # fmt: skip
    """Print the tokens of TEXT, one per line: id, tab, piece as a JSON string.

    TEXT is read from standard input if it is absent or "-".
    """
    from pykestrel.checkpoint import require_directory
    from pykestrel.tokenizer import Tokenizer

    source = options.read_text(text, "text")
    directory = options.resolve_model(model_path)
    require_directory(directory)
    tokenizer = Tokenizer.load(directory)
    if as_ids:
        click.echo(tokenizer.decode(_parse_ids(source), skip_special=False))
        return
    ids = _encode(tokenizer, directory, source, given)
    if as_json:
        click.echo(json.dumps(ids))
    else:
        for token_id in ids:
            piece = json.dumps(tokenizer.piece(token_id), ensure_ascii=False)
            click.echo(f"{token_id}\t{piece}")
    click.echo(f"[kestrel] {len(ids)} tokens", err=True)


def _encode(tokenizer: Any, directory: Path, text: str, given: dict[str, Any]) -> list[int]:
    if not given["chat"]:
        ids: list[int] = tokenizer.encode(text, parse_special=not given["no_special"])
        return ids
    from pykestrel.template import ChatTemplate

    messages = [{"role": "user", "content": text}]
    if given["system"] is not None:
        system = options.checked_text(given["system"], "system message")
        messages.insert(0, {"role": "system", "content": system})
    template = ChatTemplate.load(directory, file=given["chat_template"])
    rendered = template.render(messages, guard=tokenizer.guard, **options.template_variables(given))
    ids = tokenizer.encode_rendered(rendered)
    return ids


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit()) or int(word) >= 2**31:
            raise click.UsageError(f"{word!r} is no token id")
    return [int(word) for word in words]
