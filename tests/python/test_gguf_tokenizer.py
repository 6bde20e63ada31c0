"""The tokenizer of an imported checkpoint: splitting rules, special tokens, scores, side files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pykestrel.gguf import GgufError, import_gguf
from tests.python import gguf_writer as gw


def imported(tmp_path: Path, writer: gw.GgufWriter) -> tuple[Tokenizer, dict[str, Any], Path]:
    """The tokenizer, generation_config.json and the directory."""
    src, dst = tmp_path / "m.gguf", tmp_path / "out"
    src.write_bytes(writer.build())
    import_gguf(src, dst, overwrite=True)
    generation = json.loads((dst / "generation_config.json").read_text())
    return Tokenizer.from_file(str(dst / "tokenizer.json")), generation, dst


def byte_level(tmp_path: Path, pre: str | None, arch: str = "qwen3") -> Tokenizer:
    return imported(tmp_path, gw.model(arch, pre=pre)[0])[0]


TEXTS = [
    "hello world 123\n\n  x",
    "caf\u00e9 \u4f60\u597d \U0001f600",
    "<|im_start|>hello<tool_call>",
]


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm", "default"])
def test_texts_come_back(tmp_path: Path, pre: str) -> None:
    tokenizer = byte_level(tmp_path, pre)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("qwen2", ["1", "2", "3"]),
        ("smollm", ["1", "2", "3"]),
        ("llama-bpe", ["123"]),
        ("gpt-2", ["123"]),
    ],
)
def test_rules_differ_in_digits(tmp_path: Path, pre: str, digits: list[str]) -> None:
    tokenizer = byte_level(tmp_path, pre)
    assert tokenizer.encode("hello123").tokens == ["hello", *digits]


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    assert tokenizer.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


WORDS = [
    (
        "qwen2",
        "I'LL say (ok)!\n\n  2024",
        ["I", "'LL", " say", " (", "ok", ")!\n\n", " ", " ", "2", "0", "2", "4"],
    ),
    ("llama-bpe", "x = 12345;", ["x", " =", " ", "123", "45", ";"]),
    ("gpt-2", "I'LL say\n\n  2024", ["I", "'", "LL", " say", "\n\n ", " 2024"]),
    ("smollm", "a  2024\n\n7", ["a", "  ", "2", "0", "2", "4", "\n\n", "7"]),
]


@pytest.mark.parametrize(("pre", "text", "wanted"), WORDS, ids=[case[0] for case in WORDS])
def test_words(tmp_path: Path, pre: str, text: str, wanted: list[str]) -> None:
    assert words(byte_level(tmp_path, pre), text) == wanted


def test_qwen2_composes_accents(tmp_path: Path) -> None:
    apart, composed = "e\u0301", "\u00e9"
    qwen = byte_level(tmp_path, "qwen2")
    assert qwen.encode(apart).ids == qwen.encode(composed).ids
    gpt = byte_level(tmp_path, "gpt-2")
    assert gpt.encode(apart).ids != gpt.encode(composed).ids


def test_special_and_added_tokens(tmp_path: Path) -> None:
    tokenizer, _, _ = imported(tmp_path, gw.model("qwen3")[0])
    tokens, kinds = gw.byte_level_tokens()
    added = {
        token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()
    }
    assert added == {**dict.fromkeys(gw.CONTROL, True), "<tool_call>": False}
    assert tokenizer.get_vocab() == {t: i for i, t in enumerate(tokens) if kinds[i] != 5}
    ids = tokenizer.encode("<|im_start|>hello<tool_call>").ids
    assert ids == [tokens.index(t) for t in ("<|im_start|>", "hello", "<tool_call>")]
    assert tokenizer.decode(ids) == "hello<tool_call>"


def test_side_files(tmp_path: Path) -> None:
    writer, _ = gw.model("qwen3")
    writer.set("tokenizer.chat_templates", gw.ARRAY, (gw.STRING, ["tools", "default"]))
    writer.set("tokenizer.chat_template.tools", gw.STRING, "{{ tools }}")
    _, generation, directory = imported(tmp_path, writer)
    tokens, _ = gw.byte_level_tokens()
    end, start, text = (tokens.index(t) for t in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"))
    assert generation == {"eos_token_id": [end, text], "pad_token_id": text}
    config = json.loads((directory / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (end, text)
    assert "bos_token_id" not in config
    assert (directory / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert tokenizer["pad_token"] == "<|endoftext|>"
    assert tokenizer["bos_token"] is None
    assert tokenizer["model_max_length"] == 512
    assert tokenizer["chat_template"] == [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tools", "template": "{{ tools }}"},
    ]
    writer.set("tokenizer.ggml.eot_token_id", gw.U32, start)
    assert imported(tmp_path, writer)[1]["eos_token_id"] == [end, start, text]


def test_notes_name_what_was_assumed(tmp_path: Path) -> None:
    writer, _ = gw.model("qwen3", pre=None)
    writer.drop("tokenizer.chat_template")
    src = tmp_path / "m.gguf"
    src.write_bytes(writer.build())
    report = import_gguf(src, tmp_path / "out")
    assert any("pre is missing" in note for note in report.notes)
    assert any("no chat template" in note for note in report.notes)
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_word_that_is_a_token_needs_no_merges_in_llama3(tmp_path: Path) -> None:
    for pre, wanted in (("llama-bpe", ["hello"]), ("qwen2", ["he", "ll", "o"])):
        writer, _ = gw.model("qwen3", pre=pre)
        kept = [merge for merge in gw.MERGES if merge not in ("he ll", "hell o")]
        writer.set("tokenizer.ggml.merges", gw.ARRAY, (gw.STRING, kept))
        assert imported(tmp_path, writer)[0].encode("hello").tokens == wanted


@pytest.mark.parametrize(
    ("pre", "add_bos", "add_eos", "wanted"),
    [
        ("qwen2", None, None, ["hello"]),
        ("qwen2", True, None, ["<|im_start|>", "hello"]),
        ("llama-bpe", None, None, ["<|im_start|>", "hello"]),
        ("llama-bpe", False, None, ["hello"]),
        ("qwen2", False, True, ["hello", "<|im_end|>"]),
    ],
)
def test_begin_and_end_tokens(
    tmp_path: Path, pre: str, add_bos: bool | None, add_eos: bool | None, wanted: list[str]
) -> None:
    writer, _ = gw.model("qwen3", pre=pre)
    begin = gw.byte_level_tokens()[0].index("<|im_start|>")
    writer.set("tokenizer.ggml.bos_token_id", gw.U32, begin)
    writer.drop("tokenizer.ggml.add_bos_token")
    if add_bos is not None:
        writer.set("tokenizer.ggml.add_bos_token", gw.BOOL, add_bos)
    if add_eos is not None:
        writer.set("tokenizer.ggml.add_eos_token", gw.BOOL, add_eos)
    tokenizer = imported(tmp_path, writer)[0]
    assert tokenizer.encode("hello").tokens == wanted
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]


Change = Callable[[gw.GgufWriter], object]
TOKENS, KINDS = gw.byte_level_tokens()


def add_three_tokens(writer: gw.GgufWriter) -> None:
    writer.set("tokenizer.ggml.tokens", gw.ARRAY, (gw.STRING, [*TOKENS, "A1", "A2", "A3"]))
    writer.set("tokenizer.ggml.token_type", gw.ARRAY, (gw.I32, [*KINDS, 1, 1, 1]))


REFUSALS: dict[str, tuple[Change, str]] = {
    "kind": (lambda w: w.set("tokenizer.ggml.model", gw.STRING, "bert"), "'bert' is not supported"),
    "no kind": (lambda w: w.drop("tokenizer.ggml.model"), "None is not supported"),
    "rule": (
        lambda w: w.set("tokenizer.ggml.pre", gw.STRING, "falcon"),
        "'falcon' is not supported",
    ),
    "no tokens": (lambda w: w.drop("tokenizer.ggml.tokens"), "tokens is missing"),
    "no merges": (lambda w: w.drop("tokenizer.ggml.merges"), "merges is missing"),
    "tokens of another kind": (
        lambda w: w.set("tokenizer.ggml.tokens", gw.ARRAY, (gw.U8, [1])),
        "array of strings",
    ),
    "token twice": (
        lambda w: w.set("tokenizer.ggml.tokens", gw.ARRAY, (gw.STRING, ["!", *TOKENS[1:]])),
        "holds '!' twice",
    ),
    "too many tokens": (add_three_tokens, "273 tokens in use for 272 rows"),
    "kinds short": (
        lambda w: w.set("tokenizer.ggml.token_type", gw.ARRAY, (gw.I32, KINDS[1:])),
        "entries for",
    ),
    "kind 9": (
        lambda w: w.set("tokenizer.ggml.token_type", gw.ARRAY, (gw.I32, [9, *KINDS[1:]])),
        "kind 9",
    ),
    "all unused": (
        lambda w: w.set("tokenizer.ggml.token_type", gw.ARRAY, (gw.I32, [5] * len(KINDS))),
        "0 tokens in use",
    ),
    "merge without space": (
        lambda w: w.set("tokenizer.ggml.merges", gw.ARRAY, (gw.STRING, ["he"])),
        "merge 0",
    ),
    "merge of no token": (
        lambda w: w.set("tokenizer.ggml.merges", gw.ARRAY, (gw.STRING, ["h e", "z z"])),
        "merge 1",
    ),
    "eos out of range": (
        lambda w: w.set("tokenizer.ggml.eos_token_id", gw.U32, 9999),
        "eos_token_id is 9999",
    ),
    "eos is padding": (
        lambda w: w.set("tokenizer.ggml.eos_token_id", gw.U32, len(TOKENS) - 1),
        "eos_token_id is",
    ),
    "eot negative": (
        lambda w: w.set("tokenizer.ggml.eot_token_id", gw.I32, -1),
        "eot_token_id is -1",
    ),
    "scores missing": (
        lambda w: w.set("tokenizer.ggml.model", gw.STRING, "llama"),
        "scores is miss",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_tokenizer_that_does_not_add_up(tmp_path: Path, name: str) -> None:
    change, reason = REFUSALS[name]
    writer, _ = gw.model("qwen3")
    change(writer)
    src = tmp_path / "m.gguf"
    src.write_bytes(writer.build())
    with pytest.raises(GgufError, match=reason):
        import_gguf(src, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


PIECES = {
    "\u2581": -1.0,
    "h": -50.0,
    "e": -51.0,
    "l": -52.0,
    "o": -53.0,
    "w": -54.0,
    "r": -55.0,
    "d": -56.0,
    "he": -2.0,
    "ll": -3.0,
    "lo": -4.0,
    "hell": -9.0,
    "\u2581w": -5.0,
    "or": -6.0,
    "hello": -7.0,
    "\u2581wor": -8.0,
    "\u2581h": -1.5,
    "el": -1.8,
    "ld": -1.9,
}


def sentencepiece_model() -> gw.GgufWriter:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *PIECES]
    writer, _ = gw.model("llama", rows=len(tokens))
    writer.set("tokenizer.ggml.model", gw.STRING, "llama")
    writer.set("tokenizer.ggml.tokens", gw.ARRAY, (gw.STRING, tokens))
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(PIECES)
    writer.set("tokenizer.ggml.token_type", gw.ARRAY, (gw.I32, kinds))
    scores = [0.0] * 259 + list(PIECES.values())
    writer.set("tokenizer.ggml.scores", gw.ARRAY, (gw.F32, scores))
    writer.set("tokenizer.ggml.bos_token_id", gw.U32, 1)
    writer.set("tokenizer.ggml.eos_token_id", gw.U32, 2)
    writer.set("tokenizer.ggml.unknown_token_id", gw.U32, 0)
    for key in ("pre", "merges", "padding_token_id", "add_bos_token"):
        writer.drop(f"tokenizer.ggml.{key}")
    return writer


def sentencepiece(text: str) -> list[str]:
    """SentencePiece BPE as defined: join the pair whose union scores highest, leftmost first."""
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [
            (-PIECES[left + right], i)
            for i, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in PIECES
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out: list[str] = []
    for symbol in symbols:
        known = symbol in PIECES
        out += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return out


@pytest.mark.parametrize(
    "text", ["hello world", " hello", "hell or lld  held", "wor\u00fc\n", "\u4f60", "lolloelhe" * 4]
)
def test_scores_merge_as_sentencepiece_does(tmp_path: Path, text: str) -> None:
    writer = sentencepiece_model()
    tokenizer, generation, _ = imported(tmp_path, writer)
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *sentencepiece(" " + text)]
    assert tokenizer.decode(encoded.ids) == text
    assert generation == {"bos_token_id": 1, "eos_token_id": [2]}


def test_sentencepiece_without_a_space_in_front(tmp_path: Path) -> None:
    writer = sentencepiece_model()
    writer.set("tokenizer.ggml.add_space_prefix", gw.BOOL, False)
    tokenizer = imported(tmp_path, writer)[0]
    ids = tokenizer.encode("hello", add_special_tokens=False).ids
    assert not tokenizer.decode(ids).startswith(" ")
    assert tokenizer.encode(" hello").ids != tokenizer.encode("hello").ids


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.set("tokenizer.ggml.scores", gw.ARRAY, (gw.F32, [0.0])), "1 entries for"),
        (
            lambda w: w.set("tokenizer.ggml.remove_extra_whitespaces", gw.BOOL, True),
            "remove_extra_whitespaces is not supported",
        ),
    ],
)
def test_sentencepiece_refusals(tmp_path: Path, change: Change, reason: str) -> None:
    writer = sentencepiece_model()
    change(writer)
    src = tmp_path / "m.gguf"
    src.write_bytes(writer.build())
    with pytest.raises(GgufError, match=reason):
        import_gguf(src, tmp_path / "out")
