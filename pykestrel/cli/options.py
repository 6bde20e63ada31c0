"""Options and small services that several subcommands share.

Heavy modules are imported inside the functions: `--help` must not wait for numpy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

if TYPE_CHECKING:
    from pykestrel.completion import Stats
    from pykestrel.kv_store import KvStore
    from pykestrel.model import Model
    from pykestrel.sampling import SamplingParams
    from pykestrel.session import Session
    from pykestrel.text import TextStream

F = TypeVar("F", bound=Callable[..., Any])

_COUNT = click.IntRange(min=0, max=2**31 - 1)


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class _Size(click.ParamType):
    """A number of bytes: 300, 512M, 4G (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,15})([KMGT]?)B?", str(value).strip().upper())
        if match is None:
            self.fail(f"{value!r} is no size such as 512M or 4G", param, ctx)
        return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


model_option = click.option(
    "-m",
    "--model",
    "model_path",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Checkpoint directory. Default: the small model inside the package.",
)

weight_options = _all(
    click.option("--weight-type", "--quant", default="auto", show_default=True,
                 type=click.Choice(["auto", "f32", "bf16", "f16", "q8", "q4"]),
                 help="How weights are kept in memory; auto: as stored."),
    click.option("--kv-type", default="auto", show_default=True,
                 type=click.Choice(["auto", "f32", "f16", "q8"]),
                 help="How keys and values are kept; auto: f16."),
    click.option("--isa", default="auto", show_default=True,
                 type=click.Choice(
                     ["auto", "portable", "avx2", "avx512", "neon", "neon_dotprod"]),
                 help="Kernels to use. All give the same bits."),
    click.option("--threads", type=_COUNT, default=0, metavar="N",
                 help="Threads for decode. Default: the library's choice."),
    click.option("--threads-prefill", type=_COUNT, default=0, metavar="N",
                 help="Threads for prefill. Default: as --threads."),
    click.option("--chunk", "chunk_size", type=_COUNT, default=0, metavar="N",
                 help="Tokens per prefill pass. Default: 512."),
)  # fmt: skip

timing_options = _all(
    click.option("--timing", is_flag=True, help="Show the library's log lines on stderr."),
    click.option("-v", "--verbose", is_flag=True,
                 help="Show its debug lines too, why a cached prefix ended, what speculation did."),
)  # fmt: skip

engine_options = _all(
    weight_options,
    click.option("--context", "context_length", type=_COUNT, default=0, metavar="N",
                 help="Context length in tokens. Default: the model's, at most 4096."),
    click.option("--no-prefix-kv", is_flag=True,
                 help="Compute every prompt whole; reuse nothing."),
    click.option("--kv-dir", metavar="DIR", type=click.Path(path_type=Path),
                 help="Keep timelines in this directory: what it has need not be computed."),
    click.option("--kv-budget", metavar="SIZE", type=_Size(), default="4G", show_default=True,
                 help="Most bytes of --kv-dir; what served longest ago goes."),
    click.option("--spec", default="auto", show_default=True,
                 type=click.Choice(["off", "auto", "on"]),
                 help="Speculate; auto: where it gains. Never changes the answer."),
    click.option("--spec-k", type=click.IntRange(0, 15), default=0, metavar="K",
                 help="Most tokens of a draft. Default: 8."),
    timing_options,
)  # fmt: skip

sampling_options = _all(
    click.option("--max-tokens", type=_COUNT, default=1024, show_default=True, metavar="N",
                 help="Longest answer; 0: as long as the context allows."),
    click.option("--temperature", type=float, help="0: always the likeliest token."),
    click.option("--top-k", type=int, help="Only the k likeliest; 0: off."),
    click.option("--top-p", type=float, help="Only the likeliest that make up this probability."),
    click.option("--min-p", type=float, help="Only those this likely, relative to the likeliest."),
    click.option("--repetition-penalty", type=float, help="1: off."),
    click.option("--presence-penalty", type=float, help="0: off."),
    click.option("--frequency-penalty", type=float, help="0: off."),
    click.option("--seed", type=int, help="One seed, one answer. Default: 0."),
    click.option("--stop-id", "extra_stop_ids", type=_COUNT, multiple=True, metavar="ID",
                 help="Stop at this token too; may be repeated."),
)  # fmt: skip

