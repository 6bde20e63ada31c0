"""The command line, inside this process: what goes to which stream, and with which exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pykestrel import embedded, hub
from pykestrel.cli import COMMANDS, cli

SUMMARY = (
    r"\[kestrel\] prompt=\d+ cached=\d+ generated=\d+ prefill=(\d+\.\d|-) tok/s "
    r"decode=(\d+\.\d|-) tok/s first_token=\d+\.\d{3} s finish=(stop|length|cancelled)"
)


def kestrel(*arguments, input: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(cli, [str(a) for a in arguments], input=input)
    unexpected = result.exception
    assert unexpected is None or isinstance(unexpected, SystemExit), result.exc_info
    assert "Traceback" not in result.output
    return result


def refused(*arguments, code: int, input: str | bytes | None = None) -> str:
    """Run, check the exit code and that stdout is empty; return the error's sentence."""
    result = kestrel(*arguments, input=input)
    assert (result.exit_code, result.stdout) == (code, "")
    return result.stderr.strip().splitlines()[-1]


# -- run -------------------------------------------------------------------------------------------


def test_run(checkpoint):
    result = kestrel("run", "-m", checkpoint, "--max-tokens", 8, "hi")
    assert result.exit_code == 0
    assert result.stdout.endswith("\n")
    assert not result.stdout.endswith("\n\n")
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("[kestrel] prompt=9 cached=0 generated=8 ")
    assert re.fullmatch(SUMMARY, lines[0])


def test_the_answer_does_not_depend_on_how_the_prompt_came(checkpoint):
    options = ("-m", checkpoint, "--max-tokens", 8)
    expected = kestrel("run", *options, "héllo").stdout
    for prompt, text in ((), "héllo"), (("-",), "héllo\n"), ((), "héllo\r\n"):
        assert kestrel("run", *options, *prompt, input=text).stdout == expected
    assert "prompt=13 " in kestrel("run", *options, input="héllo\n").stderr
    assert "prompt=14 " in kestrel("run", *options, input="héllo\n\n").stderr


def test_run_raw_reads_control_tokens(checkpoint):
    templated = kestrel("run", "-m", checkpoint, "--max-tokens", 8, "hi")
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    raw = kestrel("run", "-m", checkpoint, "--max-tokens", 8, "--raw", prompt)
    assert raw.stdout == templated.stdout
    assert "prompt=9 " in raw.stderr


def test_system_and_template_options(checkpoint, tmp_path):
    def prompt_length(*options):
        return kestrel("run", "-m", checkpoint, "--max-tokens", 1, "hi", *options).stderr.split()[1]

    assert prompt_length() == "prompt=9"
    assert prompt_length("--system", "x") == "prompt=15"
    file = tmp_path / "t.jinja"
    file.write_text("{% if not enable_thinking %}{{ extra.a * 'hi ' }}{% endif %}")
    template = ("--chat-template", file, "--template-arg", 'extra={"a": 3}')
    assert prompt_length(*template, "--no-think") == "prompt=6"
    assert "empty" in kestrel("run", "-m", checkpoint, "x", *template, "--think").stderr


def test_run_json(checkpoint):
    options = ("-m", checkpoint, "--max-tokens", 5, "--logprobs", 2)
    text = kestrel("run", *options, "hi").stdout
    result = json.loads(kestrel("run", *options, "--json", "hi").stdout)
    assert result["text"] + "\n" == text
    assert len(result["token_ids"]) == 5
    assert result["finish"] == result["stats"]["finish"] == "length"
    assert [len(entry["top"]) for entry in result["logprobs"]] == [2] * 5
    assert [entry["token_id"] for entry in result["logprobs"]] == result["token_ids"]


def test_run_logprobs_go_to_stderr(checkpoint):
    plain = kestrel("run", "-m", checkpoint, "--max-tokens", 4, "hi")
    result = kestrel("run", "-m", checkpoint, "--max-tokens", 4, "--logprobs", 1, "hi")
    assert result.stdout == plain.stdout
    assert len(result.stderr.splitlines()) == 5


