"""Two runs compared: equal where the library promises it, and planted mistakes found where they
were planted: stage, layer, row and element."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from debugkit.cli import main
from debugkit.compare import Comparison, compare
from debugkit.diff import report
from debugkit.diff_page import page
from debugkit.specs import Spec, run
from debugkit.stages import Dump, Shape, Trouble, Writer
from tests.golden.checkpoints import CASES, write

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "libkestrel"
WAIT = 600.0
CASE = "llama-untied"  # 2 layers, 4 heads of 16, hidden 64, BF16: no norm mixes a head's elements
QWEN = "qwen3-own-head-despite-tied"  # 4 heads on 2, head_dim 16, F16
IDS = (3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 97, 93)

Runner = Callable[[str], Dump]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("diff")
    return {name: write(name, parent) for name in (CASE, QWEN)}


@pytest.fixture
def dump(tmp_path: Path) -> Runner:
    """Runs the text of a configuration on IDS."""

    def dump(text: str) -> Dump:
        directory = tmp_path / f"dump-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        return run(Spec.parse(text), IDS, directory)

    return dump


def invoke(*arguments: object) -> Result:
    """`debugkit diff` in this process."""
    return CliRunner().invoke(main, ["diff", *map(str, arguments)])


def found(comparison: Comparison) -> tuple[str, int, int, int]:
    """Stage, layer, position and element of the first difference."""
    first = comparison.first
    assert first is not None
    assert first.first is not None
    return first.stage, first.layer, first.first.position, first.first.element


# ---- runs that must be equal -------------------------------------------------------------------


@pytest.mark.parametrize("way", ["isa=portable&threads=1", "chunk=5", "door=decode&threads=2"])
@pytest.mark.parametrize("types", ["weight_type=q4&kv=q8", "kv=f32"])
def test_one_prefix_one_answer(
    folders: dict[str, Path], dump: Runner, way: str, types: str
) -> None:
    comparison = compare(dump(f"{folders[QWEN]}?{types}"), dump(f"{folders[QWEN]}?{types}&{way}"))
    assert comparison.tolerance is None
    assert comparison.first is None
    assert len(comparison.stages) == 2 + 2 * 12
    assert all(stage.n_different == 0 and stage.max_abs == 0 for stage in comparison.stages)


@pytest.mark.parametrize("name", sorted(name for name in CASES if name != "qwen3-long-prompt"))
def test_the_oracle_agrees_in_every_stage(name: str, tmp_path: Path, dump: Runner) -> None:
    folder = write(name, tmp_path / "models")
    ours, oracle = dump(f"{folder}?kv=f32"), dump(f"oracle:{folder}?dtype=f64")
    comparison = compare(ours, oracle, 1e-4)
    assert comparison.first is None, list(report(comparison))
    # every stage was compared, none merely absent
    assert len(comparison.stages) == len(ours.entries)
    assert comparison.only_a == comparison.only_b == ()
    assert any(stage.n_different == 0 < stage.max_abs for stage in comparison.stages)


@pytest.mark.reference
@pytest.mark.parametrize("name", [CASE, QWEN, "qwen3-yarn-4x", "qwen2-untied-sharded"])
def test_transformers_agrees_in_every_stage(name: str, tmp_path: Path, dump: Runner) -> None:
    folder = write(name, tmp_path / "models")
    comparison = compare(dump(f"{folder}?kv=f32"), dump(f"transformers:{folder}"), 1e-4)
    assert comparison.first is None, list(report(comparison))
    assert comparison.only_a == comparison.only_b == ()


# ---- planted: one flipped bit of one weight ----------------------------------------------------


def flip(folder: Path, tensor: str, element: int, bit: int) -> None:
    """Flip one bit of one value of a checkpoint's only file."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    (n_header,) = struct.unpack_from("<Q", data)
    entry = json.loads(data[8 : 8 + n_header])[tensor]
    size = 2 if entry["dtype"] in ("BF16", "F16") else 4
    data[8 + n_header + entry["data_offsets"][0] + element * size + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("tensor", "row", "column", "stage", "layer", "position", "element"),
    [
        ("model.layers.1.mlp.up_proj", 17, 23, "ffn.up", 1, 0, 17),
        ("model.layers.0.mlp.down_proj", 41, 90, "ffn.out", 0, 0, 41),
        ("model.layers.1.self_attn.v_proj", 30, 5, "attn.v", 1, 0, 30),
        ("model.layers.0.self_attn.o_proj", 63, 0, "attn.out", 0, 0, 63),
        ("model.embed_tokens", 5, 12, "embed", -1, 4, 12),  # token 5 stands at position 4
        ("model.embed_tokens", 300, 12, None, 0, 0, 0),  # and token 300 nowhere
        ("lm_head", 300, 12, "logits", -1, 11, 300),
    ],
)
@pytest.mark.parametrize("bit", [0, 6, 15])  # of bfloat16: the last, the last but one, the sign
def test_a_flipped_weight_bit_is_found(
    folders: dict[str, Path],
    dump: Runner,
    tmp_path: Path,
    tensor: str,
    row: int,
    column: int,
    stage: str | None,
    layer: int,
    position: int,
    element: int,
    bit: int,
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folders[CASE], damaged)
    n_columns = 96 if "down_proj" in tensor else 64
    flip(damaged, f"{tensor}.weight", row * n_columns + column, bit)
    comparison = compare(dump(str(folders[CASE])), dump(str(damaged)))
    if stage is None:
        assert comparison.first is None
        return
    assert found(comparison) == (stage, layer, position, element)
    first = comparison.first
    assert first is not None
    assert first.columns == (element,)
    assert f"only element {element}." in "\n".join(report(comparison))


