"""Timelines on disk, so that a restart costs a file read instead of a prefill.

A store is a directory of snapshots, one per timeline. Names in it are the store's own: model
fingerprint, KV type and a hash of the token ids; files with other names are never touched.

    kestrel-1-<fingerprint>-<kv type>-<hash of ids>.kv     an entry; its time is when it last served
    kestrel-1-….kv.tmp-<pid>-<n>                           an entry that is being written
    lock                                                   see below

A timeline that continues a stored one takes its place, and one that is stored already, or begins a
stored one that fits into the session's context, is not written again.

Lookup. Each entry's ids are cut into blocks of 64, and a hash chain is made over them, so that the
hash of a block stands for all the ids up to its end. The prompt's deepest block that some entry has
too leads to the few entries worth comparing id by id; a hash alone decides nothing.

Several processes may use one directory. Entries appear by rename and may vanish at any moment; who
writes holds the lock shared, who tidies up (evicts, removes what dead writers left) holds it alone,
and does without if others are writing: the last of them tidies up.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pykestrel import snapshot
from pykestrel._errors import (
    FileError,
    FormatError,
    InvalidArgument,
    KestrelError,
    Mismatch,
    OutOfMemory,
)
from pykestrel._prefix import common_prefix

if TYPE_CHECKING:
    from pykestrel.session import Session, TokenIds

logger = logging.getLogger("kestrel")

DEFAULT_BYTES = 4 << 30
BLOCK = 64  # ids
# A restore reads whole files: it must bring at least this share of the entry's tokens. Computing a
# token takes hundreds of times as long as reading it.
_LEAST_SHARE = 1 / 64
_STALE_SECONDS = 3600.0

_ENTRY = re.compile(r"kestrel-1-[0-9a-f]{16}-(?:f32|f16|q8)-[0-9a-f]{40}\.kv")
_TEMPORARY = re.compile(_ENTRY.pattern + r"\.tmp-(\d+)-\d+")


@dataclass(frozen=True)
class _Entry:
    """A file whose ids are known. `chain[i]` stands for its first (i + 1) * BLOCK ids."""

    name: str
    ids: NDArray[np.int32]
    chain: tuple[bytes, ...]


class KvStore:
    """A directory of timelines with a budget.

    Args:
        directory: made, with its parents, if it is not there; readable by its owner alone then.
        max_bytes: of all entries together, other models' included. Exceeded only while an entry is
            being written; one that alone is larger is not written.

    Failures while a store is used (a full disk, a damaged entry) are one warning each, and cost
    time, never an answer. Any thread may use it; they take turns.

    Raises:
        FileError: the directory cannot be made or listed.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, max_bytes: int = DEFAULT_BYTES
    ) -> None:
        if max_bytes < 0:
            raise InvalidArgument(f"max_bytes must not be negative, not {max_bytes}")
        snapshot.path_bytes(directory)
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self._entries: dict[str, _Entry] = {}  # of the model and KV type last asked for
        self._by_chain: dict[bytes, set[str]] = defaultdict(set)
        self._prefix = ""
        self._unusable: set[str] = set()  # names not to be tried again
        self._matched = ""  # the entry that served last
        self._warned: set[str] = set()
        self._mutex = threading.Lock()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            list(self.directory.iterdir())
        except OSError as error:
            raise FileError(f"{self.directory}: {error.strerror or error}") from error

    # -- the two doors ---------------------------------------------------------------------------

    def restore(self, session: Session, prompt_ids: TokenIds) -> int:
        """Give the session the entry with the longest prefix of the prompt, if that is longer.

        Returns:
            how many of the prompt's ids the session's timeline begins with afterwards.
        """
        with self._mutex:
            return self._restore(session, np.asarray(prompt_ids, np.int32))

    def _restore(self, session: Session, prompt: NDArray[np.int32]) -> int:
        have = common_prefix(session.token_ids, prompt)
        self._refresh(session)
        while (best := self._longest(prompt, session.context_length)) is not None:
            entry, n_common = best
            # One token is computed in any case, so the prompt's last one is no gain.
            gain = min(n_common, len(prompt) - 1) - have
            if gain < max(1, len(entry.ids) * _LEAST_SHARE):
                break
            if self._try(session, entry):
                return n_common
        return have

    def save(self, session: Session) -> bool:
        """Store the session's timeline; False if it was not necessary or not possible."""
        with self._mutex:
            try:
                return self._save(session, session.token_ids)
            finally:
                self._matched = ""  # protected from restore to save, not for ever

    def _save(self, session: Session, ids: NDArray[np.int32]) -> bool:
        if len(ids) == 0:
            return False
        self._refresh(session)
        if (longer := self._continuation(ids, session.context_length)) is not None:
            self._touch(longer.name)
            return False
        name = self._prefix + _digest(ids) + ".kv"
        begun = self._beginnings(ids)
        if not self._fits(_file_bytes(session, len(ids)), begun):
            return False
        with self._lock(fcntl.LOCK_SH):
            try:
                session.save(self.directory / name)
            except (FileError, InvalidArgument, OutOfMemory) as error:
                self._warn("write", f"the KV store cannot be written to: {error}")
                return False
            self._add(name, ids)
            self._unusable.discard(name)
            self._touch(name)
            for entry in begun:
                self._remove(entry.name)
        logger.info("[KV-STORE] saved %d tokens", len(ids))
        self._tidy(keep=name)
        return True

    @property
    def n_bytes(self) -> int:
        """Bytes of all entries, other models' included."""
        return sum(status.st_size for _, status in self._files())

    def __repr__(self) -> str:
        return f"<pykestrel.KvStore {str(self.directory)!r}>"

    # -- lookup ----------------------------------------------------------------------------------

    def _refresh(self, session: Session) -> None:
        """Learn which entries of the session's model and KV type are there now."""
        prefix = f"kestrel-1-{session.model.info.fingerprint:016x}-{session.kv_type}-"
        if prefix != self._prefix:
            self._prefix, self._entries, self._by_chain = prefix, {}, defaultdict(set)
        there = {name for name, _ in self._files() if name.startswith(prefix)}
        for name in self._entries.keys() - there:
            self._forget(name)
        for name in sorted(there - self._entries.keys() - self._unusable):
            self._learn(name, session)

    def _learn(self, name: str, session: Session) -> None:
        try:
            info = snapshot.peek(self.directory / name)
            if self._prefix + _digest(info.token_ids) + ".kv" != name:
                raise FormatError(f"{self.directory / name}: it holds other tokens than it says")
            if info.fingerprint != session.model.info.fingerprint:
                raise FormatError(f"{self.directory / name}: it is another model's")
            self._add(name, info.token_ids)
        except KestrelError as error:
            self._cannot_use(name, error)

    def _add(self, name: str, ids: NDArray[np.int32]) -> None:
        entry = _Entry(name, ids, _chain(ids))
        self._entries[name] = entry
        for link in entry.chain:
            self._by_chain[link].add(name)

    def _forget(self, name: str) -> None:
        for link in self._entries.pop(name).chain:
            self._by_chain[link].discard(name)
            if not self._by_chain[link]:
                del self._by_chain[link]

    def _longest(self, ids: NDArray[np.int32], most: int) -> tuple[_Entry, int] | None:
        """The entry of at most `most` tokens with the longest common prefix, and its length."""
        candidates: list[_Entry] = []
        for link in reversed(_chain(ids)):
            names = self._by_chain.get(link, ())
            candidates = [e for e in (self._entries[n] for n in names) if len(e.ids) <= most]
            if candidates:
                break
        else:
            candidates = [e for e in self._entries.values() if len(e.ids) <= most]
        found = [(common_prefix(entry.ids, ids), entry) for entry in candidates]
        # Among equals the shortest file, then the name: one store, one choice.
        best = min(found, key=lambda f: (-f[0], len(f[1].ids), f[1].name), default=None)
        return None if best is None or best[0] == 0 else (best[1], best[0])

    def _continuation(self, ids: NDArray[np.int32], most: int) -> _Entry | None:
        """An entry of at most `most` tokens that begins with ids, or is equal."""
        chain = _chain(ids)
        names = self._by_chain.get(chain[-1], set()) if chain else self._entries.keys()
        entries = (self._entries[name] for name in sorted(names))
        return next(
            (e for e in entries if len(e.ids) <= most and common_prefix(e.ids, ids) == len(ids)),
            None,
        )

    def _beginnings(self, ids: NDArray[np.int32]) -> list[_Entry]:
        """The entries that ids continue."""
        return [e for e in self._entries.values() if common_prefix(e.ids, ids) == len(e.ids)]

    # -- reading and writing ---------------------------------------------------------------------

    def _try(self, session: Session, entry: _Entry) -> bool:
        started = time.perf_counter()
        try:
            session.restore(self.directory / entry.name)
        except (FileError, FormatError, Mismatch) as error:
            self._forget(entry.name)
            self._cannot_use(entry.name, error)
            return False
        self._matched = entry.name
        self._touch(entry.name)
        seconds = time.perf_counter() - started
        logger.info("[KV-STORE] restored %d tokens in %.3f s", len(entry.ids), seconds)
        return True

    def _cannot_use(self, name: str, error: KestrelError) -> None:
        """A damaged entry is removed; what another version wrote, or nobody may read, stays."""
        path = self.directory / name
        if isinstance(error, FormatError):
            self._warn(name, f"a stored timeline is removed: {error}")
            self._remove(name)
        elif isinstance(error, Mismatch):
            logger.debug("[KV-STORE] left alone: %s", error)
        elif os.path.lexists(path):
            self._warn(name, f"a stored timeline is not used: {error}")
        else:
            return  # another process has removed it; it may come back
        self._unusable.add(name)

    def _fits(self, n_bytes: int, begun: list[_Entry]) -> bool:
        """Whether an entry may be written: beside it only what may not be evicted counts."""
        if n_bytes > self.max_bytes:
            self._warn(
                "budget",
                f"{self.directory}: a timeline of {n_bytes} bytes is not stored, "
                f"the budget is {self.max_bytes}",
            )
            return False
        if not self._matched or self._matched in {entry.name for entry in begun}:
            return True
        return n_bytes + self._size(self._matched) <= self.max_bytes

    def _size(self, name: str) -> int:
        try:
            return (self.directory / name).stat().st_size
        except OSError:
            return 0

    def _touch(self, name: str) -> None:
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.directory / name, ns=(now, now))

    def _remove(self, name: str) -> None:
        if name in self._entries:
            self._forget(name)
        with contextlib.suppress(OSError):
            (self.directory / name).unlink()

    def _files(self) -> list[tuple[str, os.stat_result]]:
        """The entries there are, of whatever model."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.directory) as items:
            for item in items:
                if _ENTRY.fullmatch(item.name):
                    with contextlib.suppress(OSError):  # it vanishes under our eyes
                        status = item.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found.append((item.name, status))
        return found

    # -- tidying up ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock(self, kind: int) -> Iterator[str]:
        """Hold the directory's lock: "held", "busy" if others do, "none" if there is no locking."""
        try:
            fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield "none"
            return
        try:
            fcntl.flock(fd, kind)
            state = "held"
        except BlockingIOError:
            state = "busy"
        except OSError:  # this file system has none
            state = "none"
        try:
            yield state
        finally:
            os.close(fd)

    def _tidy(self, *, keep: str) -> None:
        """Remove what dead writers left, then the entries that served longest ago."""
        with self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB) as state:
            if state == "busy":
                return
            self._remove_temporaries(alone=state == "held")
            files = sorted(self._files(), key=lambda file: (file[1].st_mtime_ns, file[0]))
            excess = sum(status.st_size for _, status in files) - self.max_bytes
            for name, status in files:
                if excess <= 0:
                    break
                if name not in (keep, self._matched):
                    self._remove(name)
                    excess -= status.st_size

    def _remove_temporaries(self, *, alone: bool) -> None:
        """Who holds the lock alone knows that nobody is writing; otherwise be careful."""
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                if match := _TEMPORARY.fullmatch(path.name):
                    with contextlib.suppress(OSError):
                        if alone or _is_stale(path, int(match[1])):
                            path.unlink()

    def _warn(self, kind: str, text: str) -> None:
        """Each kind of trouble once per store."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)


def _digest(ids: NDArray[np.int32]) -> str:
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=20).hexdigest()


def _chain(ids: NDArray[np.int32]) -> tuple[bytes, ...]:
    """For each whole block, a hash of all the ids up to its end."""
    chain: list[bytes] = []
    running = hashlib.blake2b(digest_size=16)
    data: Any = np.ascontiguousarray(ids, "<i4")
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        running.update(data[end - BLOCK : end].tobytes())
        chain.append(running.digest())
    return tuple(chain)


def _file_bytes(session: Session, n_tokens: int) -> int:
    """What a snapshot will take, or a little more: keys lie in whole tiles of 16 tokens."""
    info = session.model.info
    keys_and_values = ((n_tokens + 15) // 16 * 16 + n_tokens) * session.kv_bytes_per_token // 2
    sums_and_padding = 8 * (info.n_layers + 2) + 32 * info.n_layers * info.n_kv_heads
    return 128 + keys_and_values + 4 * (n_tokens + info.n_vocab + 2) + sums_and_padding


def _is_stale(path: Path, pid: int) -> bool:
    """True for a file that has not grown for long and whose writer is not on this machine."""
    if time.time() - path.stat().st_mtime < _STALE_SECONDS:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
