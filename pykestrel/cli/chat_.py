"""`kestrel chat`: a conversation at the terminal, or one line of standard input per turn."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykestrel.cli import options

if TYPE_CHECKING:
    from pykestrel.chat import Chat

_PROMPT = ">>> "
_HISTORY_LENGTH = 1000
_HELP = """\
/reset   forget the conversation
/help    this list
/quit    leave (so does Ctrl-D)
//...    a message that begins with a slash
Ctrl-C   stop the answer; at the prompt, twice: leave"""
# Switches that models of the family read in a message: no commands of ours.
_SOFT_SWITCHES = ("/think", "/no_think")


@click.command("chat")
@options.model_option
@options.chat_options
@options.sampling_options
@options.engine_options
@click.option(
    "--no-splice",
    is_flag=True,
    help="Let the template write earlier answers anew, and drop their reasoning if it does so.",
)
def command(model_path: Path | None, **given: Any) -> None:
    """Talk with a model. /help lists what can be typed beside messages.

    Earlier turns are not computed again. If standard input is not a terminal, each line of it is a
    message.
    """
    from pykestrel.chat import Chat

    kv_store = options.open_kv_store(given)
    with (
        options.open_model(model_path, given) as model,
        options.open_session(model, given) as session,
    ):
        system = given["system"]
        chat = Chat(
            session,
            system=None if system is None else options.checked_text(system, "system message"),
            sampling=options.sampling_params(model, given),
            stop_ids=options.stop_ids(model, given),
            max_tokens=given["max_tokens"],
            reuse_prefix=not given["no_prefix_kv"],
            spec=given["spec"],
            spec_k=given["spec_k"],
            splice=not given["no_splice"],
            kv_store=kv_store,
            **options.template_variables(given),
        )
        interactive = sys.stdin is not None and sys.stdin.isatty()
        for line in _typed_lines() if interactive else _piped_lines():
            if not _obey(chat, line, interactive=interactive, verbose=given["verbose"]):
                break
        chat.save()


def _obey(chat: Chat, line: str, *, interactive: bool, verbose: bool) -> bool:
    """Carry out one line; False to leave."""
    line = line.strip()
    word = line.partition(" ")[0]
    if not line:
        return True
    if word in ("/quit", "/exit", "/bye"):
        return False
    if word == "/reset":
        chat.reset()
        click.echo("(the conversation is forgotten)", err=True)
    elif word in ("/help", "/?"):
        click.echo(_HELP, err=True)
    elif word.startswith("/") and not word.startswith("//") and word not in _SOFT_SWITCHES:
        click.echo(f"{word} is no command; /help lists them, // begins a message", err=True)
    else:
        message = line[1:] if line.startswith("//") else line
        _answer(chat, message, interactive=interactive, verbose=verbose)
    return True


def _answer(chat: Chat, message: str, *, interactive: bool, verbose: bool) -> None:
    from pykestrel._errors import ContextFull

    try:
        stream = chat.ask(message)
        try:
            options.write_answer(stream)
        except KeyboardInterrupt:
            stream.close()
            click.echo("(stopped)", err=True)
            if not interactive:
                raise
    except ContextFull as error:
        if not interactive:
            raise
        click.echo(f"{error}; /reset begins anew", err=True)
        return
    if stream.stats is not None:
        options.echo_figures(chat.session.model, stream.stats, verbose=verbose)


def _piped_lines() -> Iterator[str]:
    source = options.binary_input("there is no standard input")
    for number, data in enumerate(source, start=1):
        yield options.decoded(data, f"line {number} of standard input")


def _typed_lines() -> Iterator[str]:
    """Lines typed at a terminal, with editing and a history that outlives the program."""
    history = _open_history()
    warned = False
    try:
        while True:
            try:
                line = input(_PROMPT)
            except EOFError:
                click.echo(err=True)
                return
            except KeyboardInterrupt:
                click.echo(err=True)
                if warned:
                    return
                warned = True
                click.echo("(Ctrl-C again, or Ctrl-D, leaves)", err=True)
                continue
            except UnicodeDecodeError as error:
                click.echo(f"(that line is not UTF-8: byte {error.start})", err=True)
                continue
            warned = False
            yield line
    finally:
        _save_history(history)


def _history_path() -> Path | None:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(state).expanduser() / "kestrel" / "history"
    except RuntimeError:  # a user without a home
        return None


def _open_history() -> Path | None:
    try:
        import readline
    except ImportError:  # a Python built without it: no editing, no history
        return None
    path = _history_path()
    if path is not None:
        with contextlib.suppress(OSError):  # the first time there is none
            readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LENGTH)
    return path


def _save_history(path: Path | None) -> None:
    if path is None:
        return
    import readline

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        readline.write_history_file(path)
    except OSError as error:
        click.echo(f"(the history cannot be kept: {error})", err=True)
