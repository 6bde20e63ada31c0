"""Error feedback: asked for where packing is, the same file everywhere, and nearer products."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from pykestrel import (
    Cancelled,
    InvalidArgument,
    Model,
    Unsupported,
    calibration,
    embedded,
    feedback,
)
from pykestrel.feedback import Feedback
from pykestrel.quantize import quantize
from tests.golden.checkpoints import write
from tests.python.test_calibration import ids
from tests.python.test_invariance import available_isas


def texts_of(model):
    return [ids(60, model.info.n_vocab, 1), ids(40, model.info.n_vocab, 2)]


def packed(directory, destination, *, memory=feedback.MEMORY, threads=1, **options) -> bytes:
    """The bytes of a calibrated q4 copy with feedback."""
    with Model(directory, threads=threads, **options) as model:
        texts = texts_of(model)
        quantize(
            directory,
            destination,
            "q4",
            calibration=calibration.measure(model, texts),
            feedback=Feedback(model, texts, threads=threads, memory=memory),
            threads=threads,
            overwrite=True,
        )
    return (destination / "model.safetensors").read_bytes()


def test_a_copy_has_the_same_bytes_everywhere(tmp_path):
    directory, copy = write("llama-biases", tmp_path), tmp_path / "copy"
    expected = packed(directory, copy)
    for isa in available_isas():
        assert packed(directory, copy, isa=isa, threads=3) == expected
    # One layer at a time, then all at once.
    assert packed(directory, copy, memory=0) == expected
    quantize(directory, copy, "q4", overwrite=True)
    assert (copy / "model.safetensors").read_bytes() != expected


def test_matrices_are_asked_for_by_what_they_are_multiplied_with(tmp_path, monkeypatch):
    directory = write("llama-biases", tmp_path)
    seen = []

    def watched(rows, *, threads):
        seen.append(rows.shape)
        return measure(rows, threads=threads)

    measure = feedback.measure
    monkeypatch.setattr(feedback, "measure", watched)
    with Model(directory) as model:
        info = model.info
        found = Feedback(model, texts_of(model))
        hidden, inner = info.hidden_size, info.intermediate_size
        name = "model.layers.1.{}.weight"
        q = found.of_tensor(name.format("self_attn.q_proj"))
        k = found.of_tensor(name.format("self_attn.k_proj"))
        assert q is not None
        assert k is not None
        assert q[1] is k[1]  # one input, measured once
        down = found.of_tensor(name.format("mlp.down_proj"))
        assert down is not None
        assert down[1].shape == (inner, inner)
        assert seen == [(100, hidden), (100, inner)]
        for other in ("model.norm.weight", "lm_head.weight", name.format("self_attn.x_proj")):
            assert found.of_tensor(other) is None
        assert found.of_tensor("model.layers.99.mlp.down_proj.weight") is None


def test_feedback_of_another_model_is_refused(tmp_path):
    directory = write("llama-biases", tmp_path / "one")
    other = write("qwen3-yarn-4x", tmp_path / "other")
    with Model(other) as model, pytest.raises(InvalidArgument, match="n_columns is not the matrix"):
        quantize(directory, tmp_path / "copy", "q4", feedback=Feedback(model, texts_of(model)))
    assert not (tmp_path / "copy").exists()


def test_the_rows_are_what_the_matrix_is_multiplied_with(tmp_path, monkeypatch):
    directory = write("llama-biases", tmp_path)
    seen = {}
    with Model(directory) as model:
        texts = texts_of(model)

        def hear(event):
            if (event.stage, event.layer) == ("ffn.gated", 0):
                seen.setdefault("expected", []).append(np.array(event.data))

        with model.session(trace=hear) as session:
            for text in texts:
                session.truncate(0)
                session.prefill(text)
        monkeypatch.setattr(
            feedback, "measure", lambda rows, threads: seen.update(rows=rows) or (rows[0], rows)
        )
        Feedback(model, texts).of_tensor("model.layers.0.mlp.down_proj.weight")
    assert np.array_equal(seen["rows"], np.concatenate(seen["expected"]))


def test_products_are_nearer_than_with_importance_alone(tmp_path):
    with Model(embedded.path()) as model:
        texts = calibration.own_texts(model, n_texts=8, length=128)
        found = calibration.measure(model, texts)
        quantize(embedded.path(), tmp_path / "alone", "q4", calibration=found)
        quantize(
            embedded.path(), tmp_path / "fed", "q4", calibration=found,
            feedback=Feedback(model, texts),
        )  # fmt: skip
        other = calibration.own_texts(model, n_texts=12, length=96)[8:]  # texts it has not seen

    def logits(path):
        with Model(path) as model, model.session() as session:
            rows = []
            for text in other:
                session.truncate(0)
                session.verify(text)
                rows += [np.array(session.logits_at(i)) for i in range(len(text))]
            return np.stack(rows)

    exact = logits(embedded.path())
    alone, fed = (np.square(logits(tmp_path / name) - exact).mean() for name in ("alone", "fed"))
    assert fed < 0.9 * alone


def test_what_cannot_be_measured(tmp_path):
    with pytest.raises(InvalidArgument, match=r"rows \(0\)"):
        feedback.measure(np.zeros((0, 32), np.float32))
    rows = np.zeros((3, 32), np.float32)
    rows[1, 2] = np.inf
    with pytest.raises(InvalidArgument, match="row 1, column 2"):
        feedback.measure(rows)
    with Model(embedded.path()) as model:
        with pytest.raises(InvalidArgument, match="no text"):
            Feedback(model, [[]])
        with pytest.raises(InvalidArgument, match="feedback is for q4, not q8"):
            quantize(
                embedded.path(), tmp_path / "q8", "q8", feedback=Feedback(model, texts_of(model))
            )
    quantize(embedded.path(), tmp_path / "q4", "q4")
    with Model(tmp_path / "q4") as model, pytest.raises(Unsupported, match="packed already"):
        Feedback(model, [[1]])
    assert not (tmp_path / "q8").exists()


def test_running_texts_can_be_cancelled(tmp_path):
    directory = write("llama-biases", tmp_path)
    with Model(directory) as model:
        found = Feedback(model, [ids(200, model.info.n_vocab)] * 2000)
        found.cancel()  # nothing runs: nothing happens
        done = threading.Event()

        def insist():
            while not done.wait(0.005):
                found.cancel()

        thread = threading.Thread(target=insist)
        thread.start()
        try:
            with pytest.raises(Cancelled):
                found.of_tensor("model.layers.0.mlp.down_proj.weight")
        finally:
            done.set()
            thread.join()
        assert found._running is None


def test_what_goes_wrong_while_packing_leaves_nothing(tmp_path):
    directory = write("llama-biases", tmp_path)
    with Model(directory) as model:
        given = Feedback(model, texts_of(model))
    # Closed by now.
    with pytest.raises(Exception, match=re.compile("closed", re.IGNORECASE)):
        quantize(directory, tmp_path / "copy", "q4", feedback=given)
    assert not (tmp_path / "copy").exists()