def test_run_timing_shows_the_librarys_lines(checkpoint):
    result = kestrel("run", "-m", checkpoint, "--max-tokens", 2, "--timing", "hi")
    assert "[PREFILL-TIMING] n=9 total=" in result.stderr
    assert "[PREFILL-TIMING]" not in kestrel("run", "-m", checkpoint, "hi").stderr


def test_run_sampling_options(checkpoint):
    def answer(*options):
        return kestrel("run", "-m", checkpoint, "--max-tokens", 12, "hi", *options).stdout

    hot = ("--temperature", 2, "--top-p", 0.99, "--min-p", 0.001, "--top-k", 500)
    assert answer(*hot, "--seed", 1) == answer(*hot, "--seed", 1) != answer(*hot, "--seed", 2)
    assert answer(*hot, "--top-k", 1) == answer()
    assert answer("--presence-penalty", 50, "--frequency-penalty", 5) != answer()
    assert answer("--repetition-penalty", 3) != answer()


def test_run_stop_id(checkpoint):
    options = ("-m", checkpoint, "--max-tokens", 12, "--json", "hi")
    ids = json.loads(kestrel("run", *options).stdout)["token_ids"]
    stopped = json.loads(kestrel("run", "--stop-id", ids[3], *options).stdout)
    assert stopped["token_ids"] == ids[: ids.index(ids[3]) + 1]
    assert stopped["finish"] == "stop"


