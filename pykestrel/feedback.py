"""Error feedback: rounding the columns of a q4 matrix one after another.

What the rounding of a column does to a product, later columns can make up for, because a model's
channels go together: where one is large, so are others. How they go together is read from the
second moments of what the matrix is multiplied with (GPTQ, arXiv:2210.17323); the arithmetic is
the library's, kestrel_feedback_measure.

Those moments are as many as a matrix has columns, squared, so they are not kept for a whole model:
`Feedback` runs the texts again for some layers at a time, as packing comes to them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pykestrel import _ffi, _loader
from pykestrel._errors import InvalidArgument
from pykestrel.calibration import READERS, require_unpacked
from pykestrel.checkpoint import summarize

if TYPE_CHECKING:
    from pykestrel.model import Model
    from pykestrel.session import Session, TokenIds, TraceEvent

_STAGE_OF = {module: stage for stage, modules in READERS.items() for module in modules}
_NAME = re.compile(r"model\.layers\.(\d+)\.(\w+\.\w+)\.weight")

MEMORY = 2 << 30  # bytes of inputs that are held at once

Place = tuple[str, int]  # stage and layer


def measure(
    rows: NDArray[np.float32], *, threads: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The two arrays of a kestrel_feedback.

    Args:
        rows: float32 [n_tokens, n_columns], what a matrix is multiplied with.
        threads: 0 lets the library choose. The result is the same, to the bit.

    Returns:
        The columns in the order in which they are rounded, int32 [n_columns], and what each owes
        the later ones, float32 [n_columns, n_columns], both counted in that order.

    Raises:
        InvalidArgument: there is no row, or a value is not finite.
    """
    rows = np.ascontiguousarray(rows, np.float32)
    n_rows, n_columns = rows.shape
    order = np.empty(n_columns, np.int32)
    weights = np.empty((n_columns, n_columns), np.float32)
    error = _ffi.Error()
    status = _loader.library().kestrel_feedback_measure(
        _floats(rows), n_rows, n_columns, threads, _ints(order), _floats(weights), error
    )
    _loader.check(status, error)
    return order, weights


class Feedback:
    """What `quantize` asks while it packs a model as q4. The model has to stay open meanwhile."""

    def __init__(
        self, model: Model, texts: Sequence[TokenIds], *, threads: int = 0, memory: int = MEMORY
    ) -> None:
        """Of these texts, token ids, each in a timeline of its own.

        Args:
            threads: 0 lets the library choose.
            memory: so many bytes of inputs are held at once, but those of one layer always.

        Raises:
            InvalidArgument: there is no token.
            Unsupported: the model is packed.
        """
        require_unpacked(model)
        self._texts = [text for text in texts if len(text)]
        if not self._texts:
            raise InvalidArgument("there is no text to calibrate with")
        self._model = model
        self._threads = threads
        self._memory = memory
        names = (_NAME.fullmatch(tensor.name) for tensor in summarize(model.path).tensors)
        # As packing will come to them.
        self._layers = list(dict.fromkeys(int(name[1]) for name in names if name))
        self._running: Session | None = None
        self._rows: dict[Place, list[NDArray[np.float32]]] = {}
        self._found: dict[Place, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}

    def of_tensor(self, name: str) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """What `measure` says of the inputs of a matrix; None if this model has no such matrix."""
        match = _NAME.fullmatch(name)
        stage = _STAGE_OF.get(match[2]) if match else None
        if match is None or stage is None or int(match[1]) not in self._layers:
            return None
        place = stage, int(match[1])
        if place not in self._found:
            self._found = {at: found for at, found in self._found.items() if at[1] == place[1]}
            self._found[place] = measure(self._inputs(place), threads=self._threads)
        return self._found[place]

    def answer(self, name: str, out: _ffi.Feedback) -> None:
        """`of_tensor` for the library; the arrays live until the next question."""
        found = self.of_tensor(name)
        if found is not None:
            order, weights = found
            out.n_columns, out.order, out.weights = len(order), _ints(order), _floats(weights)

    def cancel(self) -> None:
        """Let `of_tensor` stop running texts and raise Cancelled. Any thread."""
        running = self._running
        if running is not None:
            running.cancel()

    def _inputs(self, place: Place) -> NDArray[np.float32]:
        if place not in self._rows:
            self._rows = {}
            self._replay(place[1])
        return np.concatenate(self._rows.pop(place))

    def _replay(self, first: int) -> None:
        """Take the inputs of this layer, and of as many after it as memory is meant for."""
        info = self._model.info
        n_tokens = sum(len(text) for text in self._texts)
        width = 2 * info.hidden_size + info.n_heads * info.head_dim + info.intermediate_size
        n_layers = max(1, self._memory // (4 * width * n_tokens))
        at = self._layers.index(first)
        wanted = set(self._layers[at : at + n_layers])

        def hear(event: TraceEvent) -> None:
            if event.layer in wanted and event.stage in READERS:
                rows = np.array(event.data, np.float32)
                self._rows.setdefault((event.stage, event.layer), []).append(rows)

        longest = max(len(text) for text in self._texts)
        with self._model.session(context_length=longest, trace=hear) as session:
            self._running = session
            try:
                for text in self._texts:
                    session.truncate(0)
                    session.prefill(text)
            finally:
                self._running = None


def _floats(array: NDArray[np.float32]) -> ctypes._Pointer[ctypes.c_float]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def _ints(array: NDArray[np.int32]) -> ctypes._Pointer[ctypes.c_int32]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