def test_a_flipped_norm_weight_shows_in_its_element(
    folders: dict[str, Path], dump: Runner, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folders[QWEN], damaged)
    flip(damaged, "model.layers.1.self_attn.k_norm.weight", 3, 15)
    comparison = compare(dump(str(folders[QWEN])), dump(str(damaged)))
    # A rotation by nothing at position 0 leaves the pair (3, 11) apart: its second half is equal.
    assert found(comparison) == ("attn.k", 1, 0, 3)
    first = comparison.first
    assert first is not None
    assert first.dims == (3, 11)
    assert "within a head only dims 3 and 11." in "\n".join(report(comparison))


# ---- planted: a build with one wrong rotary frequency in one layer -----------------------------

ANCHOR = "    const float *cos_sin = pass->scratch->cos_sin + (size_t)row * head_dim;\n"
WRONG_FREQUENCY = (
    ANCHOR
    + """
    float planted[KS_MAX_HEAD_DIM], frequencies[KS_MAX_HEAD_DIM / 2];
    if (job->layer == 1) {
        memcpy(frequencies, model->rope_inv_freq, sizeof(float) * head_dim / 2);
        frequencies[5] *= 1.05f;
        ks_rope_row(frequencies, model->rope_factor, (int)head_dim,
                    pass->segments[0].first_position + row, planted);
        cos_sin = planted;
    }
"""
)
CRASH = ANCHOR + "    if (job->layer == 1) __builtin_trap();\n"


@dataclass(frozen=True)
class Builds:
    """Three builds of the library: as it is, with a wrong frequency, with a crash in layer 1."""

    plain: Path
    wrong: Path
    crash: Path


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Portable kernels only and little optimisation: the bits are the same, and it takes seconds.

    Everything but layer.c is compiled once.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        if "cc" in os.environ.get("KESTREL_REQUIRE", "").split(","):
            pytest.fail("KESTREL_REQUIRE names cc, but there is no C compiler")
        pytest.skip("there is no C compiler")
    root = tmp_path_factory.mktemp("builds")
    flags = ["-std=gnu11", "-O1", "-w", "-fPIC", "-ffp-contract=off", "-fno-math-errno"]
    flags += ['-DKESTREL_VERSION="0"', '-DKESTREL_BUILD_INFO="kernels of the test"']
    flags += [f"-I{LIBRARY / part}" for part in ("include", "src", "src/kernels")]

    def cc(*words: str | Path) -> None:
        command = [compiler, *flags, *map(str, words)]
        subprocess.run(command, cwd=root, check=True, timeout=WAIT)

    dispatch = (LIBRARY / "src/kernels/dispatch.c").read_text()
    for machine in ("defined(__x86_64__)", "defined(__aarch64__) && defined(__linux__)"):
        assert machine in dispatch
        dispatch = dispatch.replace(machine, "0")
    (root / "dispatch.c").write_text(dispatch)
    layer = (LIBRARY / "src/layer.c").read_text()
    assert layer.count(ANCHOR) == 1
    extra = '#include <string.h>\n#include "rope.h"\n'
    for name, planted in (("plain", ANCHOR), ("wrong", WRONG_FREQUENCY), ("crash", CRASH)):
        (root / f"{name}.c").write_text(extra + layer.replace(ANCHOR, planted))
    native = {"avx2", "avx512", "neon", "neon_dotprod", "dispatch"}
    sources = [path for path in (LIBRARY / "src").rglob("*.c") if path.stem not in native]
    sources = [path for path in sources if path.name != "layer.c"]
    cc("-c", *sources, "dispatch.c", "plain.c", "wrong.c", "crash.c")
    objects = [f"{path.stem}.o" for path in sources] + ["dispatch.o"]
    made = {}
    for name in ("plain", "wrong", "crash"):
        made[name] = root / f"lib{name}.so"
        cc("-shared", "-o", made[name], *objects, f"{name}.o", "-lm", "-lpthread")
    return Builds(**made)