chat_options = _all(
    click.option("--system", metavar="TEXT", help="The system message."),
    click.option("--chat-template", metavar="FILE", type=click.Path(path_type=Path),
                 help="Use this jinja template instead of the checkpoint's."),
    click.option("--think/--no-think", default=None,
                 help="Set the template's enable_thinking."),
    click.option("--template-arg", "template_args", multiple=True, metavar="NAME=VALUE",
                 help="Set a template variable; VALUE is JSON, or else text."),
)  # fmt: skip

ENGINE_NAMES = ("weight_type", "isa", "threads", "threads_prefill")
SESSION_NAMES = ("context_length", "chunk_size", "kv_type")
SAMPLING_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed",
)  # fmt: skip


def open_model(model_path: Path | None, options: dict[str, Any]) -> Model:
    """The model that the options ask for, with --chat-template and the log lines applied."""
    from pykestrel.model import Model

    show_log_lines(timing=options["timing"], verbose=options["verbose"])
    engine = {name: options[name] for name in ENGINE_NAMES}
    model = Model(resolve_model(model_path), **engine)
    if options.get("chat_template") is not None:
        from pykestrel.template import ChatTemplate

        model.template = ChatTemplate.load(model.path, file=options["chat_template"])
    return model


def resolve_model(model_path: Path | None) -> Path:
    """The named directory, or the embedded model, saying so."""
    if model_path is not None:
        return model_path
    from pykestrel import embedded

    click.echo("kestrel: no --model given, so the small embedded model is used", err=True)
    return embedded.path()


def open_session(model: Model, options: dict[str, Any]) -> Session:
    """A session as the options ask for it."""
    return model.session(**{name: options[name] for name in SESSION_NAMES})


def open_kv_store(options: dict[str, Any]) -> KvStore | None:
    """The store of --kv-dir, if there is one."""
    if options["kv_dir"] is None:
        return None
    if options["no_prefix_kv"]:
        raise click.UsageError("--no-prefix-kv leaves nothing for --kv-dir to do")
    from pykestrel.kv_store import KvStore

    return KvStore(options["kv_dir"], max_bytes=options["kv_budget"])


def sampling_params(model: Model, options: dict[str, Any]) -> SamplingParams:
    """The checkpoint's sampling with the options' values in place of its own."""
    given = {name: options[name] for name in SAMPLING_NAMES if options[name] is not None}
    defaults = model.defaults.sampling
    from pykestrel._errors import InvalidArgument

    try:
        return replace(defaults, **given)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def stop_ids(model: Model, options: dict[str, Any]) -> tuple[int, ...]:
    """The checkpoint's stop ids and those of --stop-id."""
    return tuple(sorted({*model.defaults.stop_ids, *options["extra_stop_ids"]}))


def template_variables(options: dict[str, Any]) -> dict[str, Any]:
    """Template variables from --think and --template-arg."""
    variables: dict[str, Any] = {}
    if options["think"] is not None:
        variables["enable_thinking"] = options["think"]
    for argument in options["template_args"]:
        name, equals, value = argument.partition("=")
        if not equals or not name.isidentifier():
            raise click.UsageError(f"--template-arg must be NAME=VALUE, not {argument!r}")
        if name in ("messages", "tools", "add_generation_prompt", "guard"):
            raise click.UsageError(f"--template-arg cannot set {name}")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables


def read_text(argument: str | None, what: str = "prompt") -> str:
    """A text from the command line, or from standard input if it is absent or "-".

    One newline at the end of standard input is dropped: `echo` and editors put it there.
    """
    if argument is not None and argument != "-":
        return checked_text(argument, what)
    stream = binary_input(f"there is no {what} and no standard input")
    if stream.isatty():
        click.echo(f"kestrel: type the {what}, then Ctrl-D", err=True)
    return without_newline(decoded(stream.read(), "standard input"))


