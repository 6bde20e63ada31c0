"""GGUF files become checkpoint directories.

`import_gguf` is the way in; `GgufFile` opens a file for a look at its metadata and tensors.
In reading order: reader, dequant, architecture, rope, vocabulary, tokenizer, convert.
"""

from __future__ import annotations

from .convert import ImportReport, import_gguf
from .errors import GgufError
from .reader import GgufFile

__all__ = ["GgufError", "GgufFile", "ImportReport", "import_gguf"]
