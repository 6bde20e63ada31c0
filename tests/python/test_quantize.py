"""`quantize`: a packed copy opens, answers as packing on the fly does, and appears whole or not."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from pykestrel import (
    FileError,
    FormatError,
    InvalidArgument,
    Mismatch,
    Model,
    Unsupported,
    embedded,
)
from pykestrel.checkpoint import summarize
from pykestrel.cli import cli
from pykestrel.quantize import _estimate, quantize
from tests.golden.checkpoints import write
from tests.python.conftest import ROOT
from tests.python.test_invariance import SOME_WAYS, assert_one, available_isas, sweep

WAIT = 300.0


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the embedded model with all sorts of companions."""
    directory = tmp_path_factory.mktemp("quantize") / "source"
    shutil.copytree(embedded.path(), directory)
    (directory / "LICENSE.txt").write_text("licence")
    (directory / "README.md").write_text("readme")
    (directory / "pytorch_model.bin").write_text("other weights")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 1 }}")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if "quantize-" in path.name]


@pytest.mark.parametrize("weight_type", ["q4", "q8"])
def test_a_packed_copy_is_what_packing_on_the_fly_gives(source, tmp_path, weight_type):
    calls = []
    report = quantize(
        source, tmp_path / "packed", weight_type, progress=lambda *call: calls.append(call)
    )
    assert report.path == tmp_path / "packed"
    assert (report.weight_type, report.head_type) == (weight_type, "q8")
    assert report.n_bytes == (report.path / "model.safetensors").stat().st_size
    assert report.source_bytes == (source / "model.safetensors").stat().st_size
    assert report.n_bytes < report.source_bytes * (0.4 if weight_type == "q4" else 0.6)
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)
    ids = list(range(100))
    with Model(report.path) as packed, Model(source, weight_type=weight_type) as flown:
        assert packed.info.weight_type == flown.info.weight_type == weight_type
        with packed.session() as one, flown.session() as other:
            one.prefill(ids)
            other.prefill(ids)
            # A packed file's layers; embedding and head are q8 in both.
            assert one.logits.tobytes() == other.logits.tobytes()
            messages = [{"role": "user", "content": "hi"}]
            assert packed.encode_chat(messages) == flown.encode_chat(messages)
            assert packed.defaults == flown.defaults


def test_what_belongs_to_a_checkpoint_is_copied(source, tmp_path):
    quantize(source, tmp_path / "packed", "q4")
    ours, theirs = contents(source), contents(tmp_path / "packed")
    missing = {"README.md", "pytorch_model.bin"}
    assert set(theirs) == set(ours) - missing
    for name in set(theirs) - {"model.safetensors"}:
        assert theirs[name] == ours[name], name


@pytest.mark.parametrize("name", ["qwen3-yarn-4x", "qwen2-tied-f16", "llama-biases"])
@pytest.mark.parametrize("weight_type", ["q4", "q8"])
def test_every_architecture_and_shards(name, weight_type, tmp_path):
    directory = write(name, tmp_path)
    report = quantize(directory, tmp_path / "packed", weight_type, threads=1)
    assert not list(report.path.glob("*.index.json"))
    packed, flown = Model(report.path), Model(directory, weight_type=weight_type)
    with packed, flown, packed.session() as one, flown.session() as other:
        one.prefill(range(50))
        other.prefill(range(50))
        assert one.logits.tobytes() == other.logits.tobytes()


@pytest.mark.parametrize("name", ["embedded", "qwen3-yarn-4x", "qwen2-tied-f16", "llama-biases"])
@pytest.mark.parametrize("types", [("q4", "q4"), ("q4", "q8"), ("q8", "q8")])
def test_the_estimate_is_enough(name, types, source, tmp_path):
    directory = source if name == "embedded" else write(name, tmp_path)
    weight_type, head_type = types
    report = quantize(directory, tmp_path / "packed", weight_type, head_type=head_type)
    estimate = _estimate(summarize(directory), weight_type, head_type)
    total = sum(path.stat().st_size for path in report.path.rglob("*") if path.is_file())
    assert total <= estimate <= total * 1.2 + 20_000


