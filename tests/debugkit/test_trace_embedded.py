"""`debugkit trace` on the embedded model through pykestrel: one prompt, taken apart.

One run here; `soak.py` makes 200.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.gdb


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    """soak.py, which is a script and no part of a package."""
    spec = importlib.util.spec_from_file_location("soak", Path(__file__).with_name("soak.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_prefill_and_decodes_until_eos(embedded_model, soak, tmp_path) -> None:
    answer = soak.untraced(soak.PROMPT)
    done, records, text = soak.traced(soak.PROMPT, tmp_path)
    assert done.returncode == 0, done.stderr
    soak.check(records, answer)
    assert text.strip() == answer["text"].strip()
    n = len(answer["token_ids"])
    decodes = f"{n - 1} decode" + ("s" if n != 2 else "")
    assert done.stdout.splitlines()[-1] == f"1 prefill + {decodes}, EOS after {n} of max 32"
    assert f"│ {text.splitlines()[0]}" in done.stdout.splitlines()
    assert "frames of Python and libffi" in done.stdout


def test_the_limit_changes_no_count(embedded_model, soak, debugkit) -> None:
    answer = soak.untraced(soak.PROMPT)
    done = debugkit("trace", "--max-decodes", "1", "--", *soak.kestrel(soak.PROMPT, None))
    assert done.returncode == 0, done.stderr
    n = len(answer["token_ids"])
    assert f"EOS after {n} of max 32" in done.stdout.splitlines()[-1]
    assert f"1 prefill + {n - 1} decode" in done.stdout.splitlines()[-1]
