"""Reading a checkpoint directory without the library: defaults, headers, sizes."""

from __future__ import annotations

import json
import struct

import pytest

from pykestrel import FileError, FormatError, SamplingParams
from pykestrel.checkpoint import GenerationDefaults, read_json, summarize


def defaults(directory, config=None, **generation):
    if generation:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return GenerationDefaults.load(directory)


def test_a_list_of_eos_ids(tmp_path):
    assert defaults(tmp_path, eos_token_id=[151645, 151643]).stop_ids == (151643, 151645)


def test_one_eos_id(tmp_path):
    assert defaults(tmp_path, eos_token_id=2, config={"eos_token_id": 9}).stop_ids == (2,)


def test_eos_of_the_config_where_the_other_file_has_none(tmp_path):
    assert defaults(tmp_path).stop_ids == ()
    assert defaults(tmp_path, config={"eos_token_id": [7, 5]}).stop_ids == (5, 7)
    assert defaults(tmp_path, eos_token_id=None, top_k=1).stop_ids == (5, 7)


@pytest.mark.parametrize("value", ["2", -1, [1, "2"], True, 1.5])
def test_eos_that_is_none(tmp_path, value):
    with pytest.raises(FormatError, match=r"generation_config\.json: eos_token_id"):
        defaults(tmp_path, eos_token_id=value)


def test_sampling_of_the_family(tmp_path):
    found = defaults(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    assert found.sampling == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)


def test_do_sample_without_temperature_is_1(tmp_path):
    assert defaults(tmp_path, do_sample=True).sampling == SamplingParams(temperature=1.0)


def test_without_do_sample_it_is_greedy(tmp_path):
    found = defaults(tmp_path, temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert found.sampling == SamplingParams(repetition_penalty=1.1)


def test_sampling_out_of_range_names_file_and_field(tmp_path):
    with pytest.raises(FormatError, match=r"generation_config\.json: top_p"):
        defaults(tmp_path, do_sample=True, top_p=7)


def test_padding_and_eos_of_an_open_model(model):
    assert model.defaults.stop_ids == (model.tokenizer.eos_id,)


def test_summary_agrees_with_the_library(model, checkpoint):
    summary = summarize(checkpoint)
    assert summary.n_parameters == model.info.n_parameters
    assert summary.tensor_bytes == 4 * summary.n_parameters
    assert summary.max_context == model.info.max_context
    for kv_type in ("f32", "f16", "q8"):
        with model.session(kv_type=kv_type) as session:
            assert summary.kv_bytes_per_token[kv_type] == session.kv_bytes_per_token


def test_shards(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / "model.safetensors").read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}')
    files = [tensor.file for tensor in summarize(tmp_path).tensors]
    assert sorted(set(files)) == ["a.safetensors", "b.safetensors"]
    index.write_text('{"weight_map": {"x": "../b.safetensors"}}')
    with pytest.raises(FormatError, match="not the name of a shard"):
        summarize(tmp_path)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(FormatError, match="weight_map"):
        summarize(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 50) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{x",
        struct.pack("<Q", 4) + b'"\xff"}',
    ],
)
def test_files_that_are_no_safetensors(checkpoint, tmp_path, data):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        summarize(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {**ENTRY, "shape": [3]},
        {**ENTRY, "shape": [-2]},
        {**ENTRY, "shape": "x"},
        {**ENTRY, "data_offsets": [8, 0]},
        {**ENTRY, "data_offsets": [0]},
    ],
)
def test_tensor_entries_that_are_none(checkpoint, tmp_path, entry):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(FormatError, match="'w'"):
        summarize(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1,}', r"c\.json: .* \(byte 8\)"),
        ('{"é": }'.encode(), r"\(byte 7\)"),
        (b"\xff", r"not UTF-8 \(byte 0\)"),
        (b"[]", "a JSON object is expected"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_json_that_is_none(tmp_path, text, message):
    (tmp_path / "c.json").write_bytes(text)
    with pytest.raises(FormatError, match=message):
        read_json(tmp_path / "c.json")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        read_json(tmp_path / "c.json")
    with pytest.raises(FileError, match="directory"):
        read_json(tmp_path)