def test_links_are_followed(source, tmp_path):
    """As in the hub's cache, where every file is a link."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    quantize(linked, tmp_path / "packed", "q8")
    assert not any(path.is_symlink() for path in (tmp_path / "packed").iterdir())
    with Model(tmp_path / "packed") as model:
        assert model.info.weight_type == "q8"


# -- a q4 head -------------------------------------------------------------------------------------


def logits_of(path: Path, weight_type: str = "auto") -> NDArray[np.float32]:
    """After each token of some prompts, [n_tokens, n_vocab]."""
    rows = []
    with Model(path, weight_type=weight_type) as model, model.session() as session:
        for question in ("Count to ten.", "What is your name?", "Is water wet?"):
            session.truncate(0)
            for token_id in model.encode_chat([{"role": "user", "content": question}]):
                session.decode(token_id)
                rows.append(session.logits.copy())
    return np.array(rows)


def test_a_q4_head_is_near(source, tmp_path):
    one = quantize(source, tmp_path / "q8-head", "q4", head_type="q8")
    other = quantize(source, tmp_path / "q4-head", "q4", head_type="q4")
    assert (one.head_type, other.head_type) == ("q8", "q4")
    exact, fine, coarse = (logits_of(path) for path in (source, one.path, other.path))
    assert np.isfinite(coarse).all()
    assert (coarse != fine).any(axis=1).all()
    size = np.linalg.norm(exact)
    assert np.linalg.norm(coarse - exact) < 0.3 * size
    assert np.linalg.norm(exact[::-1] - exact) > 0.6 * size  # that far is an unrelated row
    # Asked for by name, it is the same model.
    assert logits_of(other.path, "q4").tobytes() == coarse.tobytes()
    with pytest.raises(Unsupported, match="packed already"):
        logits_of(other.path, "q8")


def test_what_a_q4_head_saves_and_that_it_is_another_model(source, tmp_path):
    one = quantize(source, tmp_path / "q8-head", "q4")
    other = quantize(source, tmp_path / "q4-head", "q4", head_type="q4")
    with Model(one.path) as fine, Model(other.path) as coarse:
        assert fine.info.weight_type == coarse.info.weight_type == "q4"
        assert fine.info.fingerprint != coarse.info.fingerprint
        saved = fine.info.n_vocab // 8 * (fine.info.hidden_size // 32) * (272 - 144)
        assert fine.info.tied_head
        assert fine.info.n_vocab % 8 == 0
        assert fine.info.decode_bytes - coarse.info.decode_bytes == saved
        assert fine.info.weight_bytes - coarse.info.weight_bytes == saved
        assert abs(one.n_bytes - other.n_bytes - saved) < 4096  # the headers' lengths
        with fine.session() as session:
            session.prefill(range(50))
            session.save(tmp_path / "snapshot")
        with coarse.session() as session, pytest.raises(Mismatch, match="fingerprint"):
            session.restore(tmp_path / "snapshot")


def shorten_vocabulary(directory: Path) -> None:
    """By three rows, so that the last block of 8 is not full."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & set(tensors):
        tensors[name] = tensors[name][:-3].copy()
    save_file(tensors, path)
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] -= 3
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "tied"), [("qwen2-tied-f16", True), ("qwen3-default-head-dim", False)]
)
def test_a_q4_head_gives_one_answer(name, tied, tmp_path):
    directory = write(name, tmp_path)
    shorten_vocabulary(directory)
    packed = quantize(directory, tmp_path / "packed", "q4", head_type="q4").path
    with Model(packed) as model:
        assert (model.info.n_vocab, bool(model.info.tied_head)) == (317, tied)
    found = sweep(packed, name, SOME_WAYS)
    assert_one(found)
    assert sum(map(len, found.values())) == len(SOME_WAYS) * len(available_isas())


# -- the destination -------------------------------------------------------------------------------


def test_an_existing_destination_is_refused(source, tmp_path):
    target = tmp_path / "packed"
    quantize(source, target, "q8")
    before = contents(target)
    with pytest.raises(FileError, match="exists already"):
        quantize(source, target, "q4")
    assert contents(target) == before
    report = quantize(source, target, "q4", overwrite=True)
    assert contents(target) != before
    assert report.path == target
    with Model(target) as model:
        assert model.info.weight_type == "q4"
    assert not leftovers(tmp_path)


