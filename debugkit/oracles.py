"""The same stages from somebody else: the numpy oracle of this checkout, and transformers.

Neither knows kestrel's stage points, so both are watched from outside while they run. The oracle's
elementary functions are replaced, in a private copy of its modules, by ones that report what went
in and came out; transformers has hooks for modules, and its rotary function is wrapped for the
time of the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from debugkit.stages import Array, Shape, Trouble

Emit = Callable[[str, int, int, Array], None]  # stage, layer, first position, rows
Result = tuple[dict[str, Any], Shape]

_ORACLE = Path(__file__).resolve().parents[1] / "tests" / "oracle" / "qref"
_PRIVATE = "_debugkit_qref"  # the name of our copy in sys.modules


# ---- the numpy oracle --------------------------------------------------------------------------


def run_oracle(path: Path, token_ids: Sequence[int], dtype: str, emit: Emit) -> Result:
    """One forward pass of the oracle over all tokens, in float32 ("f32") or float64 ("f64")."""
    qref = _load_oracle()
    number = np.float64 if dtype == "f64" else np.float32
    try:
        model = qref.Model.load(path, number)
    except OSError as error:
        raise Trouble(f"{error.filename}: {error.strerror}.") from error
    except (KeyError, ValueError, TypeError) as error:
        raise Trouble(f"the oracle cannot read {path}: {error!r}.") from error
    t = model.text
    if max(token_ids) >= t.vocab:
        raise Trouble(f"token id {max(token_ids)} of a vocabulary of {t.vocab}.")
    names = {id(array): name for name, array in model.w.items()}
    watch = _OracleWatch(names, emit)
    with watch.installed(qref):
        emit("embed", -1, 0, model.embed(np.asarray(token_ids)))
        emit("logits", -1, 0, model.forward(list(token_ids)))
    shape = Shape(
        model_type=t.model_type,
        n_layers=t.layers,
        hidden_size=t.hidden,
        intermediate_size=t.intermediate,
        n_heads=t.heads,
        n_kv_heads=t.kv_heads,
        head_dim=t.head_dim,
        n_vocab=t.vocab,
    )
    return {"dtype": dtype, "numpy": np.__version__}, shape


def _load_oracle() -> Any:
    """The package tests/oracle/qref under a name of our own: replacing its functions is then
    nobody else's business."""
    if _PRIVATE in sys.modules:
        return sys.modules[_PRIVATE]
    start = _ORACLE / "__init__.py"
    if not start.is_file():
        raise Trouble(
            f"the numpy oracle belongs to a checkout of the repository; there is no {start}."
        )
    spec = importlib.util.spec_from_file_location(
        _PRIVATE, start, submodule_search_locations=[str(_ORACLE)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PRIVATE] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[_PRIVATE]
        raise
    return package


class _OracleWatch:
    """Stands between the oracle's layers and its elementary functions.

    What a call means follows from the weight it is given: weights are known by their identity.
    """

    def __init__(self, names: dict[int, str], emit: Emit) -> None:
        self._names = names
        self._emit = emit
        self._layer = -1
        self._n_rotated = 0

    @contextmanager
    def installed(self, qref: Any) -> Iterator[None]:
        """Replace the functions by watching ones until the end of the block."""
        del qref  # loaded: its modules are importable by their private names
        text = importlib.import_module(f"{_PRIVATE}.text")
        attention = importlib.import_module(f"{_PRIVATE}.attention")
        mlp = importlib.import_module(f"{_PRIVATE}.mlp")
        changes: list[tuple[ModuleType, str, Any]] = [
            (text, "rmsnorm", self._norm),
            (attention, "linear", self._linear),
            (attention, "rotate", self._rotate),
            (mlp, "linear", self._linear),
        ]
        before = [(module, name, getattr(module, name)) for module, name, _ in changes]
        try:
            for module, name, make in changes:
                setattr(module, name, make(getattr(module, name)))
            yield
        finally:
            for module, name, function in before:
                setattr(module, name, function)

    def _norm(self, rmsnorm: Callable[..., Array]) -> Callable[..., Array]:
        def watched(x: Array, weight: Array, eps: float) -> Array:
            y = rmsnorm(x, weight, eps)
            name = self._names.get(id(weight), "")
            if name.endswith(".post_attention_layernorm.weight"):
                self._emit("ffn.norm", self._layer, 0, y)
                return y
            if self._layer >= 0:  # what enters the next norm has left a layer
                self._emit("layer.out", self._layer, 0, x)
            if name.endswith(".input_layernorm.weight"):
                self._layer += 1
                self._n_rotated = 0
                self._emit("attn.norm", self._layer, 0, y)
            return y

        return watched

    def _linear(self, linear: Callable[..., Array]) -> Callable[..., Array]:
        def watched(x: Array, weight: Array, bias: Array | None = None) -> Array:
            y = linear(x, weight, bias)
            inside, outside = _AROUND.get(
                self._names.get(id(weight), "").removesuffix(".weight").rpartition(".")[2],
                (None, None),
            )
            if inside is not None:
                self._emit(inside, self._layer, 0, x)
            if outside is not None:
                self._emit(outside, self._layer, 0, y)
            return y

        return watched

    def _rotate(self, rotate: Callable[..., Array]) -> Callable[..., Array]:
        def watched(x: Array, cos: Array, sin: Array) -> Array:
            y = rotate(x, cos, sin)
            stage = ("attn.q", "attn.k")[self._n_rotated]
            self._n_rotated += 1
            self._emit(stage, self._layer, 0, y.reshape(len(y), -1))
            return y

        return watched


# Projection -> the stage that enters it, the stage that leaves it. Queries and keys are reported
# after their norm and rotation, not here.
_AROUND: dict[str, tuple[str | None, str | None]] = {
    "v_proj": (None, "attn.v"),
    "o_proj": ("attn.heads", "attn.out"),
    "gate_proj": (None, "ffn.gate"),
    "up_proj": (None, "ffn.up"),
    "down_proj": ("ffn.gated", "ffn.out"),
}


# ---- transformers ------------------------------------------------------------------------------


def run_transformers(path: Path, token_ids: Sequence[int], dtype: str, emit: Emit) -> Result:
    """One forward pass of transformers over all tokens, eager attention, on the CPU."""
    try:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise Trouble(
            f"transformers is not installed here ({error}); it comes with "
            "pip install 'pykestrel[reference]'."
        ) from None
    number = torch.float64 if dtype == "f64" else torch.float32
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=number, attn_implementation="eager", local_files_only=True
        ).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise Trouble(f"transformers cannot read {path}: {error}") from error
    c = model.config
    if max(token_ids) >= c.vocab_size:
        raise Trouble(f"token id {max(token_ids)} of a vocabulary of {c.vocab_size}.")
    with torch.no_grad(), _transformers_watch(model, emit):
        logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    emit("logits", -1, 0, logits[0].numpy())
    shape = Shape(
        model_type=c.model_type,
        n_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        n_heads=c.num_attention_heads,
        n_kv_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        n_vocab=c.vocab_size,
    )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"dtype": dtype, **versions}, shape