def binary_input(otherwise: str) -> BinaryIO:
    """Standard input as bytes; UsageError if the program was started without one."""
    if sys.stdin is None or sys.stdin.closed:
        raise click.UsageError(otherwise)
    return sys.stdin.buffer


def read_file(file: Path) -> str:
    """The UTF-8 text in a file, "-" for standard input."""
    if str(file) == "-":
        return decoded(binary_input("there is no standard input").read(), "standard input")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror or error}") from error
    return decoded(data, str(file))


def plain_ids(model: Model, text: str) -> list[int]:
    """A text's ids, behind what the tokenizer puts before every text (a BOS, for some)."""
    first = model.tokenizer.encode("", add_special=True)[:1]
    return first + model.tokenizer.encode(text, parse_special=False)


def decoded(data: bytes, what: str) -> str:
    """UTF-8 bytes as text; UsageError naming the first byte that is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{what} is not UTF-8 (byte {error.start})") from error


def without_newline(text: str) -> str:
    """The text without one newline at its end."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def checked_text(text: str, what: str) -> str:
    """The text, if it is Unicode: bytes in an argument that are no UTF-8 come as surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise click.UsageError(f"the {what} is not UTF-8 (character {error.start})") from error
    return text


def show_log_lines(*, timing: bool, verbose: bool) -> None:
    """Send the library's log lines to standard error, exactly as they are."""
    logger = logging.getLogger("kestrel")
    level = logging.DEBUG if verbose else logging.INFO if timing else logging.WARNING
    logger.setLevel(level)
    logger.propagate = False
    logger.handlers[:] = [_EchoHandler()]


class _EchoHandler(logging.Handler):
    """Writes to whatever standard error is at that moment, but never into a line of an answer.

    The library logs from its own thread, while the last pieces of an answer are on their way: what
    comes between the first piece and the last waits for the end of the answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[str] | None = None  # None: write at once

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting is None:
            click.echo(record.getMessage(), err=True)
        else:
            self._waiting.append(record.getMessage())

    def hold(self) -> None:
        """From now on, keep the lines."""
        with self.lock or contextlib.nullcontext():
            if self._waiting is None:
                self._waiting = []

    def let_go(self) -> None:
        """Write what was kept, and the following lines at once again."""
        with self.lock or contextlib.nullcontext():
            lines, self._waiting = self._waiting or [], None
            for line in lines:
                click.echo(line, err=True)


def write_answer(stream: TextStream) -> None:
    """Run a stream, its text to standard output as it comes, and end the line."""
    handlers = [h for h in logging.getLogger("kestrel").handlers if isinstance(h, _EchoHandler)]
    try:
        with stream:
            for piece in stream:
                for handler in handlers:
                    handler.hold()
                click.echo(piece, nl=False)
    finally:
        try:
            if stream.text and not stream.text.endswith("\n"):
                click.echo()
        finally:
            for handler in handlers:
                handler.let_go()


def summary(stats: Stats) -> str:
    """The one line that follows every answer on standard error."""

    def rate(value: float) -> str:
        return f"{value:.1f}" if value > 0 else "-"

    return (
        f"[kestrel] prompt={stats.n_prompt} cached={stats.n_cached} "
        f"generated={stats.n_generated} prefill={rate(stats.prefill_rate)} tok/s "
        f"decode={rate(stats.decode_rate)} tok/s first_token={stats.first_token_seconds:.3f} s "
        f"finish={stats.finish or 'failed'}"
    )


def echo_figures(model: Model, stats: Stats, *, verbose: bool) -> None:
    """The summary line on standard error, and with -v what lies behind it."""
    if verbose:
        spec = stats.spec
        click.echo(f"[kestrel] prefix: {stats.prefix.explain(model.tokenizer)}", err=True)
        click.echo(
            f"[kestrel] spec: tries={spec.n_tries} drafted={spec.n_drafted} hits={spec.n_hits} "
            f"kv_rolls={spec.n_rolled_back} mean_run={spec.mean_run:.2f} "
            f"saved={spec.seconds_saved:.3f} s",
            err=True,
        )
    click.echo(summary(stats), err=True)
