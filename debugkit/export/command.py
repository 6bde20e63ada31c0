"""`debugkit export`: a recorded trace as a page, or for ui.perfetto.dev."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from debugkit.commands.common import ends_in_a_sentence, open_for_writing
from debugkit.errors import DebugkitError, ExitCode
from debugkit.export import chrome, html
from debugkit.export.words import Words, find_words, open_words
from debugkit.records import Meta, Record, RecordError, read

_FILE = click.Path(dir_okay=False, allow_dash=True, path_type=Path)


@click.command("export")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--html",
    "html_path",
    type=_FILE,
    metavar="FILE",
    help="Write a page that any browser shows, without network.",
)
@click.option(
    "--chrome",
    "chrome_path",
    type=_FILE,
    metavar="FILE",
    help="Write Chrome trace JSON; open it at ui.perfetto.dev.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="A checkpoint or tokenizer.json that gives the page its token text.  "
    "[default: the checkpoint that the traced command names]",
)
@click.option("--no-text", is_flag=True, help="Show token ids only.")
@ends_in_a_sentence
def command(
    trace: Path,
    html_path: Path | None,
    chrome_path: Path | None,
    tokenizer: Path | None,
    no_text: bool,
) -> ExitCode:
    """Write TRACE, a file of `debugkit trace --json`, in other formats. "-" is standard output.

    \b
    debugkit export trace.jsonl --html trace.html
    debugkit export trace.jsonl --chrome trace.json
    """
    if html_path is None and chrome_path is None:
        raise click.UsageError("Say what to write: --html FILE, --chrome FILE or both.")
    if tokenizer is not None and no_text:
        raise click.UsageError("--tokenizer and --no-text exclude each other.")
    try:
        records = read(trace)
        words = words_for(records, tokenizer, no_text) if html_path is not None else Words()
        write_files(records, html_path, chrome_path, words)
    except (RecordError, UnicodeDecodeError) as error:
        where = "" if str(error).startswith(str(trace)) else f"{trace}: "
        raise DebugkitError(f"{where}{error}.") from None
    return ExitCode.OK


def write_files(
    records: list[Record], html_path: Path | None, chrome_path: Path | None, words: Words
) -> None:
    """Write what is asked for; everything is made first, so an error leaves no half of it."""
    texts: list[tuple[Path, str, str]] = []
    if html_path is not None:
        texts.append((html_path, "--html", html.page(records, words)))
    if chrome_path is not None:
        texts.append((chrome_path, "--chrome", json.dumps(chrome.document(records)) + "\n"))
    for path, option, text in texts:
        if str(path) == "-":
            sys.stdout.write(text)
            continue
        with open_for_writing(path, option) as stream:
            stream.write(text)


def words_for(records: list[Record], tokenizer: Path | None, no_text: bool) -> Words:
    """The token text that the options ask for."""
    if no_text:
        return Words()
    if tokenizer is not None:
        return open_words(tokenizer)
    meta = records[0]
    assert isinstance(meta, Meta)
    return find_words(meta.command)
