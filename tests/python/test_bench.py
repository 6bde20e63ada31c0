"""`kestrel bench`: what it counts and how it shows it. Never how fast anything was."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pykestrel import Model, bench
from pykestrel.cli import cli

SMALL = ("--prompt", "5,40", "--depth", "0,33", "--decode", "3", "--repeat", "2")


def run(*arguments):
    result = CliRunner().invoke(cli, ["bench", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def test_text(checkpoint):
    result = run("-m", checkpoint, *SMALL)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("weights f32, kv f16, ")
    assert [line.split()[:2] for line in lines[1:3]] == [["prefill", "5"], ["prefill", "40"]]
    assert [line.split()[:2] for line in lines[3:5]] == [["decode", "@"], ["decode", "@"]]
    assert all("GMAC/s" in line and "of peak" not in line for line in lines[1:3])
    assert all("% of reading" in line for line in lines[3:5])


def test_json_has_one_object_for_every_combination(checkpoint):
    result = run(
        "-m", checkpoint, *SMALL, "--json", "--weight-type", "f32,bf16", "--isa", "portable",
        "--threads", "1,2",
    )  # fmt: skip
    found = [json.loads(line) for line in result.stdout.splitlines()]
    opened = [(r["opened"]["threads"], r["opened"]["weight_type"]) for r in found]
    assert opened == [(1, "f32"), (1, "bf16"), (2, "f32"), (2, "bf16")]
    assert all(r["opened"]["isa"] == "portable" for r in found)
    assert [p["n_tokens"] for p in found[0]["prefills"]] == [5, 40]
    assert [d["depth"] for d in found[0]["decodes"]] == [0, 33]
    assert found[0]["opened"]["decode_bytes"] > found[1]["opened"]["decode_bytes"]


def test_auto_is_not_repeated_under_its_own_name(checkpoint):
    result = run("-m", checkpoint, *SMALL, "--weight-type", "auto,f32,auto", "--json")
    assert len(result.stdout.splitlines()) == 1


def test_what_is_counted(checkpoint):
    plan = bench.Plan(prompts=(16,), depths=(0, 20), n_decode=4, repeats=1, int8_peak=1e9)
    result = bench.measure(checkpoint, plan, threads=1)
    with Model(checkpoint, threads=1) as model:
        info = model.info
        with model.session(context_length=64) as session:
            row = session.kv_bytes_per_token
    prefill, decodes = result.prefills[0], result.decodes
    # One token meets all weights but the norms; the embedding is the head too.
    norms = (2 * info.n_layers + 1) * info.hidden_size + 2 * info.n_layers * info.head_dim
    assert bench.prefill_macs(info, 1) == info.n_parameters - norms
    macs = bench.prefill_macs(info, 16)
    assert macs is not None
    assert prefill.mac_rate == pytest.approx(macs / prefill.gemm_seconds)
    assert prefill.peak_share == pytest.approx(prefill.mac_rate / 1e9)
    assert prefill.tokens_per_second == pytest.approx(16 / prefill.seconds)
    for decode, rows in zip(decodes, (1 + 2.5, 20 + 2.5), strict=True):
        expected = (info.decode_bytes + rows * row) / decode.seconds
        assert decode.byte_rate == pytest.approx(expected)
        assert decode.read_share == pytest.approx(expected / result.opened.read_rate)


def test_a_mixture_has_no_fixed_number_of_products(model):
    class Info:
        model_type = "qwen3_moe"

    assert bench.prefill_macs(Info(), 16) is None
    assert bench.prefill_macs(model.info, 16) is not None


def test_of_the_last_layer_a_prompt_needs_keys_and_values(model):
    info = model.info
    saved = info.hidden_size * (2 * info.n_heads * info.head_dim + 3 * info.intermediate_size)
    head = info.n_vocab * info.hidden_size
    one, three = bench.prefill_macs(info, 1), bench.prefill_macs(info, 3)
    assert three == one + 2 * (one - head - saved)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prompt", "0"), "'0' is not a number from 1"),
        (("--prompt", ""), "the list is empty"),
        (("--depth", "1,x"), "'x' is not a number from 0"),
        (("--depth", "٣"), "is not a number from 0"),
        (("--weight-type", "q5"), "'q5' is not one of auto, f32"),
        (("--isa", "auto,sse"), "'sse' is not one of auto, portable"),
        (("--decode", "0"), "is not in the range"),
    ],
)
def test_refusals(checkpoint, arguments, sentence):
    result = run("-m", checkpoint, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr


def test_what_the_library_refuses_is_one_sentence(checkpoint):
    result = run("-m", checkpoint, "--prompt", "5000")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "5000" in result.stderr or "4096" in result.stderr


def test_the_embedded_model_is_the_default():
    result = run("--prompt", "4", "--depth", "0", "--decode", "2", "--repeat", "1")
    assert result.exit_code == 0
    assert "embedded" in result.stderr
