"""The longest common prefix of two timelines."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def common_prefix(left: NDArray[Any], right: NDArray[Any]) -> int:
    """How many ids two flat arrays share from their beginning."""
    n = min(len(left), len(right))
    differs = left[:n] != right[:n]
    first = int(np.argmax(differs)) if n else 0
    return first if n and differs[first] else n