def test_what_is_no_checkpoint_is_never_replaced(source, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_text("cat")
    (tmp_path / "file").write_text("text")
    for target in (photos, tmp_path / "file", source, source.parent, tmp_path / "no" / "parent"):
        with pytest.raises(FileError):
            quantize(source, target, "q4", overwrite=True)
    assert contents(photos) == {"cat.jpg": b"cat"}
    assert (tmp_path / "file").read_text() == "text"
    (tmp_path / "empty").mkdir()
    assert quantize(source, tmp_path / "empty", "q4", overwrite=True).n_bytes > 0


def test_a_full_disk_is_seen_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(FileError, match="disk space"):
        quantize(source, tmp_path / "packed", "q4")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(source, tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(small)]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        usage = type("Usage", (), {"free": 1 << 40})  # as if another program filled it meanwhile
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
        with pytest.raises(FileError, match="No space left"):
            quantize(source, small / "packed", "q8")
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


# -- refusals --------------------------------------------------------------------------------------


def test_packing_twice_is_refused(source, tmp_path):
    quantize(source, tmp_path / "packed", "q4")
    with pytest.raises(Unsupported, match="packed already"):
        quantize(tmp_path / "packed", tmp_path / "again", "q8")
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


@pytest.mark.parametrize("weight_type", ["", "auto", "bf16", "Q4"])
def test_other_types_are_refused(source, tmp_path, weight_type):
    with pytest.raises(InvalidArgument, match="q4 or q8"):
        quantize(source, tmp_path / "packed", weight_type)


@pytest.mark.parametrize(
    ("weight_type", "head_type", "reason"),
    [
        ("q4", "", "auto, q4 or q8, not ''"),
        ("q4", "bf16", "auto, q4 or q8, not 'bf16'"),
        ("q8", "q4", "a q4 head needs q4 layers"),
    ],
)
def test_other_heads_are_refused(source, tmp_path, weight_type, head_type, reason):
    with pytest.raises(InvalidArgument, match=reason):
        quantize(source, tmp_path / "packed", weight_type, head_type=head_type)
    assert not list(tmp_path.iterdir())


def test_a_damaged_source_leaves_nothing(source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises((FileError, FormatError)):
        quantize(copy, tmp_path / "packed", "q4")
    weights.unlink()
    with pytest.raises(FileError):
        quantize(copy, tmp_path / "packed", "q4")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


# -- interrupted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [KeyboardInterrupt, ValueError])
def test_an_exception_in_progress_leaves_nothing(source, tmp_path, problem):
    def progress(done, total):
        if done > total // 2:
            raise problem("enough")

    with pytest.raises(problem):
        quantize(source, tmp_path / "packed", "q4", progress=progress)
    assert not list(tmp_path.iterdir())
    quantize(source, tmp_path / "packed", "q4")


SLOW = """
import sys, time
from pykestrel.quantize import quantize

def progress(done, total):
    print(done, flush=True)
    time.sleep(0.05)

quantize(sys.argv[1], sys.argv[2], "q4", progress=progress)
"""


def test_ctrl_c_leaves_nothing(source, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), str(tmp_path / "packed")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    assert leftovers(tmp_path)  # it is at work
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=WAIT)
    assert "KeyboardInterrupt" in err
    assert time.monotonic() - started < WAIT
    assert not list(tmp_path.iterdir())


# -- the command -----------------------------------------------------------------------------------


def kestrel(*arguments):
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def test_the_command(source, tmp_path):
    target = tmp_path / "packed"
    result = kestrel("quantize", source, target, "--type", "q4")
    assert (result.exit_code, result.stdout) == (0, f"{target}\n")
    assert "parameters, 2.5 MB to 841 kB" in result.stderr.splitlines()[-1]
    again = kestrel("quantize", source, target, "--type", "q4")
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr.splitlines()[-1] == f"Error: {target}: exists already"
    assert kestrel("quantize", source, target, "--type", "q8", "--force").exit_code == 0
    for wrong in (("--type", "f16"), (), ("--type", "q4", "--head", "bf16")):
        assert kestrel("quantize", source, tmp_path / "x", *wrong).exit_code == 2
    run = kestrel("run", "-m", target, "--max-tokens", 3, "hi")
    assert run.exit_code == 0


def test_the_command_with_a_q4_head(source, tmp_path):
    target = tmp_path / "packed"
    result = kestrel("quantize", source, target, "--type", "q4", "--head", "q4")
    assert (result.exit_code, result.stdout) == (0, f"{target}\n")
    assert result.stderr.splitlines()[-1].startswith("[kestrel] q4, head q4: ")
    inspected = kestrel("inspect", target)
    assert "model.embed_tokens.weight.q4" in inspected.stdout
    assert "tied head, q4 weights" in inspected.stdout
    refused = kestrel("quantize", source, tmp_path / "x", "--type", "q8", "--head", "q4")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.splitlines()[-1] == "Error: a q4 head needs q4 layers, not q8"
    assert not (tmp_path / "x").exists()


def test_quant_on_any_command_packs_on_the_fly(source, tmp_path):
    target = tmp_path / "packed"
    kestrel("quantize", source, target, "--type", "q4")
    flown = kestrel("run", "-m", source, "--quant", "q4", "--max-tokens", 8, "Count to three.")
    packed = kestrel("run", "-m", target, "--max-tokens", 8, "Count to three.")
    assert flown.exit_code == 0
    assert flown.stdout == packed.stdout