def _first(value: Any) -> Any:
    """A module's only output, or the first of a tuple."""
    return value[0] if isinstance(value, tuple) else value


@contextmanager
def _transformers_watch(model: Any, emit: Emit) -> Iterator[None]:
    """Hooks on every module whose input or output is a stage, and on the rotary function."""
    current = [-1]
    handles: list[Any] = []

    def report(stage: str, layer: int, value: Any) -> None:
        emit(stage, layer, 0, _first(value)[0].detach().numpy())

    def after(module: Any, stage: str, layer: int) -> None:
        handles.append(module.register_forward_hook(lambda _m, _i, out: report(stage, layer, out)))

    def before(module: Any, stage: str, layer: int) -> None:
        handles.append(
            module.register_forward_pre_hook(lambda _m, args: report(stage, layer, args))
        )

    def enter(layer: int) -> Callable[..., None]:
        return lambda *_: current.__setitem__(0, layer)

    decoder = model.model
    after(decoder.embed_tokens, "embed", -1)
    for i, layer in enumerate(decoder.layers):
        handles.append(layer.register_forward_pre_hook(enter(i)))
        after(layer.input_layernorm, "attn.norm", i)
        after(layer.post_attention_layernorm, "ffn.norm", i)
        for part in (layer.self_attn, layer.mlp):
            for name, (inside, outside) in _AROUND.items():
                if inside is not None and hasattr(part, name):
                    before(getattr(part, name), inside, i)
                if outside is not None and hasattr(part, name):
                    after(getattr(part, name), outside, i)
        after(layer, "layer.out", i)
    modeling: Any = inspect.getmodule(type(decoder))
    rotary = getattr(modeling, "apply_rotary_pos_emb", None)
    if modeling is None or rotary is None:
        raise Trouble(f"this transformers rotates {type(decoder).__name__} in an unknown way.")

    def rotate(*args: Any, **kwargs: Any) -> Any:
        turned = rotary(*args, **kwargs)
        for stage, x in zip(("attn.q", "attn.k"), turned, strict=True):  # [1, heads, n, d]
            emit(stage, current[0], 0, x[0].transpose(0, 1).flatten(1).contiguous().numpy())
        return turned

    try:
        modeling.apply_rotary_pos_emb = rotate
        yield
    finally:
        modeling.apply_rotary_pos_emb = rotary
        for handle in handles:
            handle.remove()
