"""How gdb's frames become a backtrace; no gdb is started."""

from __future__ import annotations

import pytest

from debugkit.probes import StackReader, is_python, owner, source_root
from debugkit.records import Fold, Frame

ROOT = "/home/me/kestrel/libkestrel"


def frame(level: int, func: str, **fields: str) -> dict[str, str]:
    fields = {"from_": "", **fields}
    library = fields.pop("from_")
    return {"level": str(level), "func": func, **({"from": library} if library else {}), **fields}


def own(level: int, func: str, file: str, line: int) -> dict[str, str]:
    return frame(level, func, file=file, fullname=f"{ROOT}/{file}", line=str(line))


UNDER_PYTHON = [
    own(0, "kestrel_decode", "src/decode.c", 12),
    own(1, "decode_loop", "src/completion.c", 60),
    own(2, "run_completion", "src/completion.c", 90),
    frame(3, "??", from_="/lib/x86_64-linux-gnu/libffi.so.8"),
    frame(4, "ffi_call", from_="/lib/x86_64-linux-gnu/libffi.so.8"),
    frame(5, "_ctypes_callproc", file="/b/Python-3.11.7/Modules/_ctypes/callproc.c"),
    frame(6, "_PyEval_EvalFrameDefault", file="Python/ceval.c"),
    frame(7, "__libc_start_main_impl", file="../csu/libc-start.c"),
    frame(8, "_start"),
]


def test_own_frames_stay_and_the_host_is_folded() -> None:
    stack = StackReader(ROOT).fold(UNDER_PYTHON, {0: {"token_id": "209"}})
    assert stack == (
        Frame("kestrel_decode", "libkestrel/src/decode.c", 12, {"token_id": "209"}),
        Frame("decode_loop", "libkestrel/src/completion.c", 60),
        Frame("run_completion", "libkestrel/src/completion.c", 90),
        Fold(6, ("Python", "libffi")),
    )


def test_foreign_frames_between_own_ones_are_folded_apart() -> None:
    frames = [
        frame(0, "memcpy", from_="/lib/libc.so.6"),
        own(1, "kestrel_prefill", "src/prefill.c", 3),
        frame(2, "callback", file="app.c"),
        own(3, "main", "tools/kestrel-run.c", 9),
    ]
    stack = StackReader(ROOT).fold(frames, {})
    assert [getattr(item, "of", None) for item in stack] == [("libc",), None, ("other code",), None]


def test_the_innermost_frames_can_be_named_whosever_they_are() -> None:
    frames = [
        frame(0, "__pthread_kill_implementation", file="pthread_kill.c", line="43"),
        frame(1, "raise", from_="/lib/libc.so.6"),
        frame(2, "abort", from_="/lib/libc.so.6"),
        own(3, "misbehave", "src/kestrel.c", 50),
    ]
    stack = StackReader(ROOT).fold(frames, {}, keep=2)
    assert stack == (
        Frame("__pthread_kill_implementation", "pthread_kill.c", 43, foreign=True),
        Frame("raise", "/lib/libc.so.6", 0, foreign=True),
        Fold(1, ("libc",)),
        Frame("misbehave", "libkestrel/src/kestrel.c", 50),
    )


def test_without_a_root_nothing_is_ours() -> None:
    assert StackReader("").fold(UNDER_PYTHON, {}) == (Fold(9, ("Python", "libffi", "other code")),)


@pytest.mark.parametrize(
    ("fullname", "root"),
    [
        ("/home/me/kestrel/libkestrel/src/prefill.c", "/home/me/kestrel/libkestrel"),
        ("/w/mock/kestrel.c", "/w/mock"),
        ("/prefill.c", ""),
        ("", ""),
    ],
)
def test_source_root(fullname: str, root: str) -> None:
    assert source_root(fullname) == root


@pytest.mark.parametrize(
    ("fields", "program", "whose"),
    [
        (frame(0, "??", from_="/lib/libffi.so.8"), "", "libffi"),
        (frame(0, "x", from_="/usr/lib/libpython3.11.so.1.0"), "", "Python"),
        (frame(0, "x", from_="/v/_ctypes.cpython-311-x86_64-linux-gnu.so"), "", "Python"),
        (frame(0, "x", from_="/v/numpy/_core.abi3.so"), "", "Python"),
        (frame(0, "run_mod", file="Python/pythonrun.c"), "", "Python"),
        (frame(0, "??"), "/usr/bin/python3.11", "Python"),
        (frame(0, "??"), "/usr/bin/node", "other code"),
        (frame(0, "__libc_start_call_main"), "/usr/bin/python3.11", "libc"),
        (frame(0, "clone3", from_="/lib/libc.so.6"), "", "libc"),
        (frame(0, "start", from_="/lib64/ld-linux-x86-64.so.2"), "", "libc"),
        (frame(0, "work", file="server.c"), "/usr/bin/python3.11", "other code"),
        (frame(0, "f", from_="/lib/libcrypto.so.3"), "", "other code"),
    ],
)
def test_owner(fields: dict[str, str], program: str, whose: str) -> None:
    assert owner(fields, program) == whose


def test_is_python() -> None:
    assert is_python("/root/.pyenv/versions/3.11.7/bin/python3.11")
    assert not is_python("/usr/bin/kestrel-run")
    assert not is_python("")
