"""The embedded model: a small trained checkpoint that ships inside the package.

Owns the question "where is it?" and nothing else. The files themselves are made by the scripts in
`train/`; see the README there.
"""

from pathlib import Path


def path() -> Path:
    """Return the directory of the embedded checkpoint.

    It is an ordinary Hugging Face checkpoint directory (config.json, model.safetensors,
    tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json) and opens
    like any other. Nothing is read here; a missing directory shows when the model is opened.
    """
    return Path(__file__).resolve().parent / "model"
