"""`kestrel pull`: a checkpoint from the hub."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("pull")
@click.argument("repository", metavar="OWNER/NAME")
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Put it here. Default: the hub client's cache.",
)
@click.option("--revision", help="A branch, tag or commit.")
def command(repository: str, to: Path | None, revision: str | None) -> None:
    """Fetch a checkpoint and print the directory that --model takes."""
    from pykestrel.hub import pull

    click.echo(str(pull(repository, to=to, revision=revision)))
