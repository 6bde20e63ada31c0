"""KvStore: what is found again, what is evicted, and that trouble costs time, never an answer."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pykestrel import FileError, InvalidArgument, Model
from pykestrel.kv_store import BLOCK, KvStore
from pykestrel.snapshot import peek
from tests.python.conftest import ROOT, write_checkpoint

CONTEXT = 512
WAIT = 300.0


def ids_of(seed: int, n: int) -> list[int]:
    return [int(i) for i in np.random.RandomState(seed).randint(0, 200, n)]


@pytest.fixture
def store(tmp_path):
    return KvStore(tmp_path / "kv")


@pytest.fixture
def filled(model):
    """A function that gives a session with a timeline."""
    sessions = []

    def fill(ids, **options):
        session = model.session(**{"context_length": CONTEXT} | options)
        sessions.append(session)
        session.prefill(ids)
        return session

    yield fill
    for session in sessions:
        session.close()


def entries(store: KvStore) -> list[Path]:
    return sorted(store.directory.glob("*.kv"))


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def restored(model, store, ids, **options):
    """A fresh session after a restore for ids, and what restore said."""
    session = model.session(**{"context_length": CONTEXT} | options)
    return session, store.restore(session, ids)


# -- found again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 300])
def test_a_timeline_comes_back_bit_for_bit(model, store, filled, n):
    ids = ids_of(n, n)
    cold = filled(ids)
    assert store.save(cold)
    session, n_common = restored(model, KvStore(store.directory), [*ids, 5])
    assert n_common == n == session.seq_len
    assert session.logits.tobytes() == cold.logits.tobytes()
    for layer in range(model.info.n_layers):
        for ours, theirs in zip(session.kv_rows(layer), cold.kv_rows(layer), strict=True):
            assert ours.tobytes() == theirs.tobytes()
    generated = session.generate([*ids, 5], max_tokens=8)
    assert generated.stats.n_cached == n
    assert generated.token_ids == cold.generate([*ids, 5], max_tokens=8).token_ids


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8"])
def test_every_cache_type_has_its_own_entries(model, store, filled, kv_type):
    ids = ids_of(1, 100)
    store.save(filled(ids, kv_type=kv_type))
    for other in ("f32", "f16", "q8"):
        session, n_common = restored(model, store, [*ids, 5], kv_type=other)
        assert n_common == (100 if other == kv_type else 0)
        session.close()


def test_the_longest_prefix_is_found_among_many(model, store, filled):
    base = ids_of(1, 200)
    for kept in (10, 63, 64, 65, 130):
        store.save(filled([*base[:kept], *ids_of(kept, 30)]))
    assert len(entries(store)) == 5
    for n, expected in ((200, 130), (129, 129), (100, 100), (64, 64), (40, 40)):
        session, n_common = restored(model, store, [*base[:n], 201])
        assert n_common == expected
        assert session.token_ids[:expected].tolist() == base[:expected]


def test_equal_hashes_decide_nothing(model, store, filled, monkeypatch):
    """With a chain that says the same of everything, ids are still compared."""
    from pykestrel import kv_store

    monkeypatch.setattr(kv_store, "_chain", lambda ids: (b"same",) * (len(ids) // BLOCK))
    store.save(filled(ids_of(1, 150)))
    store.save(filled(ids_of(2, 150)))
    session, n_common = restored(model, store, [*ids_of(2, 150), 5])
    assert (n_common, session.token_ids.tolist()) == (150, ids_of(2, 150))
    assert restored(model, store, ids_of(3, 150))[1] == 0


def test_what_the_session_has_is_not_read_again(model, store, filled):
    ids = ids_of(1, 100)
    store.save(filled(ids))
    session = filled(ids[:99])
    before = session.token_ids.tolist()
    assert store.restore(session, ids) == 99  # the prompt's last token is computed in any case
    assert session.token_ids.tolist() == before
    session.truncate(90)
    assert store.restore(session, [*ids, 5]) == 100


def test_a_long_file_is_not_read_for_a_few_tokens(model, store, filled):
    ids = ids_of(1, 400)
    store.save(filled(ids))
    assert restored(model, store, [*ids[:3], *ids_of(2, 50)])[1] == 0
    assert restored(model, store, [*ids[:30], *ids_of(2, 50)])[1] == 30


def test_an_entry_longer_than_the_context_is_passed_over(model, store, filled, caplog):
    long, short = ids_of(1, 300), ids_of(1, 300)[:90]
    store.save(filled(long))
    store.save(filled([*short, 201]))
    assert restored(model, store, long[:120], context_length=128)[1] == 90
    assert len(entries(store)) == 2
    assert not warnings(caplog)


# -- written once ----------------------------------------------------------------------------------


def test_the_same_or_a_longer_timeline_is_not_written_again(store, filled):
    ids = ids_of(1, 150)
    assert store.save(filled(ids))
    [path] = entries(store)
    inode = path.stat().st_ino
    for other in (store, KvStore(store.directory)):
        assert not other.save(filled(ids))
        assert not other.save(filled(ids[:70]))
        assert not other.save(filled(ids[:3]))
    assert [p.stat().st_ino for p in entries(store)] == [inode]


def test_a_longer_timeline_that_does_not_fit_is_no_substitute(model, store, filled):
    ids = ids_of(1, 300)
    assert store.save(filled(ids))
    assert store.save(filled(ids[:100], context_length=128))
    assert restored(model, store, ids[:110], context_length=128)[1] == 100
    assert not store.save(filled(ids[:100], context_length=128))
    assert len(entries(store)) == 2


def test_a_continuation_takes_the_place_of_its_beginning(model, store, filled):
    ids = ids_of(1, 150)
    assert store.save(filled(ids[:70]))
    assert store.save(filled(ids[:80] + ids_of(9, 20)))
    assert store.save(filled(ids))
    assert sorted(len(peek(path).token_ids) for path in entries(store)) == [100, 150]
    assert restored(model, store, [*ids[:70], 5])[1] == 70


def test_an_empty_session_is_not_stored(model, store):
    with model.session() as session:
        assert not store.save(session)
    assert not entries(store)


# -- budget ----------------------------------------------------------------------------------------


def test_the_budget_evicts_what_served_longest_ago(model, tmp_path, filled):
    sample = KvStore(tmp_path / "sample")
    sample.save(filled(ids_of(0, 100)))
    n_bytes = sample.n_bytes
    store = KvStore(tmp_path / "kv", max_bytes=3 * n_bytes)
    for seed in (1, 2, 3):
        assert store.save(filled(ids_of(seed, 100)))
    assert restored(model, store, [*ids_of(1, 100), 5])[1] == 100  # 2 is the oldest now
    assert store.save(filled(ids_of(4, 100)))
    assert store.n_bytes == 3 * n_bytes
    for seed, expected in ((1, 100), (2, 0), (3, 100), (4, 100)):
        assert restored(model, store, [*ids_of(seed, 100), 5])[1] == expected, seed


def test_what_was_just_matched_or_stored_stays(model, tmp_path, filled):
    sample = KvStore(tmp_path / "sample")
    sample.save(filled(ids_of(0, 100)))
    store = KvStore(tmp_path / "kv", max_bytes=2 * sample.n_bytes + 500)
    store.save(filled(ids_of(1, 100)))
    store.save(filled(ids_of(2, 100)))
    assert restored(model, store, [*ids_of(1, 100), 5])[1] == 100
    # Its time says that it is the oldest; it was just matched all the same.
    for path in entries(store):
        if peek(path).token_ids.tolist() == ids_of(1, 100):
            os.utime(path, ns=(1, 1))
    assert store.save(filled(ids_of(3, 100)))
    assert {tuple(peek(path).token_ids) for path in entries(store)} == {
        tuple(ids_of(1, 100)),
        tuple(ids_of(3, 100)),
    }


@pytest.mark.parametrize("max_bytes", [0, 1000])
def test_an_entry_over_the_budget_is_not_stored(tmp_path, filled, caplog, max_bytes):
    big = KvStore(tmp_path / "kv")
    big.save(filled(ids_of(1, 20)))
    store = KvStore(tmp_path / "kv", max_bytes=max_bytes)
    written = []
    session = filled(ids_of(2, 200))
    session.save = lambda path: written.append(path)  # type: ignore[method-assign]
    for _ in range(3):
        assert not store.save(session)
    assert not written  # neither stored nor evicted again and again
    assert len(entries(store)) == 1
    assert len(warnings(caplog)) == 1
    assert "budget" in warnings(caplog)[0]


def test_the_estimate_is_never_below_the_file(model, store, filled):
    from pykestrel.kv_store import _file_bytes

    for kv_type in ("f32", "f16", "q8"):
        for n in (1, 15, 16, 17, 100):
            session = filled(ids_of(n, n), kv_type=kv_type)
            path = store.directory / "x"
            session.save(path)
            assert path.stat().st_size <= _file_bytes(session, n) < path.stat().st_size * 1.3 + 4096


# -- trouble ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "head", "foreign"])
def test_a_bad_entry_is_removed_with_one_warning(model, store, filled, caplog, damage):
    ids = ids_of(1, 100)
    store.save(filled(ids))
    store.save(filled([*ids[:60], 201]))
    path = next(p for p in entries(store) if len(peek(p).token_ids) == 100)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-100] ^= 4
    elif damage == "head":
        data[20] ^= 1
    elif damage == "foreign":  # a whole snapshot, of other tokens than its name says
        data = bytearray(next(p for p in entries(store) if p != path).read_bytes())
    path.write_bytes(data[: {"cut": 500, "empty": 0}.get(damage, len(data))])
    for _ in range(2):
        fresh = KvStore(store.directory)
        session, n_common = restored(model, fresh, [*ids, 5])
        assert n_common == 60  # the next best
        assert not path.exists()
        session.generate([*ids, 5], max_tokens=2)
    assert len(warnings(caplog)) == 1
    assert str(path) in warnings(caplog)[0]


def test_another_version_is_left_alone(model, store, filled, caplog):
    ids = ids_of(1, 100)
    store.save(filled(ids))
    [path] = entries(store)
    data = bytearray(path.read_bytes())
    data[8] = 9  # the version
    path.write_bytes(data)
    assert restored(model, KvStore(store.directory), [*ids, 5])[1] == 0
    assert path.exists()
    assert not warnings(caplog)


def test_another_model_has_other_names(tmp_path, store, filled):
    ids = ids_of(1, 100)
    store.save(filled(ids))
    other_path = write_checkpoint(tmp_path / "other", seed=7)
    with Model(other_path) as other:
        session, n_common = restored(other, store, [*ids, 5])
        assert n_common == 0
        session.prefill(ids)
        assert store.save(session)
    with Model(other_path, weight_type="bf16") as narrow:
        assert restored(narrow, store, [*ids, 5])[1] == 0
    assert len(entries(store)) == 2


def test_files_of_others_are_never_touched(model, store, filled):
    names = ["notes.txt", "kestrel-1-abc.kv", "x.kv.tmp-1-0", "a.kv", ".hidden"]
    for name in names:
        (store.directory / name).write_text("mine")
    link = store.directory / ("kestrel-1-" + "0" * 16 + "-f16-" + "0" * 40 + ".kv")
    link.symlink_to(store.directory / "notes.txt")
    small = KvStore(store.directory, max_bytes=60_000)
    for seed in range(4):
        small.save(filled(ids_of(seed, 100)))
    assert all((store.directory / name).read_text() == "mine" for name in names)
    assert link.is_symlink()


@pytest.mark.parametrize("kind", ["file", "under a file", "NUL"])
def test_a_directory_that_cannot_be(tmp_path, kind):
    (tmp_path / "file").write_text("")
    path = {"file": "file", "under a file": "file/kv", "NUL": "a\0b"}[kind]
    with pytest.raises((FileError, InvalidArgument)):
        KvStore(str(tmp_path / path))


def test_a_new_directory_is_private(store):
    assert store.directory.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 128 kB; skipped where it cannot be had."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_one_warning(model, filled, caplog, full_disk):
    store = KvStore(full_disk)
    ids = ids_of(1, 30)
    assert store.save(filled(ids))
    for seed in (2, 3):
        session = filled(ids_of(seed, 500))
        assert not store.save(session)
        assert session.seq_len == 500  # and it goes on
        session.generate(ids_of(seed, 500), max_tokens=3)
    assert len(warnings(caplog)) == 1
    assert "No space left" in warnings(caplog)[0]
    assert [p.name for p in full_disk.glob("*.tmp*")] == []
    assert restored(model, store, [*ids, 5])[1] == 30


def test_a_directory_that_vanished(model, store, filled, caplog):
    store.save(filled(ids_of(1, 100)))
    shutil.rmtree(store.directory)
    assert restored(model, store, [*ids_of(1, 100), 5])[1] == 0
    assert not store.save(filled(ids_of(2, 100)))
    assert len(warnings(caplog)) == 1


def test_an_entry_that_vanishes_after_the_lookup(model, store, filled, caplog, monkeypatch):
    ids = ids_of(1, 100)
    store.save(filled(ids))
    store.save(filled([*ids[:60], 201]))
    longest = KvStore._longest

    def and_remove(self, *arguments):
        best = longest(self, *arguments)
        if best is not None and len(best[0].ids) == 100:
            (self.directory / best[0].name).unlink()
        return best

    monkeypatch.setattr(KvStore, "_longest", and_remove)
    assert restored(model, store, [*ids, 5])[1] == 60
    assert not warnings(caplog)


def test_leftovers_of_dead_writers_go(store, filled):
    store.save(filled(ids_of(1, 100)))
    [path] = entries(store)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(WAIT)
    leftover = path.with_name(f"{path.name}.tmp-{dead.pid}-0")
    leftover.write_bytes(b"half")
    store.save(filled(ids_of(2, 100)))
    assert not leftover.exists()


def test_who_is_writing_is_not_disturbed(store, filled):
    """While another holds the lock shared, its unfinished file stays, and nothing is evicted."""
    store.save(filled(ids_of(1, 100)))
    [path] = entries(store)
    unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}-7")
    unfinished.write_bytes(b"half")
    os.utime(unfinished, ns=(1, 1))
    tight = KvStore(store.directory, max_bytes=store.n_bytes + 500)
    with (store.directory / "lock").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert tight.save(filled(ids_of(2, 100)))
        assert unfinished.exists()
        assert len(entries(store)) == 2
    assert tight.save(filled(ids_of(3, 100)))
    assert not unfinished.exists()
    assert [peek(p).token_ids.tolist() for p in entries(store)] == [ids_of(3, 100)]


# -- several at once -------------------------------------------------------------------------------

WORKER = """
import sys
from pathlib import Path
import numpy as np
from pykestrel import Model
from pykestrel.kv_store import KvStore

