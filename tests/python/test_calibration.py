"""Calibration: it changes no model, is the same everywhere, and makes packed copies better."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from pykestrel import (
    FileError,
    FormatError,
    InvalidArgument,
    Model,
    Unsupported,
    calibration,
    embedded,
)
from pykestrel.checkpoint import read_vector, summarize
from pykestrel.cli import cli
from pykestrel.quantize import _estimate, quantize
from tests.golden.checkpoints import write
from tests.python.test_invariance import available_isas

ARCHITECTURES = ["qwen3-yarn-4x", "llama-biases"]  # float32; one has biases everywhere


def ids(n, n_vocab, seed=0):
    return np.random.RandomState(seed).randint(0, n_vocab, n).tolist()


def uneven(name, tmp_path) -> Path:
    """A checkpoint some channels of which are much larger than their neighbours."""
    directory = write(name, tmp_path)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor, values in tensors.items():
            if tensor.endswith("layernorm.weight"):
                values[3::17] *= 40
            if tensor.endswith(("v_proj.weight", "up_proj.weight")):
                values[5::19] *= 25
        save_file(tensors, file)
    return directory


def measured(directory, **options):
    with Model(directory, **options) as model:
        texts = [ids(60, model.info.n_vocab, 1), ids(40, model.info.n_vocab, 2)]
        return calibration.measure(model, texts)


def shapes_of(directory):
    return {tensor.name: tensor.shape for tensor in summarize(directory).tensors}


def apply(directory, tensors):
    """The scaling of `calibrated_tensors`, done to the float32 weights themselves."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        for name, values in weights.items():
            found = by_name.get(name)
            rows = None if found is None else found.row_exponents
            columns = None if found is None else found.column_exponents
            if rows is not None:
                shape = (-1, 1) if values.ndim == 2 else -1
                values = np.ldexp(values, rows.astype(int).reshape(shape))
            if columns is not None:
                values = np.ldexp(values, columns.astype(int))
            weights[name] = np.ascontiguousarray(values)
        save_file(weights, file)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scaling_changes_no_bit_of_a_model(name, tmp_path):
    directory = uneven(name, tmp_path)
    found = measured(directory)
    tensors = calibration.calibrated_tensors(found, shapes_of(directory), "q8")
    exponents = [t.row_exponents for t in tensors if t.row_exponents is not None]
    assert sum(np.count_nonzero(e) for e in exponents) > 50
    assert any(t.name.endswith("bias") for t in tensors) == (name == "llama-biases")
    scaled = tmp_path / "scaled"
    shutil.copytree(directory, scaled)
    apply(scaled, tensors)
    prompt = ids(70, found.info.n_vocab, 3)
    logits = []
    for path in (directory, scaled):
        with Model(path) as model, model.session(kv_type="f32") as session:
            session.prefill(prompt)
            logits.append(session.logits.tobytes())
    assert logits[0] == logits[1]
    again = measured(scaled)
    for place in found.powers.keys() - {("head", -1)}:
        assert unevenness(again.powers[place]) < unevenness(found.powers[place]), place


def unevenness(power):
    """How far the channels of a group are apart, in logarithms."""
    return float(np.log2(power.reshape(-1, 32)).std(axis=1).mean())


def test_a_calibrated_copy_has_the_same_bytes_everywhere(tmp_path):
    directory = uneven("qwen3-yarn-4x", tmp_path)
    ways = [{"isa": isa, "threads": n} for isa in available_isas() for n in (1, 2)]
    for weight_type in ("q4", "q8"):
        files = set()
        for i, way in enumerate(ways):
            target = tmp_path / f"{weight_type}-{i}"
            found = measured(directory, **way)
            quantize(directory, target, weight_type, calibration=found, threads=1 + i % 3)
            files.add((target / "model.safetensors").read_bytes())
        assert len(files) == 1
        plain = quantize(directory, tmp_path / weight_type, weight_type).path
        assert (plain / "model.safetensors").read_bytes() not in files


def test_the_estimate_is_enough_for_scaled_norms(tmp_path):
    found = measured(embedded.path())
    report = quantize(embedded.path(), tmp_path / "packed", "q8", calibration=found)
    total = sum(path.stat().st_size for path in report.path.rglob("*") if path.is_file())
    assert total <= _estimate(summarize(embedded.path()), "q8", "q8")


@pytest.fixture(scope="module")
def own():
    """The embedded model calibrated on its own text."""
    with Model.embedded() as model:
        return calibration.measure(model, calibration.own_texts(model, n_texts=8, length=64))


def answers_of(directory):
    """Log-probabilities of a conversation that the calibration has not seen."""
    with Model(directory) as model:
        words = "Count to ten. One, two, three. What is your name? Is water wet? Hello there."
        text = model.encode_chat([{"role": "user", "content": words}])
        with model.session() as session:
            rows = []
            for token_id in text:
                session.decode(token_id)
                logits = session.logits.astype(np.float64)
                rows.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
            return np.array(rows)


def divergence(exact, other):
    """Mean Kullback-Leibler divergence, in nats."""
    return float((np.exp(exact) * (exact - other)).sum(axis=1).mean())


