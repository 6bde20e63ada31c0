"""no_ptrace.py COMMAND...: run a command to which ptrace(2) is refused, as in a strict container.

A seccomp filter does it, so it needs no privilege. x86-64 and aarch64.
"""

import ctypes
import os
import platform
import struct
import sys

PTRACE = {"x86_64": 101, "aarch64": 117}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001


class Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h"""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def main() -> None:
    number = PTRACE[platform.machine()]
    code = [
        (LOAD_WORD, 0, 0, 0),  # the system call's number is the first word
        (JUMP_IF_EQUAL, 0, 1, number),
        (RETURN, 0, 0, EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    words = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *word) for word in code))
    program = Program(len(code), ctypes.cast(words, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)
    ):
        sys.exit(f"seccomp: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
