"""`quantize`: a packed copy opens, answers as packing on the fly does, and appears whole or not."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pykestrel import FileError, FormatError, InvalidArgument, Model, Unsupported, embedded
from pykestrel.checkpoint import summarize
from pykestrel.cli import cli
from pykestrel.quantize import _estimate, quantize
from tests.golden.checkpoints import write
from tests.python.conftest import ROOT

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
    assert report.weight_type == weight_type
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
    estimate = _estimate(summarize(directory), weight_type)
    total = sum(path.stat().st_size for path in report.path.rglob("*"))
    assert total - 4096 <= estimate <= total * 1.2 + 20_000
    packed, flown = Model(report.path), Model(directory, weight_type=weight_type)
    with packed, flown, packed.session() as one, flown.session() as other:
        one.prefill(range(50))
        other.prefill(range(50))
        assert one.logits.tobytes() == other.logits.tobytes()


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
    for wrong in (("--type", "f16"), ()):
        assert kestrel("quantize", source, tmp_path / "x", *wrong).exit_code == 2
    run = kestrel("run", "-m", target, "--max-tokens", 3, "hi")
    assert run.exit_code == 0


def test_quant_on_any_command_packs_on_the_fly(source, tmp_path):
    target = tmp_path / "packed"
    kestrel("quantize", source, target, "--type", "q4")
    flown = kestrel("run", "-m", source, "--quant", "q4", "--max-tokens", 8, "Count to three.")
    packed = kestrel("run", "-m", target, "--max-tokens", 8, "Count to three.")
    assert flown.exit_code == 0
    assert flown.stdout == packed.stdout