@pytest.mark.parametrize("types", [("q4", "q8"), ("q4", "q4")])
def test_a_calibrated_copy_is_nearer(types, own, tmp_path):
    weight_type, head_type = types
    exact = answers_of(embedded.path())
    found = []
    for name, seen in (("plain", None), ("calibrated", own)):
        target = tmp_path / name
        quantize(embedded.path(), target, weight_type, head_type=head_type, calibration=seen)
        found.append(divergence(exact, answers_of(target)))
    assert found[1] < 0.9 * found[0], found


def test_own_texts_are_repeatable_and_different():
    with Model.embedded() as model:
        texts = calibration.own_texts(model, n_texts=4, length=20)
        assert texts == calibration.own_texts(model, n_texts=4, length=20)
        assert [len(text) for text in texts] == [20] * 4
        assert len({tuple(text[1:]) for text in texts}) == 4
    with Model.embedded(isa="portable", threads=1) as model:
        assert calibration.own_texts(model, n_texts=4, length=20) == texts


def test_windows():
    assert [list(w) for w in calibration.windows(range(5))] == [list(range(5))]
    assert calibration.windows([]) == []
    many = calibration.windows(range(512 * 100))
    assert len(many) == calibration.MOST_WINDOWS
    assert (many[0][0], many[-1][-1]) == (0, 512 * 100 - 1)
    assert {len(w) for w in many} == {512}
    assert {len(w) for w in calibration.windows(range(100), longest=40)} == {40, 20}


def test_what_cannot_be_measured():
    with Model.embedded() as model:
        for texts in ([], [[]]):
            with pytest.raises(InvalidArgument, match="no text"):
                calibration.measure(model, texts)
        assert calibration.measure(model, [[], [5]]).n_tokens == 1


def test_a_calibration_of_another_model_is_refused(own, tmp_path):
    directory = write("qwen3-yarn-4x", tmp_path)
    with pytest.raises(InvalidArgument, match="of another model"):
        quantize(directory, tmp_path / "packed", "q4", calibration=own)
    deeper = measured(write("qwen3-default-head-dim", tmp_path))
    with pytest.raises(InvalidArgument, match="of another model"):
        quantize(embedded.path(), tmp_path / "packed", "q8", calibration=deeper)
    assert not (tmp_path / "packed").exists()


def test_widths_that_cannot_be_packed_are_refused_as_ever(tmp_path):
    directory = write("qwen3-untied", tmp_path)  # rows of 72 and 104 values
    for weight_type in ("q4", "q8"):
        with pytest.raises(Unsupported, match="a multiple of 32 columns is needed"):
            quantize(directory, tmp_path / "packed", weight_type, calibration=measured(directory))
    assert not (tmp_path / "packed").exists()


def test_read_vector(tmp_path):
    directory = write("qwen2-tied-f16", tmp_path)
    name = "model.norm.weight"
    file = directory / "model.safetensors"
    assert read_vector(directory, name).tolist() == load_file(file)[name].astype(float).tolist()
    bf16 = read_vector(embedded.path(), name)
    assert bf16.dtype == np.float32
    assert np.isfinite(bf16).all()
    assert bf16.any()
    for wrong in ("model.embed_tokens.weight", "nonsense"):
        with pytest.raises(FormatError, match="no vector"):
            read_vector(directory, wrong)
    data = file.read_bytes()
    file.write_bytes(data[:200])
    with pytest.raises((FileError, FormatError)):
        read_vector(directory, name)


# -- the command -----------------------------------------------------------------------------------


def kestrel(*arguments, **options):
    result = CliRunner().invoke(cli, [str(a) for a in arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def test_the_command(tmp_path):
    source, target = embedded.path(), tmp_path / "packed"
    text = tmp_path / "text.txt"
    text.write_text("How many legs has a dog? A dog has four legs. " * 20)
    packed = []
    for given in (text, "-", "self"):
        arguments = ("quantize", source, target, "--type", "q4", "--calibrate", given, "--force")
        result = kestrel(*arguments, input=text.read_text())
        assert (result.exit_code, result.stdout) == (0, f"{target}\n")
        last = result.stderr.splitlines()[-1]
        assert last.startswith("[kestrel] q4, head q8, calibrated on ")
        packed.append((target / "model.safetensors").read_bytes())
    assert packed[0] == packed[1] != packed[2]
    answer = kestrel("run", "-m", target, "--max-tokens", 3, "hi")
    assert answer.exit_code == 0


def test_the_command_refuses_before_it_computes(tmp_path):
    source, target = embedded.path(), tmp_path / "packed"
    empty = tmp_path / "empty.txt"
    empty.write_text("")

    def refused(*arguments):
        result = kestrel("quantize", source, target, "--type", "q4", *arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        return result.stderr

    assert "no-such-file: No such file" in refused("--calibrate", tmp_path / "no-such-file")
    assert "there is no text to calibrate with" in refused("--calibrate", empty)
    assert not target.exists()
    given = ("--type", "q8", "--head", "q4", "--calibrate", "self")
    coarse = kestrel("quantize", source, target, *given)
    assert coarse.stderr == "Error: a q4 head needs q4 layers, not q8\n"
    packed = quantize(source, tmp_path / "q8", "q8").path
    again = kestrel("quantize", packed, target, "--type", "q4", "--calibrate", "self")
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == f"Error: {packed}: is packed already (q8 weights)\n"
    target.mkdir()
    (target / "precious").write_text("data")
    said = refused("--calibrate", "self")
    assert said == f"Error: {target}: exists already\n"
    assert (target / "precious").read_text() == "data"