model_path, directory, max_bytes, seed, n_rounds = sys.argv[1:]
random = np.random.RandomState(int(seed))
store = KvStore(directory, max_bytes=int(max_bytes))
hits = 0
with Model(model_path, threads=1) as model:
    for _ in range(int(n_rounds)):
        with model.session(context_length=512) as session:
            base = np.random.RandomState(random.randint(4)).randint(0, 200, 200)
            ids = [int(i) for i in base[: random.randint(1, 200)]]
            n_common = store.restore(session, ids)
            assert session.token_ids[:n_common].tolist() == ids[:n_common]
            hits += n_common > 0
            warm = session.generate(ids, max_tokens=2, spec="off")
            with model.session(context_length=512) as cold:
                expected = cold.generate(ids, max_tokens=2, spec="off")
            assert warm.token_ids == expected.token_ids
            store.save(session)
print(hits)
"""


def worker(checkpoint, directory, max_bytes, seed, n_rounds):
    arguments = [checkpoint, directory, max_bytes, seed, n_rounds]
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_share_a_directory(checkpoint, tmp_path):
    directory, budget = tmp_path / "kv", 250_000
    workers = [worker(checkpoint, directory, budget, seed, 25) for seed in range(3)]
    hits = 0
    for process in workers:
        out, err = process.communicate(timeout=WAIT)
        assert process.returncode == 0, err
        assert err == ""  # no warning: nothing bad was ever seen
        hits += int(out)
    assert hits > 0
    store = KvStore(directory, max_bytes=budget)
    assert 0 < store.n_bytes <= budget
    assert not list(directory.glob("*.tmp*"))
    for path in entries(store):
        peek(path)


def test_a_killed_writer_leaves_a_usable_directory(checkpoint, model, tmp_path, filled, caplog):
    directory = tmp_path / "kv"
    random = np.random.RandomState(0)
    for seed in range(4):
        process = worker(checkpoint, directory, 10**7, seed, 10_000)
        deadline = time.monotonic() + WAIT
        while not list(directory.glob("*.kv")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=WAIT)
        assert process.returncode == -signal.SIGKILL
    store = KvStore(directory)
    assert store.save(filled(ids_of(99, 300)))
    assert not list(directory.glob("*.tmp*"))
    for path in entries(store):
        ids = peek(path).token_ids.tolist()
        assert restored(model, store, [*ids, 5])[1] == len(ids)
    assert not warnings(caplog)


def test_threads_with_stores_of_their_own(model, tmp_path):
    errors = []

    def work(seed: int) -> None:
        try:
            store = KvStore(tmp_path / "kv", max_bytes=200_000)
            for i in range(10):
                with model.session(context_length=CONTEXT) as session:
                    ids = ids_of((seed + i) % 3, 100 + i)
                    store.restore(session, ids)
                    session.generate(ids, max_tokens=2)
                    store.save(session)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not errors
