"""What a checkpoint directory says, read without the library: configuration, defaults, tensors.

Everything here reads headers only; no tensor data is touched. Errors name the file and the field.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykestrel._errors import FileError, FormatError, InvalidArgument
from pykestrel.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
_DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: {_reason(error)}") from error
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}: {error.msg} (byte {_byte_of(error)})") from error
    except RecursionError as error:
        raise FormatError(f"{path}: nested too deeply") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: a JSON object is expected")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`; an empty dict if there is no such file."""
    return read_json(path) if path.exists() else {}


def require_directory(path: Path) -> None:
    """Raise FileError with a remedy unless `path` is a checkpoint directory."""
    try:
        if path.is_file():
            remedy = "`kestrel import` makes a checkpoint of a GGUF file"
            hint = f"; {remedy}" if path.suffix.lower() == ".gguf" else ""
            raise FileError(f"{path}: a file, not a checkpoint directory{hint}")
        if not path.is_dir():
            looks_like_hub_id = not path.is_absolute() and len(path.parts) == 2
            hint = f" (`kestrel pull {path}` fetches it from the hub)" if looks_like_hub_id else ""
            raise FileError(f"{path}: no such directory{hint}")
        if not (path / "config.json").exists():
            raise FileError(f"{path}: not a checkpoint directory: it has no config.json")
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: {_reason(error)}") from error


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json (else config.json, tokenizer_config.json) asks for.

    Attributes:
        stop_ids: the end-of-sequence ids, sorted; empty if nothing names one.
        sampling: greedy unless `do_sample` is true, as transformers reads the file.
    """

    stop_ids: tuple[int, ...]
    sampling: SamplingParams

    @classmethod
    def load(cls, directory: Path) -> GenerationDefaults:
        """Read the defaults of a checkpoint directory. The file itself is optional."""
        path = directory / "generation_config.json"
        config = read_json_if_there(path)
        stop_ids = _token_ids(path, config, "eos_token_id")
        if not stop_ids:
            path = directory / "config.json"
            stop_ids = _token_ids(path, read_json_if_there(path), "eos_token_id")
        return cls(tuple(sorted(stop_ids)), _sampling_defaults(path.parent, config))


def _sampling_defaults(directory: Path, config: dict[str, Any]) -> SamplingParams:
    path = directory / "generation_config.json"
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: config[name] for name in names if config.get(name) is not None}
    if not config.get("do_sample"):
        # transformers decodes greedily then, whatever the temperature says; penalties still count.
        values = {name: values[name] for name in ("repetition_penalty",) if name in values}
    elif "temperature" not in values:
        values["temperature"] = 1.0
    try:
        return SamplingParams(**values)
    except InvalidArgument as error:
        raise FormatError(f"{path}: {error}") from error


def _token_ids(path: Path, config: dict[str, Any], key: str) -> set[int]:
    value = config.get(key)
    if value is None:
        return set()
    ids = value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise FormatError(f"{path}: {key} must be a token id or a list of them, not {value!r}")
    return set(ids)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a safetensors header describes it: `n_bytes` from byte `offset` of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    file: str
    offset: int

    @property
    def n_elements(self) -> int:
        """The product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Summary:
    """A checkpoint directory in numbers.

    Attributes:
        config: config.json as it is.
        tensors: in the order of the files, then of their headers.
        kv_bytes_per_token: KV type -> bytes one token takes in all layers together.
    """

    directory: Path
    config: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    kv_bytes_per_token: dict[str, int]

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors in the files."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def max_context(self) -> int:
        """max_position_embeddings, 0 if absent."""
        return _field(self.directory / "config.json", self.config, "max_position_embeddings", 0)


def summarize(directory: Path) -> Summary:
    """Read config.json and the safetensors headers of a checkpoint directory."""
    require_directory(directory)
    path = directory / "config.json"
    config = read_json(path)
    tensors = tuple(
        tensor for file in weight_files(directory) for tensor in read_safetensors_header(file)
    )
    return Summary(directory, config, tensors, _kv_bytes(path, config))


def weight_files(directory: Path) -> list[Path]:
    """model.safetensors, or the shards its index names, in order."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return [directory / "model.safetensors"]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index}: weight_map must map tensor names to shard files")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise FormatError(f"{index}: {name!r} is not the name of a shard in this directory")
    return [directory / name for name in names]


def read_safetensors_header(path: Path) -> Iterator[TensorInfo]:
    """The tensors of one safetensors file, from its header alone."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            n_header = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            size = path.stat().st_size
            if not 2 <= n_header <= min(_MAX_HEADER, size - 8):
                raise FormatError(f"{path}: not a safetensors file: bad header length (byte 0)")
            header = json.loads(file.read(n_header))
    except OSError as error:
        raise FileError(f"{path}: {_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is not a JSON object (byte 8)")
    for name, entry in header.items():
        if name != "__metadata__":
            yield _tensor_info(path, name, entry, 8 + n_header)


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = entry["data_offsets"]
        n_bytes = int(end) - int(begin)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: tensor {name!r} has a malformed header entry") from error
    expected = _DTYPE_BYTES.get(dtype)
    if min(shape, default=0) < 0 or (
        expected is not None and n_bytes != expected * math.prod(shape)
    ):
        raise FormatError(f"{path}: tensor {name!r}: data_offsets do not fit shape and dtype")
    return TensorInfo(name, dtype, shape, n_bytes, path.name, data_start + int(begin))


def read_vector(directory: Path, name: str) -> NDArray[np.float32]:
    """The values of a norm weight or a bias, float32 [n].

    Raises:
        FormatError: there is no such vector, or it is of another type than F32, F16 or BF16.
    """
    import numpy as np

    from pykestrel.gguf.dequant import dequantize
    from pykestrel.gguf.ggml_types import GgmlType

    found = [tensor for tensor in summarize(directory).tensors if tensor.name == name]
    if not found or len(found[0].shape) != 1 or found[0].dtype not in ("F32", "F16", "BF16"):
        raise FormatError(f"{directory}: there is no vector {name!r} of F32, F16 or BF16")
    tensor = found[0]
    try:
        with (directory / tensor.file).open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.n_bytes)
    except OSError as error:
        raise FileError(f"{directory / tensor.file}: {_reason(error)}") from error
    if len(data) != tensor.n_bytes:
        raise FormatError(f"{directory / tensor.file}: ends within tensor {name!r}")
    return dequantize(GgmlType[tensor.dtype], np.frombuffer(data, np.uint8))


def _kv_bytes(path: Path, config: dict[str, Any]) -> dict[str, int]:
    """Bytes per token: keys and values of every layer, in each KV type."""
    n_layers = _field(path, config, "num_hidden_layers")
    n_heads = _field(path, config, "num_attention_heads")
    n_kv_heads = _field(path, config, "num_key_value_heads", n_heads)
    default = 128 if str(config.get("model_type", "")).startswith("qwen3") else None
    head_dim = _field(path, config, "head_dim", default or -1)
    if head_dim < 0:
        head_dim = _field(path, config, "hidden_size") // max(n_heads, 1)
    rows = 2 * n_layers * n_kv_heads
    return {"f32": rows * 4 * head_dim, "f16": rows * 2 * head_dim, "q8": rows * (head_dim + 4)}


def _field(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FormatError(f"{path}: {key} must be a non-negative integer, not {value!r}")
    return value


def _byte_of(error: json.JSONDecodeError) -> int:
    return len(error.doc[: error.pos].encode("utf-8", "surrogatepass"))


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
