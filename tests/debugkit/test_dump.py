"""Dumps: what is written, what is refused, and that a directory appears whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from debugkit.cli import main
from debugkit.specs import Spec, run
from debugkit.stages import LAYER_STAGES, Dump, Shape, Trouble, Writer
from pykestrel import Model
from tests.golden.checkpoints import write

CASE = "qwen3-tied-bf16"  # 2 layers, 4 heads on 2, head_dim 32, hidden 64
IDS = (3, 1, 4, 1, 5, 9, 2, 6)
SHAPE = Shape("qwen3", 1, 4, 8, 2, 1, 2, 16)

Invoke = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(CASE, tmp_path_factory.mktemp("dump"))


@pytest.fixture
def invoke() -> Invoke:
    """Runs `debugkit dump` with --ids IDS unless ids are given."""

    def invoke(*arguments: object, **options: Any) -> Result:
        words = [str(word) for word in arguments]
        if "--ids" not in words and "--prompt" not in words:
            words = ["--ids", ",".join(map(str, IDS)), *words]
        return CliRunner().invoke(main, ["dump", *words], **options)

    return invoke


def test_every_stage_of_every_layer_is_a_file(folder: Path, tmp_path: Path, invoke: Invoke) -> None:
    out = tmp_path / "out"
    result = invoke("--model", f"{folder}?kv=f32&isa=portable&chunk=3&threads=1", out)
    assert result.exit_code == 0, result.output
    names = ["embed"]
    for layer in range(2):
        names += [f"layer.{layer}.{stage.removeprefix('layer.')}" for stage in LAYER_STAGES]
    names.append("logits")
    index = json.loads((out / "index.json").read_text())
    assert [stage["name"] for stage in index["stages"]] == names
    assert {path.name for path in out.iterdir()} == {"index.json", *(f"{n}.npy" for n in names)}
    assert index["schema"] == "kestrel-dump/1"
    assert index["token_ids"] == list(IDS)
    assert index["shape"]["head_dim"] == 32
    said = index["configuration"]
    assert (said["kv"], said["isa"], said["chunk"], said["threads"]) == ("f32", "portable", 3, 1)
    for stage in index["stages"]:
        rows = np.load(out / stage["file"])
        assert list(rows.shape) == stage["shape"]
        assert rows.dtype == np.float32
        assert len(rows) == len(stage["positions"] or IDS)


def test_the_rows_are_those_of_the_session(folder: Path, tmp_path: Path, invoke: Invoke) -> None:
    assert invoke("--model", f"{folder}?kv=f32&chunk=5", tmp_path / "out").exit_code == 0
    with Model(folder) as model, model.session(context_length=64, kv_type="f32") as session:
        session.prefill(IDS)
        keys, values = session.kv_rows(1)
        logits = session.logits
    n = len(IDS)
    assert (np.load(tmp_path / "out" / "layer.1.attn.k.npy") == keys.reshape(n, -1)).all()
    assert (np.load(tmp_path / "out" / "layer.1.attn.v.npy") == values.reshape(n, -1)).all()
    assert (np.load(tmp_path / "out" / "logits.npy") == logits).all()


@pytest.mark.parametrize(
    ("door", "positions"),
    [("prefill", [7]), ("decode", list(range(8))), ("verify", list(range(8)))],
)
def test_logits_belong_to_the_positions_that_had_some(
    folder: Path, tmp_path: Path, door: str, positions: list[int]
) -> None:
    dump = run(Spec.parse(f"{folder}?door={door}&chunk=3"), IDS, tmp_path)
    entry = dump.entries[-1]
    assert entry.name == "logits"
    assert list(entry.rows()) == positions


def test_only_some_stages(folder: Path, tmp_path: Path, invoke: Invoke) -> None:
    only = ("--only", "layer.1.*", "--only", "*.attn.q")
    assert invoke("--model", folder, *only, tmp_path / "out").exit_code == 0
    names = {path.stem for path in (tmp_path / "out").glob("*.npy")}
    assert "layer.0.attn.q" in names
    assert len(names) == 1 + len(LAYER_STAGES)
    result = invoke("--model", folder, "--only", "layer.9.*", tmp_path / "none")
    assert result.exit_code == 2
    assert "no stage matches layer.9.*" in result.output
    assert not (tmp_path / "none").exists()


def test_ids_from_standard_input_and_from_a_prompt(tmp_path: Path, invoke: Invoke) -> None:
    assert invoke("--ids", "-", tmp_path / "a", input="[3, 1 4]\n").exit_code == 0
    assert Dump.open(tmp_path / "a").token_ids == (3, 1, 4)
    assert invoke("--prompt", "Hello", tmp_path / "b").exit_code == 0
    with Model.embedded() as model:
        expected = model.encode_chat([{"role": "user", "content": "Hello"}])
        assert list(Dump.open(tmp_path / "b").token_ids) == expected
        assert invoke("--raw", "--prompt", "Hello", tmp_path / "c").exit_code == 0
        assert list(Dump.open(tmp_path / "c").token_ids) == model.tokenizer.encode("Hello")


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ids", "1,x"], "'x' is no token id"),
        (["--ids", " "], "there are no token ids"),
        (["--ids", "4294967296"], "'4294967296' is no token id"),
        (["--ids", "1", "--prompt", "x"], "exclude each other"),
        (["--ids", "319,320"], "320"),  # the vocabulary has 320
        (["--model", "nowhere"], "nowhere does not exist"),
        (
            ["--model", "{folder}?weight=q4"],
            "there is no option 'weight'; options here: weight_type",
        ),
        (["--model", "{folder}?kv="], "the option kv has no value"),
        (["--model", "{folder}?kv=f32&kv=f16"], "the option kv is given twice"),
        (["--model", "{folder}?kv=f31"], "f31"),
        (["--model", "{folder}?threads=two"], "threads must be a number, not 'two'"),
        (["--model", "{folder}?door=window"], "door must be prefill or decode or verify"),
        (["--model", "{folder}?isa=vax"], "vax"),
        (["--model", "oracle:{folder}?kv=f32"], "there is no option 'kv'; options here: dtype"),
        (["--model", "{folder}?library=/nowhere.so"], "there is no library /nowhere.so"),
    ],
)
def test_one_sentence_and_nothing_left(
    folder: Path, tmp_path: Path, invoke: Invoke, arguments: list[str], sentence: str
) -> None:
    words = [word.format(folder=folder) for word in arguments]
    if "--model" not in words:
        words = ["--model", str(folder), *words]
    result = invoke(*words, tmp_path / "out")
    assert result.exit_code == 2
    assert sentence in result.output
    assert len(result.output.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_only_a_dump_is_replaced_and_only_if_asked(
    folder: Path, tmp_path: Path, invoke: Invoke
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("all of it")
    for force in ([], ["--force"]):
        result = invoke("--model", folder, *force, precious)
        assert result.exit_code == 2
        assert "is not a dump, so it is left alone" in result.output
    assert (precious / "thesis.txt").read_text() == "all of it"

    out = tmp_path / "out"
    assert invoke("--model", folder, out).exit_code == 0
    before = (out / "index.json").read_bytes()
    assert "--force replaces it" in invoke("--model", folder, "--ids", "7", out).output
    assert (out / "index.json").read_bytes() == before
    # a run that fails leaves the old one
    assert invoke("--model", folder, "--ids", "320", "--force", out).exit_code == 2
    assert (out / "index.json").read_bytes() == before
    assert invoke("--model", folder, "--ids", "7", "--force", out).exit_code == 0
    assert Dump.open(out).token_ids == (7,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "precious"]


def test_a_directory_with_a_question_mark(folder: Path, tmp_path: Path) -> None:
    odd = tmp_path / "what?kv=f16"
    odd.symlink_to(folder)
    spec = Spec.parse(str(odd))
    assert spec.path == odd
    assert spec.options == {}


# ---- the directory itself ----------------------------------------------------------------------


def small_dump(directory: Path) -> Dump:
    writer = Writer(directory, [5, 6, 7])
    writer.add("layer.out", 0, 0, np.arange(8, dtype=np.float32).reshape(2, 4))
    writer.add("embed", -1, 0, np.ones((3, 4), np.float32))
    writer.add("layer.out", 0, 2, np.full((1, 4), 9, np.float32))
    writer.add("logits", -1, 2, np.zeros((1, 16), np.float32))
    about = {"source": "library", "spec": "x", "model": "/m", "configuration": {}}
    writer.finish(about, SHAPE)
    return Dump.open(directory)


def test_rows_come_in_any_order_and_in_pieces(tmp_path: Path) -> None:
    dump = small_dump(tmp_path)
    assert [entry.name for entry in dump.entries] == ["embed", "layer.0.out", "logits"]
    assert dump.rows(dump.entries[1]).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [9, 9, 9, 9]]
    assert dump.entries[2].positions == (2,)


def test_a_run_that_skips_a_position_is_no_dump(tmp_path: Path) -> None:
    writer = Writer(tmp_path, [5, 6, 7])
    writer.add("embed", -1, 1, np.ones((2, 4), np.float32))
    with pytest.raises(Trouble, match="reported no embed for position 0"):
        writer.finish({}, SHAPE)
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("stage", ["../escape", "a/b", "", "Attn.q", "..", "a..b"])
def test_a_stage_cannot_name_a_file_elsewhere(tmp_path: Path, stage: str) -> None:
    with pytest.raises(Trouble, match="no name of a stage"):
        Writer(tmp_path, [1]).add(stage, 0, 0, np.ones((1, 4), np.float32))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda index: index.update(schema="kestrel-dump/9"), "its schema is 'kestrel-dump/9'"),
        (lambda index: index.pop("token_ids"), "token_ids"),
        (lambda index: index["stages"][0].update(file="../x.npy"), "not the name of a file"),
        (lambda index: index["stages"][0].update(dtype="object"), "of type object"),
        (lambda index: index["stages"][2].update(positions=[1, 2]), "1 rows and 2 positions"),
        (lambda index: index["stages"][0].update(shape=[3]), "is not a dump's index"),
        (lambda index: index["shape"].update(surprise=1), "surprise"),
    ],
)
def test_a_damaged_index_is_refused(
    tmp_path: Path, change: Callable[[Any], Any], sentence: str
) -> None:
    small_dump(tmp_path)
    path = tmp_path / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(Trouble, match=r"index\.json") as caught:
        Dump.open(tmp_path)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("damage", ["missing", "cut", "other", "pickle"])
def test_a_damaged_stage_is_refused(tmp_path: Path, damage: str) -> None:
    dump = small_dump(tmp_path)
    path = tmp_path / "embed.npy"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "other":
        np.save(path, np.ones((2, 2), np.float64))
    else:
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(Trouble, match=r"embed\.npy"):
        dump.rows(dump.entries[0])
