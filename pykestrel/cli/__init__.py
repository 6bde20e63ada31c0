"""The `kestrel` command. Each subcommand is a module of this package, imported when it is used.

Manners of all of them: standard output carries the answer and nothing else; a bad input is one
sentence on standard error and exit code 2 (how it was asked) or 1 (what came of it).
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any

import click

from pykestrel._errors import KestrelError

# name -> what `kestrel --help` says. The module of `run` is run_.py, and so on: `import` is a word
# of the language.
COMMANDS = {
    "run": "Answer one prompt.",
    "chat": "Talk with a model.",
    "inspect": "Show a checkpoint: configuration, tensors, memory needed.",
    "tokenize": "Show the tokens of a text, or the text of tokens.",
    "perplexity": "Tell how well a model predicts a text.",
    "quantize": "Make a packed copy of a checkpoint.",
    "import": "Make a checkpoint directory of a GGUF file.",
    "pull": "Fetch a checkpoint from the Hugging Face hub.",
    "bench": "Measure how fast a model runs here.",
    "doctor": "Examine this machine and this installation.",
}
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


class _Group(click.Group):
    """Subcommands by name, and every expected error as one sentence."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{name}_")
        command: click.Command = module.command
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KestrelError as error:
            raise click.ClickException(str(error)) from error
        except MemoryError as error:
            raise click.ClickException("out of memory") from error
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has gone; click ends quietly
                raise
            raise click.ClickException(str(error)) from error


def _print_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        import pykestrel

        click.echo(f"kestrel, version {pykestrel.__version__}")
        ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Run Qwen3-family language models on this machine's CPU.

    Without --model, the small model inside the package answers.
    """


def main() -> None:
    """The entry point of the command."""
    # numpy's BLAS, which nothing here calls, would start threads that spin for a tenth of a second
    # on the cores of the first prefill.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character shows "?", and the answer goes on.
            stream.reconfigure(errors="replace")
    cli(prog_name="kestrel")