def test_a_wrong_rotary_frequency_is_found(
    folders: dict[str, Path], dump: Runner, builds: Builds
) -> None:
    reference = dump(str(folders[QWEN]))
    # Another compiler run, other kernels, no optimiser: the same bits, so what follows is planted.
    same = dump(f"{folders[QWEN]}?library={builds.plain}")
    assert same.configuration["build"] == "kernels of the test"
    assert compare(reference, same).first is None
    comparison = compare(reference, dump(f"{folders[QWEN]}?library={builds.wrong}"))
    # At position 0 no pair is turned, so the first row that can differ is row 1.
    assert found(comparison) == ("attn.q", 1, 1, 5)
    first = comparison.first
    assert first is not None
    assert first.first is not None
    assert (first.first.head, first.first.dim) == (0, 5)
    assert first.dims == (5, 13)  # the pair, of head_dim 16, in every head
    assert [stage.name for stage in comparison.stages if stage.n_different][:2] == [
        "layer.1.attn.q",
        "layer.1.attn.k",
    ]
    text = "\n".join(report(comparison))
    assert "layer.1.attn.q, layer 1, row 1 (position 1, token 1), element 5 (head 0, dim 5)" in text
    assert "within a head only dims 5 and 13." in text


def test_the_oracle_finds_it_too(folders: dict[str, Path], builds: Builds) -> None:
    """Against another implementation, through the command line, where nothing is bit for bit."""
    result = invoke(
        f"{folders[QWEN]}?kv=f32&library={builds.wrong}",
        f"oracle:{folders[QWEN]}",
        "--tolerance=1e-5",
        f"--ids={','.join(map(str, IDS))}",
    )
    assert result.exit_code == 1, result.output
    assert "First difference: layer.1.attn.q, layer 1, row 1 " in result.output
    assert "(head 0, dim 5)" in result.output


def test_a_build_that_crashes_is_one_sentence(folders: dict[str, Path], builds: Builds) -> None:
    result = invoke(f"{folders[QWEN]}?library={builds.crash}", folders[QWEN], "--ids", "1,2")
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        f"debugkit: {builds.crash} ended with SIGILL while it ran {folders[QWEN]}."
    ]


def test_a_library_that_is_none_is_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    fake = tmp_path / "libkestrel.so"
    fake.write_bytes(b"not a library")
    result = invoke(f"{folders[QWEN]}?library={fake}", folders[QWEN], "--ids", "1,2")
    assert result.exit_code == 2
    assert result.output.startswith(f"debugkit: {fake}: ")
    assert "no usable libkestrel" in result.output
    assert len(result.output.splitlines()) == 1


# ---- the command -------------------------------------------------------------------------------


def test_exit_codes_and_the_report(folders: dict[str, Path], tmp_path: Path) -> None:
    ids = f"--ids={','.join(map(str, IDS))}"
    equal = invoke(folders[QWEN], f"{folders[QWEN]}?isa=portable", ids)
    assert equal.exit_code == 0
    assert "Equal: every bit of every stage." in equal.output
    assert " in A, portable in B\n" in equal.output
    different = invoke(
        f"{folders[QWEN]}?kv=f16", f"{folders[QWEN]}?kv=q8", ids, "--json", tmp_path / "d.json"
    )
    assert different.exit_code == 1
    assert "First difference: layer.0.attn.heads, layer 0, row 0" in different.output
    assert "The 5 stages before it are equal in every bit." in different.output
    kept = json.loads((tmp_path / "d.json").read_text())
    assert (kept["schema"], kept["equal"]) == ("kestrel-diff/1", False)
    assert kept["first"] == "layer.0.attn.heads"
    assert kept["a"]["kv"] == "f16"
    assert len(kept["stages"]) == 26
    loose = invoke(f"{folders[QWEN]}?kv=f16", f"{folders[QWEN]}?kv=q8", ids, "--tolerance", "2")
    assert loose.exit_code == 0
    assert "Equal within the tolerance; the worst is " in loose.output


