"""A tokenizer.json and its companions from the tokenizer section of a GGUF file.

Two kinds exist among the supported models. `gpt2` is byte-level BPE: the file has the vocabulary
and the merges, but of the rule that cuts text into words only a name, tokenizer.ggml.pre, whose
meaning is kept here. `llama` is SentencePiece BPE: pieces with scores and no merges, which are
reconstructed from the scores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import GgufError
from .reader import GgufFile
from .vocabulary import TokenKind, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# The words of GPT-4's tokenizer as Llama 3 and Qwen adapted them; they differ in how many digits
# make a word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MAX_PIECE = 512
_SPACE = "\u2581"


@dataclass(frozen=True)
class _Splitting:
    """How a byte-level tokenizer cuts text into words before merging.

    Attributes:
        words: regular expression of a word; None for GPT-2's, which the library has built in.
        single_digits: each digit is cut out before the words are found.
        whole_words: a word that is a token is taken without merging.
        begins: a begin token stands in front unless the file says otherwise.
    """

    words: str | None = None
    nfc: bool = False
    single_digits: bool = False
    whole_words: bool = False
    begins: bool = False


_GPT2 = _Splitting()
_QWEN2 = _Splitting(words=_WORDS.format(digits=r"\p{N}"), nfc=True)
_LLAMA3 = _Splitting(words=_WORDS.format(digits=r"\p{N}{1,3}"), whole_words=True, begins=True)
_CODE = _Splitting(single_digits=True)
_SPLITTINGS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smollm": _CODE,
    "starcoder": _CODE,
    "refact": _CODE,
}


@dataclass(frozen=True)
class TokenizerFiles:
    """What a checkpoint directory needs besides weights and config.

    Attributes:
        files: file name -> text.
        token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` where known, for config.json.
        vocab: number of tokens; larger ids are padding rows of the head.
        notes: sentences about what had to be assumed.
    """

    files: dict[str, str]
    token_ids: dict[str, int]
    vocab: int
    notes: tuple[str, ...]


def build_tokenizer(file: GgufFile, rows: int, context: int) -> TokenizerFiles:
    """Build tokenizer.json, tokenizer_config.json, generation_config.json and the chat template.

    Args:
        rows: height of the embedding matrix.
        context: the model's context length, tokenizer_config's `model_max_length`.

    Raises:
        GgufError: a tokenizer kind or splitting rule that is not supported, or inconsistent parts.
    """
    vocabulary = read_vocabulary(file, rows)
    notes: list[str] = []
    key = "tokenizer.ggml.model"
    kind = file.string(key)
    if kind == "gpt2":
        tokenizer, begins = _byte_level(file, vocabulary, notes)
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(file, vocabulary), True
    else:
        reason = f"the tokenizer model {kind!r} is not supported; supported: gpt2, llama"
        raise GgufError(file.path, reason, file.offset_of(key))
    _flag_added_tokens(file, tokenizer, vocabulary)
    _add_ends(file, tokenizer, vocabulary, kind == "gpt2", begins)
    if vocabulary.default_template is None:
        notes.append("the file holds no chat template")
    ids = {"bos": vocabulary.bos, "eos": vocabulary.eos, "pad": vocabulary.pad}
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": _dump(_tokenizer_config(vocabulary, context)),
        "generation_config.json": _dump(_generation_config(vocabulary)),
    }
    if vocabulary.default_template is not None:
        files["chat_template.jinja"] = vocabulary.default_template
    return TokenizerFiles(
        files=files,
        token_ids={f"{name}_token_id": v for name, v in ids.items() if v is not None},
        vocab=len(vocabulary.tokens),
        notes=tuple(notes),
    )


def _byte_level(file: GgufFile, vocabulary: Vocabulary, notes: list[str]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE tokenizer, and whether texts begin with the begin token by default."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    splitting = _splitting(file, notes)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = _merges(file, ids)
    model = models.BPE(vocab=ids, merges=merges, ignore_merges=splitting.whole_words)
    tokenizer = Tokenizer(model)
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    _set_words(tokenizer, splitting)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, splitting.begins


def _set_words(tokenizer: Tokenizer, splitting: _Splitting) -> None:
    from tokenizers import Regex, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.words is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.words), behavior="isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.words is None)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


def _splitting(file: GgufFile, notes: list[str]) -> _Splitting:
    key = "tokenizer.ggml.pre"
    name = file.string(key)
    if name is None:
        # Written since spring 2024; before, the architecture was all there was to go by.
        name = "qwen2" if file.string("general.architecture") != "llama" else "gpt-2"
        notes.append(f"{key} is missing; texts are split as {name} does")
    elif name == "default":
        notes.append(f"{key} is 'default'; texts are split as gpt-2 does")
    if name not in _SPLITTINGS:
        known = ", ".join(_SPLITTINGS)
        reason = f"the text splitting rule {name!r} is not supported; supported: {known}"
        raise GgufError(file.path, reason, file.offset_of(key))
    return _SPLITTINGS[name]


def _merges(file: GgufFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    lines = file.string_list(key)
    if lines is None:
        raise GgufError(file.path, f"{key} is missing")
    merges: list[tuple[str, str]] = []
    for index, line in enumerate(lines):
        left, separator, right = line.partition(" ")
        if not separator or left not in ids or right not in ids or left + right not in ids:
            reason = f"merge {index} of {key}, {line!r}, does not join two tokens to a third"
            raise GgufError(file.path, reason, file.offset_of(key))
        merges.append((left, right))
    return merges


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        name = f"tokenizer.ggml.{key}"
        value = file.metadata.get(name)
        if value is not None and value is not False:
            raise GgufError(file.path, f"{name} is not supported", file.offset_of(name))
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = next(
        (i for i, kind in enumerate(vocabulary.kinds) if kind is TokenKind.UNKNOWN), vocabulary.unk
    )
    model = models.BPE(
        vocab=ids,
        merges=_merges_from_scores(file, vocabulary, ids),
        unk_token=vocabulary.text(unknown),
        fuse_unk=True,
        byte_fallback=TokenKind.BYTE in vocabulary.kinds,
    )
    tokenizer = Tokenizer(model)
    prefix = file.boolean("tokenizer.ggml.add_space_prefix") is not False
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(
    file: GgufFile, vocabulary: Vocabulary, ids: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest; so do these merges.

    Every way to cut a piece into two pieces becomes a merge, ordered by the piece's score. Only
    ordinary pieces take part: control and byte tokens never arise from text.
    """
    key = "tokenizer.ggml.scores"
    scores = file.number_array(key)
    if scores is None:
        raise GgufError(file.path, f"{key} is missing", file.offset_of(key))
    if scores.size < len(vocabulary.tokens):
        reason = f"{key} has {scores.size} entries for {len(vocabulary.tokens)} tokens"
        raise GgufError(file.path, reason, file.offset_of(key))
    ordinary = {
        token: index for token, index in ids.items() if vocabulary.kinds[index] is TokenKind.NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(vocabulary.tokens, scores.tolist(), strict=False):
        if token not in ordinary:
            continue
        if len(token) > _MAX_PIECE:
            reason = f"a piece of {len(token)} characters is longer than {_MAX_PIECE}"
            raise GgufError(file.path, reason, file.offset_of("tokenizer.ggml.tokens"))
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ordinary and right in ordinary:
                ranked.append((-score, ordinary[left], ordinary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _flag_added_tokens(file: GgufFile, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Mark the tokens that are found in text before it is split, and those decoding may hide."""
    from tokenizers import AddedToken

    special: list[str | AddedToken] = []
    plain: list[str | AddedToken] = []
    for token, text in enumerate(vocabulary.tokens):
        kind = vocabulary.kinds[token]
        if not text:
            continue
        if vocabulary.is_special(token) or kind is TokenKind.UNKNOWN:
            special.append(AddedToken(text, special=True, normalized=False))
        elif kind is TokenKind.USER_DEFINED:
            plain.append(AddedToken(text, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != len(vocabulary.tokens):
        reason = f"the tokenizer came out with {size} tokens, not {len(vocabulary.tokens)}"
        raise GgufError(file.path, reason)


def _add_ends(
    file: GgufFile, tokenizer: Tokenizer, vocabulary: Vocabulary, byte_level: bool, begins: bool
) -> None:
    """Begin and end tokens around a text, as far as the file asks for them."""
    from tokenizers import processors

    stated = file.boolean("tokenizer.ggml.add_bos_token")
    begin = vocabulary.bos if (begins if stated is None else stated) else None
    end = vocabulary.eos if file.boolean("tokenizer.ggml.add_eos_token") else None
    around = [token for token in (begin, end) if token is not None]
    if not around:
        return
    first = [f"{vocabulary.text(begin)}:0"] if begin is not None else []
    last = [f"{vocabulary.text(end)}:0"] if end is not None else []
    second = [piece.removesuffix(":0") + ":1" for piece in (*first, "$B:0", *last)]
    template = processors.TemplateProcessing(
        single=[*first, "$A:0", *last],
        pair=[*first, "$A:0", *last, *second],
        special_tokens=[(vocabulary.tokens[token], token) for token in dict.fromkeys(around)],
    )
    tokenizer.post_processor = (
        processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        if byte_level
        else template
    )


def _tokenizer_config(vocabulary: Vocabulary, context: int) -> dict[str, object]:
    named = {
        "bos_token": vocabulary.text(vocabulary.bos),
        "eos_token": vocabulary.text(vocabulary.eos),
        "pad_token": vocabulary.text(vocabulary.pad),
        "unk_token": vocabulary.text(vocabulary.unk),
    }
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **named,
    }
    default = vocabulary.default_template
    if vocabulary.named_templates:
        templates = dict(vocabulary.named_templates)
        if default is not None:
            templates = {"default": default, **templates}
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    elif default is not None:
        config["chat_template"] = default
    return config


def _generation_config(vocabulary: Vocabulary) -> dict[str, object]:
    config: dict[str, object] = {}
    if vocabulary.bos is not None:
        config["bos_token_id"] = vocabulary.bos
    if vocabulary.ends:
        config["eos_token_id"] = vocabulary.ends
    if vocabulary.pad is not None:
        config["pad_token_id"] = vocabulary.pad
    return config


def _dump(config: dict[str, object]) -> str:
    return json.dumps(config, ensure_ascii=False, indent=2) + "\n"