def test_run_engine_options_change_no_bit(checkpoint):
    plain = kestrel("run", "-m", checkpoint, "--max-tokens", 8, "hi").stdout
    for options in (
        ("--threads", 2, "--threads-prefill", 1),
        ("--chunk", 1, "--context", 64),
        ("--isa", "portable", "--no-prefix-kv"),
        ("--spec", "on", "--spec-k", 4),
        ("--spec", "off"),
    ):
        assert kestrel("run", "-m", checkpoint, "--max-tokens", 8, "hi", *options).stdout == plain
    for quant in ("--quant", "--weight-type"):
        result = kestrel("run", "-m", checkpoint, "--max-tokens", 8, quant, "bf16", "-v", "hi")
        assert result.exit_code == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--seed", "-1"], "seed"),
        (["--quant", "q3"], "q3"),
        (["--threads", "-1"], "threads"),
        (["--max-tokens", "x"], "max-tokens"),
        (["--template-arg", "novalue"], "NAME=VALUE"),
        (["--template-arg", "messages=[]"], "messages"),
        (["--logprobs", "21"], "logprobs"),
        (["--raw", "--system", "x"], "--system"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_wrong_options(checkpoint, options, word):
    assert word in refused("run", "-m", checkpoint, "hi", *options, code=2)


def test_prompts_that_are_none(checkpoint):
    assert "the prompt is empty" in refused("run", "-m", checkpoint, "", code=2)
    assert "the prompt is empty" in refused("run", "-m", checkpoint, code=2, input="\n")
    message = refused("run", "-m", checkpoint, code=2, input=b"caf\xe9 noir")
    assert "standard input is not UTF-8 (byte 3)" in message
    assert "not UTF-8" in refused("run", "-m", checkpoint, "caf\udce9", code=2)
    assert "not UTF-8" in refused("run", "-m", checkpoint, "x", "--system", "\udce9", code=2)


def test_a_prompt_beyond_the_context(checkpoint):
    words = "word " * 5000
    message = refused("run", "-m", checkpoint, code=1, input=words)
    assert "4096" in message
    assert refused("run", "-m", checkpoint, "--context", 10, words, code=1)


def test_models_that_are_none(tmp_path, checkpoint):
    assert "no such directory" in refused("run", "-m", tmp_path / "x", "hi", code=1)
    assert "no config.json" in refused("run", "-m", tmp_path, "hi", code=1)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert "model.safetensors" in refused("run", "-m", tmp_path, "hi", code=1)
    weights = (checkpoint / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert "tokenizer.json" in refused("run", "-m", tmp_path, "hi", code=1)
    tokenizer = (checkpoint / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    assert "no chat template" in refused("run", "-m", tmp_path, "hi", code=1)
    assert kestrel("run", "-m", tmp_path, "--raw", "--max-tokens", 1, "hi").exit_code == 0
    (tmp_path / "generation_config.json").write_text("{")
    assert "generation_config.json" in refused("run", "-m", tmp_path, "--raw", "hi", code=1)


def test_a_missing_library(checkpoint, monkeypatch):
    from pykestrel import _loader

    monkeypatch.setattr(_loader, "_loaded", None)
    monkeypatch.setenv(_loader.ENVIRONMENT, "/nonexistent/libkestrel.so")
    message = refused("run", "-m", checkpoint, "hi", code=1)
    assert "/nonexistent/libkestrel.so: no such file" in message
    assert kestrel("doctor").exit_code == 1
    assert "not installed" in kestrel("inspect", checkpoint).stdout


# -- chat ------------------------------------------------------------------------------------------


def test_chat_reads_a_message_per_line(checkpoint):
    result = kestrel("chat", "-m", checkpoint, "--max-tokens", 4, input="one\n\ntwo\n")
    assert result.exit_code == 0
    summaries = [line for line in result.stderr.splitlines() if line.startswith("[kestrel]")]
    assert len(summaries) == 2
    assert "cached=0" in summaries[0]
    assert "cached=0" not in summaries[1]
    assert ">>>" not in result.output
    # The same conversation at once: the second answer is what a cold run gives.
    cold = kestrel("chat", "-m", checkpoint, "--max-tokens", 4, "--no-prefix-kv", input="one\ntwo")
    assert cold.stdout == result.stdout
    assert cold.stderr.count("cached=0") == 2


def test_chat_commands(checkpoint):
    def chat(text):
        return kestrel("chat", "-m", checkpoint, "--max-tokens", 2, input=text)

    assert "/reset" in chat("/help\n").stderr
    assert chat("/help\n").stdout == ""
    assert "/rest is no command" in chat("/rest\n").stderr
    assert chat("/quit\none\n").stdout == ""
    assert chat("one\n/reset\none\n").stderr.count("cached=0") == 1  # the opening is shared
    assert "forgotten" in chat("/reset\n").stderr
    once = chat("/no_think\n")
    assert "generated=2" in once.stderr
    assert (
        chat("//etc\n").stdout == kestrel("run", "-m", checkpoint, "--max-tokens", 2, "/etc").stdout
    )


def test_chat_refusals(checkpoint):
    result = kestrel("chat", "-m", checkpoint, "--max-tokens", 2, input=b"one\ncaf\xe9\n")
    assert result.exit_code == 2
    assert "line 2 of standard input is not UTF-8 (byte 3)" in result.stderr
    full = kestrel("chat", "-m", checkpoint, "--context", 20, input="word " * 30)
    assert full.exit_code == 1
    assert "Error: " in full.stderr


# -- the others ------------------------------------------------------------------------------------


def test_tokenize(checkpoint):
    result = kestrel("tokenize", "-m", checkpoint, 'a"<|im_end|>')
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [json.loads(piece) for _, piece in rows] == ["a", '"', "<|im_end|>"]
    assert result.stderr == "[kestrel] 3 tokens\n"
    ids = " ".join(i for i, _ in rows)
    assert kestrel("tokenize", "-m", checkpoint, "--ids", ids).stdout == 'a"<|im_end|>\n'
    assert kestrel("tokenize", "-m", checkpoint, "--ids", f"[{ids}]").stdout == 'a"<|im_end|>\n'
    plain = kestrel("tokenize", "-m", checkpoint, "--no-special", "--json", "<|im_end|>")
    assert len(json.loads(plain.stdout)) > 1
    chat = kestrel("tokenize", "-m", checkpoint, "--chat", "--json", "<|im_end|>")
    assert json.loads(chat.stdout)[3:-5] == json.loads(plain.stdout)
    assert kestrel("tokenize", "-m", checkpoint, input="ab\n").exit_code == 0
    assert kestrel("tokenize", "-m", checkpoint, "--json", "").stdout == "[]\n"


def test_tokenize_refusals(checkpoint, tmp_path):
    assert "'x1' is no token id" in refused("tokenize", "-m", checkpoint, "--ids", "x1", code=2)
    assert "no token id" in refused("tokenize", "-m", checkpoint, "--ids", "²", code=2)
    assert "no config.json" in refused("tokenize", "-m", tmp_path, "x", code=1)


def test_inspect(checkpoint):
    result = kestrel("inspect", checkpoint)
    assert result.exit_code == 0
    assert "model.layers.*.self_attn.q_proj.weight" in result.stdout
    assert "opens it: qwen3, 2 layers, 135,808 parameters" in result.stdout
    assert (
        "model.layers.1.self_attn.q_proj.weight"
        in kestrel("inspect", "-m", checkpoint, "--tensors").stdout
    )
    data = json.loads(kestrel("inspect", checkpoint, "--json").stdout)
    assert data["kv_bytes_per_token"]["f16"] == 2 * 2 * 2 * 16 * 2
    assert len(data["tensors"]) == 24
    assert "1000" in kestrel("inspect", checkpoint, "--context", 1000).stdout
    assert "once" in refused("inspect", checkpoint, "-m", checkpoint, code=2)


def test_inspect_shows_what_the_library_refuses(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    result = kestrel("inspect", tmp_path)
    assert result.exit_code == 0
    assert "refuses it: " in result.stdout
    assert "mamba" in result.stdout


def test_import_refusals(tmp_path):
    assert "no such file" in refused("import", tmp_path / "x.gguf", tmp_path / "d", code=1)
    (tmp_path / "x.gguf").write_bytes(b"no GGUF at all")
    assert "x.gguf" in refused("import", tmp_path / "x.gguf", tmp_path / "d", code=1)
    assert not (tmp_path / "d").exists()


def test_pull(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub import errors

    calls = []

    def fetch(repo_id, *, revision, local_dir, allow_patterns):
        calls.append((repo_id, revision, local_dir))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert "no config.json" in refused("pull", "a/b", code=1)
    (tmp_path / "config.json").write_text("{}")
    assert "no safetensors" in refused("pull", "a/b", code=1)
    (tmp_path / "model.safetensors").write_bytes(b"")
    result = kestrel("pull", "a/b", "--revision", "main", "--to", tmp_path)
    assert (result.stdout, result.exit_code) == (f"{tmp_path}\n", 0)
    assert calls[-1] == ("a/b", "main", tmp_path)

    def unreachable(*_args, **_options):
        raise errors.LocalEntryNotFoundError("long\nstory")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert "cannot be reached" in refused("pull", "a/b", code=1)


def test_pull_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused("pull", "nobody/nothing-at-all", code=1)
    assert message.startswith("Error: nobody/nothing-at-all: ")
    assert "not a repository name" in refused("pull", "a/b/c", code=1)
    assert "*.safetensors" in hub.PATTERNS


def test_doctor(checkpoint):
    result = kestrel("doctor", "-m", checkpoint)
    assert result.exit_code == 0
    names = [line.split("  ")[0].strip() for line in result.stdout.splitlines()]
    for name in ("library", "abi", "build", "isa available", "isa chosen", "threads", "cores"):
        assert name in names
    assert "GB/s" in result.stdout


# -- all -------------------------------------------------------------------------------------------


def test_help_and_version():
    result = kestrel("--help")
    for name, summary in COMMANDS.items():
        assert name in result.stdout
        assert summary in result.stdout
        assert kestrel(name, "--help").exit_code == 0
    assert kestrel("--version").stdout.startswith("kestrel, version ")
    assert "No such command" in refused("fly", code=2)


def test_every_command_is_there():
    context = click.Context(cli)
    names = {cli.get_command(context, name).name for name in cli.list_commands(context)}
    assert names == set(COMMANDS)
    assert Path(embedded.path()).name == "model"