def test_a_dump_stands_for_a_run(folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["dump", "--model", str(folders[QWEN]), "--ids", "1,2,3", str(out)]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert invoke(out, f"{folders[QWEN]}?chunk=2").exit_code == 0  # its ids are taken
    assert invoke(out, out, "--only", "*.attn.q").output.count("layer") == 2
    other = invoke(out, folders[QWEN], "--ids", "4,5")
    assert other.exit_code == 2
    assert "A was run on 3 ids (1, 2, 3), B on 2 ids (4, 5)" in other.output
    assert "holds its own ids" in invoke(out, folders[QWEN], "--prompt", "x").output


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        ("{llama}", "{qwen}", "two different models"),
        ("{llama}", "nowhere", "nowhere does not exist"),
        ("{llama}", "oracle:{empty}", "config.json"),
        ("{llama}", "{empty}", "config.json"),
    ],
)
def test_trouble_is_two(
    folders: dict[str, Path], tmp_path: Path, a: str, b: str, sentence: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"llama": folders[CASE], "qwen": folders[QWEN], "empty": tmp_path / "empty"}
    names["qwen"] = write("qwen3-untied", tmp_path / "models")  # hidden_size 72, the other's is 64
    result = invoke(a.format(**names), b.format(**names), "--ids", "1,2")
    assert result.exit_code == 2
    assert sentence in result.output
    assert len(result.output.splitlines()) == 1


def test_no_tokens_is_trouble(folders: dict[str, Path]) -> None:
    result = invoke(folders[CASE], folders[CASE])
    assert result.exit_code == 2
    assert "Give --ids 1,2,3 or --prompt TEXT." in result.output


def test_transformers_missing_is_one_sentence(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)  # import torch fails
    result = invoke(folders[CASE], f"transformers:{folders[CASE]}", "--ids", "1,2")
    assert result.exit_code == 2
    assert "transformers is not installed here" in result.output


