"""How a command ends: its exit codes, and the errors that become one sentence on the screen."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every debugkit command."""

    OK = 0
    EXPECTATION_FAILED = 1  # the program ran under gdb, but crashed, failed or never hit
    USAGE = 2
    PREFLIGHT = 3  # a tool, a permission, symbols or the command itself is missing
    TIMEOUT = 4
    DEBUGGER_DIED = 5
    INTERRUPTED = 130  # Ctrl-C, as shells count it


class DebugkitError(Exception):
    """A failure with one sentence for the reader, remedy included, and the exit code it ends in."""

    exit_code = ExitCode.EXPECTATION_FAILED


class PreflightError(DebugkitError):
    """Something that has to be there before a trace can start is not."""

    exit_code = ExitCode.PREFLIGHT


class DebuggerError(DebugkitError):
    """gdb itself failed: it answered with an error, did not answer, or is gone."""

    exit_code = ExitCode.DEBUGGER_DIED
