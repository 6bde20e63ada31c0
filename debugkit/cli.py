"""The `debugkit` command: stdout carries what was asked for, stderr one sentence if something is
amiss. Each command lives in a module of its own, which is imported when it is used."""

from __future__ import annotations

import importlib

import click

from debugkit import __version__

# name: (module, its click command, one line for the list)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "trace": ("debugkit.commands.trace", "command", "Show one prefill and its N decodes."),
    "export": ("debugkit.export.command", "command", "Turn a trace into a page or a Chrome trace."),
    "dump": ("debugkit.dump", "command", "Write the stages of one run as .npy files."),
    "diff": ("debugkit.diff", "command", "Find where two runs of the same ids part."),
    "gdb": ("debugkit.gdbside.launch", "command", "Open gdb with everything set up."),
    "step": ("debugkit.commands.step", "command", "Walk from the prefill into the decode loop."),
    "watch": ("debugkit.commands.watch", "command", "Show who writes seq_len or cache_len[L]."),
    "exercise": ("debugkit.commands.exercise", "command", "Exercises, their runs and a check."),
    "doctor": ("debugkit.commands.doctor", "command", "Check everything a trace needs."),
}


class Table(click.Group):
    """A group whose commands are found in COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.group(cls=Table, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="debugkit")
def main() -> None:
    """Look inside libkestrel while it answers: drives gdb over a running program."""