def test_the_oracle_outside_a_checkout_is_one_sentence(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from debugkit import oracles

    monkeypatch.setattr(oracles, "_ORACLE", tmp_path)
    monkeypatch.setattr(oracles, "_PRIVATE", "_debugkit_qref_nowhere")
    result = invoke(folders[CASE], f"oracle:{folders[CASE]}", "--ids", "1,2")
    assert result.exit_code == 2
    assert "belongs to a checkout" in result.output


# ---- values ------------------------------------------------------------------------------------


def made(directory: Path, rows: Any, *, source: str = "library", stage: str = "embed") -> Dump:
    """A dump of one stage with the given rows."""
    array = np.asarray(rows)
    directory.mkdir()
    writer = Writer(directory, list(range(len(array))))
    writer.add(stage, -1 if stage == "embed" else 0, 0, array)
    about = {"source": source, "spec": "x", "model": "m", "configuration": {}}
    width = array.shape[1]
    writer.finish(about, Shape("qwen3", 1, width, width, 2, 1, max(1, width // 2), 8))
    return Dump.open(directory)


F = np.float32


@pytest.mark.parametrize(
    ("a", "b", "ulps"),
    [
        (1.0, np.nextafter(F(1), F(2)), 1),
        (0.0, -0.0, 0),  # other bits, the same place
        (np.nextafter(F(0), F(1)), -np.nextafter(F(0), F(1)), 2),
        (1.0, 2.0, 1 << 23),
        (np.nan, 1.0, None),
        (np.inf, 1.0, 0x7F800000 - 0x3F800000),
    ],
)
def test_bits_and_ulps(tmp_path: Path, a: float, b: float, ulps: int | None) -> None:
    rows = np.ones((2, 3), F)
    others = rows.copy()
    rows[1, 2], others[1, 2] = a, b
    comparison = compare(made(tmp_path / "a", rows), made(tmp_path / "b", others))
    assert found(comparison) == ("embed", -1, 1, 2)
    first = comparison.stages[0].first
    assert first is not None
    assert first.ulps == ulps
    assert first.bits_a == f"0x{int(F(a).view(np.uint32)):08x}"
    assert comparison.stages[0].n_different == 1
    json.dumps(comparison.as_dict(), allow_nan=False)


def test_what_is_not_a_number_equals_itself(tmp_path: Path) -> None:
    rows = np.array([[1, np.nan, np.inf, -np.inf]], F)
    for tolerance in (None, 0.5):
        name = str(tolerance)
        comparison = compare(
            made(tmp_path / f"a{name}", rows), made(tmp_path / f"b{name}", rows), tolerance
        )
        assert comparison.first is None
        assert comparison.stages[0].max_abs == 0
    other = np.array([[1, np.nan, -np.inf, -np.inf]], F)
    comparison = compare(made(tmp_path / "c", rows), made(tmp_path / "d", other), 1e9)
    assert found(comparison)[3] == 2


def test_the_tolerance_is_of_the_rows_own_scale(tmp_path: Path) -> None:
    """A row a thousand times larger must not hide the error of a small one."""
    rows = np.array([[4000, -4000], [4, -4]], F)
    other = rows + np.array([[0.5, 0], [0, 0.5]], F)
    a = made(tmp_path / "a", rows, source="oracle")
    b = made(tmp_path / "b", other)
    comparison = compare(a, b)
    assert comparison.tolerance == 1e-3
    assert found(comparison) == ("embed", -1, 1, 1)
    stage = comparison.stages[0]
    assert stage.n_different == 1
    assert stage.max_abs == pytest.approx(0.5)
    assert stage.worst == pytest.approx(0.125)
    assert stage.rms == pytest.approx((0.5**2 * 2 / 4) ** 0.5)
    assert stage.relative == pytest.approx(stage.rms / (8000016**0.5), rel=1e-6)
    assert compare(a, b, 0.2).first is None


def test_long_stages_are_compared_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from debugkit import compare as module

    rows = np.random.default_rng(0).standard_normal((50, 8)).astype(F)
    other = rows.copy()
    other[33, 6] += 1
    other[41, 2] += 1
    a, b = made(tmp_path / "a", rows), made(tmp_path / "b", other)
    whole = compare(a, b)
    monkeypatch.setattr(module, "BLOCK_BYTES", 3 * 8 * 8)
    assert found(compare(a, b)) == found(whole) == ("embed", -1, 33, 6)
    assert compare(a, b).stages[0].columns == (2, 6)


def test_only_common_positions_are_compared(folders: dict[str, Path], dump: Runner) -> None:
    """A prefill has the logits of the last position, a decode those of all."""
    comparison = compare(dump(f"{folders[QWEN]}?door=decode"), dump(f"{folders[QWEN]}"))
    assert comparison.stages[-1].name == "logits"
    assert comparison.stages[-1].n_rows == 1
    assert comparison.first is None


def test_nothing_in_common_is_trouble(tmp_path: Path) -> None:
    a = made(tmp_path / "a", np.ones((1, 2), F))
    b = made(tmp_path / "b", np.ones((1, 2), F), stage="attn.q")
    with pytest.raises(Trouble, match="no stage in common"):
        compare(a, b)


# ---- the page ----------------------------------------------------------------------------------


class Outline(HTMLParser):
    """Checks that elements nest, and counts them."""

    VOID = ("meta", "line", "circle", "polyline", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def outline(text: str) -> Outline:
    parsed = Outline()
    parsed.feed(text)
    assert parsed.open == []
    return parsed


def test_the_page_is_whole_and_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    ids = f"--ids={','.join(map(str, IDS))}"
    path = tmp_path / "page.html"
    result = invoke(folders[QWEN], f"{folders[QWEN]}?weight_type=q8", ids, "--html", path)
    assert result.exit_code == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html"]
    text = path.read_text()
    parsed = outline(text)
    assert parsed.links == []
    assert "script" not in parsed.counts
    assert "http" not in text
    assert "prefers-color-scheme: dark" in text
    assert parsed.counts["circle"] == 2 * 4  # embed, two layers, logits; rms and worst
    assert parsed.counts["tr"] == (1 + 4) + (1 + 26)
    (first,) = [x for x in result.output.splitlines() if x.startswith("First difference: ")]
    assert first.removeprefix("First difference: ") in text
    assert "weights: f16 in A, q8 in B" in text


def test_the_page_escapes_what_it_shows(tmp_path: Path) -> None:
    a = made(tmp_path / "a", np.ones((1, 2), F))
    odd = Dump(**{**a.__dict__, "spec": "<script>alert(1)</script> & co"})
    text = page(compare(odd, made(tmp_path / "b", np.full((1, 2), 2, F))))
    assert "script" not in outline(text).counts
    assert "&lt;script&gt;" in text


def test_the_page_of_equal_and_of_infinite(tmp_path: Path) -> None:
    ones = np.ones((1, 2), F)
    a = made(tmp_path / "a", ones)
    assert 'class="same"' in page(compare(a, made(tmp_path / "b", ones)))
    odd = page(compare(a, made(tmp_path / "c", np.array([[np.nan, 1]], F))))
    assert outline(odd).counts["circle"] == 2
    assert 'cy="nan"' not in odd
