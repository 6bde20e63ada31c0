"""A short run of tests/python/soak_cycles.py."""

from __future__ import annotations

import pytest

from tests.python import soak_cycles


@pytest.mark.parametrize("n_cycles", [120, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_stays_flat(checkpoint, n_cycles):
    sizes = list(soak_cycles.soak(checkpoint, n_cycles, budget=500_000))
    assert len(sizes) == n_cycles
    assert soak_cycles.growth(sizes) < soak_cycles.SLACK


def test_growth_is_seen():
    """The judgement is able to fail."""
    leak = [10_000_000 + i * 100_000 for i in range(200)]
    assert soak_cycles.growth(leak) > soak_cycles.SLACK
    noise = [10_000_000 + (i * 7919) % 1_000_000 for i in range(200)]
    assert soak_cycles.growth(noise) <= 0
