"""Make the tokenizer of the embedded model. Owns: tokenizer.json and the files beside it.

Byte-level BPE over pieces in which each space, digit and mark stands alone. A word therefore has
the same token at the start of an answer as in the middle of a question, which makes copying plain
for a small network, and every listed word costs one row of the embedding instead of two.

    python -m pykestrel.embedded.train.tokenizer OUT_DIR
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import corpus, words

VOCABULARY = 2048
CONTEXT = 2048

# The family's added tokens in the family's order; the flag says whether decoding hides them.
ADDED_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

# Letters together, digits one by one, other visible marks one by one, each space alone.
PIECES = r"(?:\p{L}\p{M}*)+|\p{N}|[^\s\p{L}\p{N}]|\r?\n|\s"

# ChatML as the family writes it. This model does not think, so enable_thinking changes nothing.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if content is none or content is undefined %}
        {%- set content = '' %}
    {%- elif content is not string %}
        {%- set content = content | selectattr('type', 'equalto', 'text') | join('', 'text') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def texts(seed: int, conversations: int) -> Iterator[str]:
    """Training text for the merges: a sample of the corpus, then every listed word often."""
    r = random.Random(seed)
    for _ in range(conversations):
        for message in corpus.conversation(r).messages():
            yield f"{message['role']}\n{message['content']}\n"
    for _ in range(400):
        yield " ".join(words.everything())


def build(seed: int = 1, conversations: int = 20000) -> Tokenizer:
    """Train the merges and add the family's special tokens behind them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ADDED_TOKENS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(seed, conversations), trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=hidden, normalized=False) for text, hidden in ADDED_TOKENS]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return int(found)


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "additional_special_tokens": [
            text
            for text, hidden in ADDED_TOKENS
            if hidden and text not in ("<|endoftext|>", "<|im_end|>")
        ],
        "added_tokens_decoder": {
            str(token_id(tokenizer, text)): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": hidden,
            }
            for text, hidden in ADDED_TOKENS
        },
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    """Build the tokenizer and say how well it fits the word lists."""
    parser = argparse.ArgumentParser(description="make the embedded model's tokenizer")
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    tokenizer = build()
    save(tokenizer, out)
    split = [w for w in words.everything() if len(tokenizer.encode(w).ids) > 1]
    print(f"{tokenizer.get_vocab_size()} tokens; {len(split)} listed words are split: {split[:20]}")


if __name__ == "__main__":
    main()
