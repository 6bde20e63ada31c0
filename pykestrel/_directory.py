"""A directory that appears when all of it is written, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pykestrel._errors import FileError

DISK_RESERVE = 16 << 20


def free_destination(path: Path, *, sources: list[Path], overwrite: bool) -> Path:
    """The absolute form of a destination directory, once it is free or may be replaced.

    Only a checkpoint directory or an empty one may be, and none that holds one of the sources.
    """
    try:
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links
        raise FileError(f"{path}: cannot be made: {error}") from error
    if not path.parent.is_dir():
        raise FileError(f"{path}: cannot be made: its parent directory does not exist")
    if not os.path.lexists(path):
        return path
    if any(source.resolve().is_relative_to(path) for source in sources):
        raise FileError(f"{path}: holds what is being read, so it is not overwritten")
    if not overwrite:
        raise FileError(f"{path}: exists already")
    if not path.is_dir():
        raise FileError(f"{path}: is not a directory, so it is not overwritten")
    if any(path.iterdir()) and not (path / "config.json").is_file():
        raise FileError(f"{path}: holds files but no config.json, so it is not overwritten")
    return path


def require_space(path: Path, n_bytes: int) -> None:
    """FileError unless the disk that `path` will be on has room for n_bytes and a reserve."""
    free = shutil.disk_usage(path.parent).free
    needed = n_bytes + DISK_RESERVE
    if needed > free:
        raise FileError(
            f"{path}: needs {needed / 1e6:.0f} MB of disk space, {free / 1e6:.0f} MB are free"
        )


@contextmanager
def fresh_directory(path: Path, purpose: str) -> Iterator[Path]:
    """A new directory beside `path` to fill; at the end of the block it becomes `path`.

    If the block fails, it is gone and `path` is as it was.
    """
    fresh = path.parent / f".{path.name}.{purpose}-{os.getpid()}-{secrets.token_hex(4)}"
    fresh.mkdir()
    try:
        yield fresh
        sync(fresh)
        _move_into_place(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def copy_file(source: Path, destination: Path) -> None:
    """Copy contents, through links, and flush them to the disk."""
    with source.open("rb") as reader, destination.open("xb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


def sync(directory: Path) -> None:
    """Flush a directory's own entries to the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move_into_place(fresh: Path, path: Path) -> None:
    """Rename; an older directory steps aside and comes back if that fails."""
    aside = fresh.with_name(f"{fresh.name}-old")
    try:
        if os.path.lexists(path):
            path.rename(aside)
        fresh.rename(path)
        sync(path.parent)
    finally:
        if os.path.lexists(path):
            shutil.rmtree(aside, ignore_errors=True)
        elif os.path.lexists(aside):
            aside.rename(path)
