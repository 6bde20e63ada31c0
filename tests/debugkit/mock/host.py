"""A Python program that reaches the mock library through ctypes, as pykestrel reaches libkestrel.

Usage: host.py LIBRARY [N_PROMPT [MAX_TOKENS [STOP_AFTER]]]
"""

import ctypes
import sys


class Request(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("prompt_ids", ctypes.POINTER(ctypes.c_int32)),
        ("n_prompt", ctypes.c_int32),
        ("max_tokens", ctypes.c_int32),
        ("stop_after", ctypes.c_int32),
    ]


class Stats(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("finish", ctypes.c_int),
        ("n_prompt", ctypes.c_int32),
        ("n_cached", ctypes.c_int32),
        ("n_prefilled", ctypes.c_int32),
        ("n_generated", ctypes.c_int32),
        ("n_decodes", ctypes.c_int32),
    ]


def main() -> None:
    library, *numbers = sys.argv[1:]
    n_prompt, max_tokens, stop_after = [*map(int, numbers), *(18, 32, 9)[len(numbers) :]]
    mock = ctypes.CDLL(library)
    mock.mock_session_open.restype = ctypes.c_void_p
    mock.mock_session_open.argtypes = [ctypes.c_int32, ctypes.c_int32]
    mock.kestrel_run_completion.argtypes = [ctypes.c_void_p] * 4
    session = mock.mock_session_open(4, 4096)
    ids = (ctypes.c_int32 * n_prompt)()
    request = Request(ctypes.sizeof(Request), ids, n_prompt, max_tokens, stop_after)
    stats = Stats(ctypes.sizeof(Stats))
    mock.kestrel_run_completion(session, ctypes.byref(request), ctypes.byref(stats), None)
    print(f"generated {stats.n_generated}")
    print(f"decodes {stats.n_decodes}", file=sys.stderr)


if __name__ == "__main__":
    main()
