"""`kestrel run`: one prompt, one answer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykestrel.cli import INTERRUPTED, options

if TYPE_CHECKING:
    from pykestrel.completion import Token
    from pykestrel.model import Model
    from pykestrel.text import TextStream


@click.command("run")
@click.argument("prompt", required=False)
@options.model_option
@click.option("--raw", is_flag=True, help="Give the model the prompt as it is, without a template.")
@options.chat_options
@options.sampling_options
@options.engine_options
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    metavar="N",
    help="List each token with its log-probability and the N likeliest, on stderr.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object (text, token ids, statistics) instead of the text.",
)
@click.pass_context
def command(
    ctx: click.Context, /, prompt: str | None, model_path: Path | None, **given: Any
) -> None:  # fmt: skip
    """Answer PROMPT, or standard input if PROMPT is absent or "-".

    The answer goes to standard output; one line of figures goes to standard error.
    """
    text = options.read_text(prompt)
    if not text:
        raise click.UsageError("the prompt is empty")
    if given["raw"] and given["system"] is not None:
        raise click.UsageError("--system has no place in a --raw prompt")
    kv_store = options.open_kv_store(given)
    with (
        options.open_model(model_path, given) as model,
        options.open_session(model, given) as session,
    ):
        from pykestrel.text import TextStream

        prompt_ids = _prompt_ids(model, text, given)
        if kv_store is not None:
            kv_store.restore(session, prompt_ids)
        stream = TextStream(
            session,
            prompt_ids,
            max_tokens=given["max_tokens"],
            stop_ids=options.stop_ids(model, given),
            sampling=options.sampling_params(model, given),
            logprobs=given["logprobs"] is not None,
            n_top_logprobs=given["logprobs"] or 0,
            reuse_prefix=not given["no_prefix_kv"],
            spec=given["spec"],
            spec_k=given["spec_k"],
        )
        interrupted = _run(stream, as_json=given["as_json"])
        if given["logprobs"] is not None:
            _list_logprobs(model, stream.tokens)
        if stream.stats is not None:
            options.echo_figures(model, stream.stats, verbose=given["verbose"])
        if kv_store is not None and not interrupted:
            kv_store.save(session)
    if interrupted:
        ctx.exit(INTERRUPTED)


def _prompt_ids(model: Model, text: str, given: dict[str, Any]) -> list[int]:
    if given["raw"]:
        return model.tokenizer.encode(text, add_special=True)
    messages = [{"role": "user", "content": text}]
    if given["system"] is not None:
        system = options.checked_text(given["system"], "system message")
        messages.insert(0, {"role": "system", "content": system})
    return model.encode_chat(messages, **options.template_variables(given))


def _run(stream: TextStream, *, as_json: bool) -> bool:
    """Run the stream; True if Ctrl-C cut it short."""
    try:
        if as_json:
            stream.collect()
        else:
            options.write_answer(stream)
    except KeyboardInterrupt:
        stream.close()
        return True
    finally:
        if as_json and stream.stats is not None:
            click.echo(json.dumps(_as_dict(stream), ensure_ascii=False))
    return False


def _as_dict(stream: TextStream) -> dict[str, Any]:
    assert stream.stats is not None
    result: dict[str, Any] = {
        "text": stream.text,
        "token_ids": [token.token_id for token in stream.tokens],
        "finish": stream.finish,
        "stats": dataclasses.asdict(stream.stats),
    }
    if any(token.logprob is not None for token in stream.tokens):
        result["logprobs"] = [
            {"token_id": token.token_id, "logprob": token.logprob, "top": token.top}
            for token in stream.tokens
        ]
    return result


def _list_logprobs(model: Model, tokens: list[Token]) -> None:
    def shown(token_id: int, logprob: float | None) -> str:
        return f"{token_id} {model.tokenizer.piece(token_id)!r} {logprob or 0.0:.4f}"

    for token in tokens:
        best = "  ".join(shown(*entry) for entry in token.top)
        line = shown(token.token_id, token.logprob) + (f"  | {best}" if best else "")
        click.echo(line, err=True)
