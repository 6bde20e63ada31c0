"""The gdb script inside a real gdb, on a real library: what it shows is what the library says.

A small C program, compiled here, runs a completion on a random checkpoint; the same tokens through
pykestrel give the figures that gdb has to show.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from debugkit.gdbside.launch import SCRIPT
from pykestrel import Model, _loader
from tests.golden.checkpoints import write

WAIT = 120.0
CASE = "qwen3-tied-bf16"  # 2 layers, 4 heads on 2, head_dim 32
IDS = (
    3,
    1,
    4,
    1,
    5,
    9,
    2,
    6,
    53,
    58,
    97,
    93,
    238,
    46,
    26,
    43,
    38,
    32,
    79,
)  # more than one key tile
HEADER = Path(__file__).resolve().parents[2] / "libkestrel" / "include"
MARK = "-- "

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include "kestrel.h"

static int32_t on_token(void *user, const kestrel_token *token)
{
    (void)user;
    printf("token %d\\n", (int)token->token_id);
    return 0;
}

int main(int argc, char **argv)
{
    int32_t ids[64], n = 0;
    while (n + 3 < argc) {
        ids[n] = atoi(argv[n + 3]);
        n++;
    }
    kestrel_error error = {0};
    kestrel_model *model;
    kestrel_session *session;
    kestrel_model_options how = {.struct_size = sizeof how, .n_threads = 2};
    kestrel_session_options options = {
        .struct_size = sizeof options, .context_length = 100, .kv_type = atoi(argv[2])};
    kestrel_request request = {
        .struct_size = sizeof request, .prompt_ids = ids, .n_prompt = n, .max_tokens = 4};
    if (kestrel_model_open(argv[1], &how, &model, &error) != KESTREL_OK ||
        kestrel_session_open(model, &options, &session, &error) != KESTREL_OK ||
        kestrel_run_completion(session, &request, on_token, NULL, NULL, &error) != KESTREL_OK) {
        fprintf(stderr, "%s\\n", error.message);
        return 1;
    }
    kestrel_session_close(session);
    kestrel_model_close(model);
    return 0;
}
"""
KV_TYPES = {"f32": 1, "f16": 2, "q8": 3}


@dataclass(frozen=True)
class Program:
    """The driver and its arguments for each kind of cache."""

    path: Path
    folder: Path

    def command(self, kv: str = "f16") -> list[str]:
        return [str(self.path), str(self.folder), str(KV_TYPES[kv]), *map(str, IDS)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    root = tmp_path_factory.mktemp("gdbside")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        if "cc" in os.environ.get("KESTREL_REQUIRE", "").split(","):
            pytest.fail("KESTREL_REQUIRE names cc, but there is no C compiler")
        pytest.skip("there is no C compiler")
    library = _loader.load().path.resolve()
    (root / "driver.c").write_text(DRIVER)
    command = [compiler, "-O0", "-g", "-Wall", "-Werror", f"-I{HEADER}", "driver.c", "-o", "driver"]
    command += [str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run(command, cwd=root, check=True, timeout=WAIT)
    return Program(root / "driver", write(CASE, root))


@dataclass(frozen=True)
class Expected:
    """What the library says after the prompt: before the first decode."""

    logits: Any  # [n_vocab]
    keys: Any  # [n, n_kv_heads, head_dim] of layer 1
    values: Any
    next_id: int


@pytest.fixture(scope="module")
def expect(program: Program) -> Callable[[str], Expected]:
    def expect(kv: str) -> Expected:
        with (
            Model(program.folder, threads=2) as model,
            model.session(context_length=100, kv_type=kv) as session,
        ):
            session.prefill(IDS)
            return Expected(session.logits, *session.kv_rows(1), session.sample())

    return expect


Gdb = Callable[..., dict[str, list[str]]]


@pytest.fixture
def gdb(debugkit: Any, program: Program, tmp_path: Path) -> Gdb:
    """Runs gdb commands in `debugkit gdb`: the output of each, by the command. An error does not
    end the run: its text is the output."""

    def gdb(
        commands: Sequence[str], command: Sequence[str] | None = None, kv: str = "f16"
    ) -> dict[str, list[str]]:
        lines = ["python", "def attempt(command):", f"    print('\\n{MARK}' + command)"]
        lines += ["    try:", "        gdb.execute(command)", "    except gdb.error as error:"]
        lines += ["        print(error)", "end"]
        lines += [f"python attempt({one!r})" for one in commands]
        script = tmp_path / "commands.gdb"
        script.write_text("\n".join([*lines, ""]))
        program_line = command if command is not None else program.command(kv)
        done = debugkit("gdb", "--batch-commands", str(script), "--", *program_line)
        assert done.returncode == 0, done.stdout + done.stderr
        first, *parts = done.stdout.split(f"\n{MARK}")
        outputs = {"": first.splitlines()}
        for part in parts:
            name, *output = part.splitlines()
            outputs[name] = [line for line in output if line.strip()]
        assert set(outputs) == {"", *commands}
        return outputs

    return gdb


pytestmark = pytest.mark.gdb


def test_both_doors_stop_and_show_the_session(gdb: Gdb) -> None:
    said = gdb(
        ["run", "kestrel token", "kestrel logits", "continue", "kestrel token ", "info args"]
    )
    assert "breakpoint on kestrel_prefill" in said[""]
    assert "breakpoint on kestrel_decode" in said[""]
    prefill = "\n".join(said["run"])
    assert re.search(r"Breakpoint 1, kestrel_prefill \(session=.*, n_tokens=19", prefill)
    assert "  seq_len    0 of 100 tokens\n  cache_len  0 in every layer\n" in prefill
    assert "  request    n_prompt 19, n_cached 0\n  kv cache   f16, " in prefill
    assert said["kestrel token"] == [
        "the timeline is empty",
        f"kestrel_prefill is computing 19 tokens: {' '.join(map(str, IDS[:12]))} ...",
    ]
    assert said["kestrel logits"][0].startswith("There are no logits: nothing was computed yet")
    decode = "\n".join(said["continue"])
    token = re.search(r"Breakpoint 2, kestrel_decode \(session=.*, token_id=.*?(\d+)", decode)
    assert token is not None
    assert "  seq_len    19 of 100 tokens\n  cache_len  19 in every layer\n" in decode
    assert said["kestrel token "] == [
        f"last token {IDS[-1]}, position 18",
        f"  positions 7-18: {' '.join(map(str, IDS[7:]))}",
        f"kestrel_decode is computing token {token[1]}",
    ]


def test_logits_are_the_librarys(gdb: Gdb, expect: Callable[[str], Expected]) -> None:
    said = gdb(
        ["run", "continue", "kestrel logits", "kestrel logits 3+4", "finish", "kestrel token"]
    )
    logits = expect("f16").logits
    best = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    shares = np.exp(logits.astype(float) - logits.max())
    shares /= shares.sum()
    for command, n in (("kestrel logits", 5), ("kestrel logits 3+4", 7)):
        rows = [line.split() for line in said[command]]
        assert [int(token) for token, _, _ in rows] == best[:n]
        assert [float(x) for _, x, _ in rows] == pytest.approx(logits[best[:n]], abs=1e-6)
        assert [float(p.rstrip("%")) for _, _, p in rows] == pytest.approx(
            100 * shares[best[:n]], abs=0.006
        )
    best_line = next(line for line in said["continue"] if "logits" in line)
    assert best_line.startswith(f"  logits     best next token {best[0]} (")
    # greedy: the token that the decode has just stored
    assert said["kestrel token"][0] == f"last token {best[0]}, position 19"


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
def test_rows_of_the_cache_are_the_librarys(
    gdb: Gdb, expect: Callable[[str], Expected], kv: str
) -> None:
    """Position 18 lies in the second key tile, head 1 behind head 0."""
    places = [(0, 0), (5, 1), (15, 0), (16, 1), (18, 1)]
    commands = [f"kestrel kv 1 {position} {head}" for position, head in places]
    said = gdb(["run", "continue", *commands, "kestrel kv 1 17", "kestrel kv 1"], kv=kv)
    expected = expect(kv)
    for command, (position, head) in zip(commands, places, strict=True):
        title, key, value = said[command]
        assert title == f"layer 1: 19 rows of 2 heads, {kv}"
        for line, rows in ((key, expected.keys), (value, expected.values)):
            row = rows[position, head]
            length, *numbers = re.findall(r"-?\d+\.\d+", line)
            assert [float(x) for x in numbers] == pytest.approx(row.tolist(), abs=6e-6)
            assert float(length) == pytest.approx(float(np.linalg.norm(row)), abs=6e-5)
    both = said["kestrel kv 1 17"]
    assert [line.split()[:3] for line in both[1:]] == [
        ["head", "0", "key"],
        ["head", "0", "value"],
        ["head", "1", "key"],
        ["head", "1", "value"],
    ]
    overview = said["kestrel kv 1"]
    assert [int(line.split()[0]) for line in overview[2:]] == list(range(7, 19))
    lengths = [float(x) for x in overview[-1].split()[1:]]
    rows = [expected.keys[18, 0], expected.values[18, 0], expected.keys[18, 1]]
    rows.append(expected.values[18, 1])
    assert lengths == pytest.approx([float(np.linalg.norm(row)) for row in rows], abs=6e-5)


def test_a_pass_under_way(gdb: Gdb) -> None:
    """Inside a decode's first layer that layer has a row more than the other."""
    said = gdb(["run", "continue", "break ks_attention", "continue ", "kestrel session"])
    assert said["kestrel session"][0].endswith(": PHASE_DECODE")
    assert said["kestrel session"][2] == "  cache_len  20 in layer 0, 19 in layer 1"
    assert said["kestrel session"][1] == "  seq_len    19 of 100 tokens"


def test_a_worker_shows_the_session_it_works_for(gdb: Gdb) -> None:
    said = gdb(["run", "continue", "kestrel session", "thread 2", "kestrel session ", "thread"])
    assert said["kestrel session "] == said["kestrel session"]
    assert "2 (Thread" in said["thread"][0]  # and leaves the selection alone


def test_the_model(gdb: Gdb, program: Program) -> None:
    said = gdb(["run", "kestrel model"])
    with Model(program.folder) as model:
        info = model.info
    text = "\n".join(said["kestrel model"])
    assert "qwen3, 2 layers, hidden 64, 4/2 heads x 32, vocabulary 320" in text
    assert "weights   bf16 as stored" in text
    assert "tied to the embedding" in text
    assert f"kernels   {info.isa}" in text
    assert "threads   2 for a decode, 2 for a prefill" in text


def test_structs_print_readably(gdb: Gdb) -> None:
    expressions = {
        "p *session": r"kestrel_session\(PHASE_IDLE, seq_len 19 of 100, "
        r"cache_len 19 in every layer\) = \{",
        "p session->kv": r"ks_kv_cache\(f16, 2 layers x 2 heads x 512 positions x 32, \d+ bytes",
        "p session->kv.layer[1].head[0]": r"ks_kv_head\(f16, keys \[tile\]\[32\]\[16\]\)",
        "p session->model->layers[1].gate.w": r"ks_matrix\(bf16 \[96\]\[64\]\)",
        "p session->scratch.act": r"ks_activations\(",
        "p *session->model": r"kestrel_model\(qwen3, 2 layers",
        "p *(ks_matrix *)0": "not readable|Cannot access memory",
        "p/x session->seq_len": "0x13",
    }
    said = gdb(["run", "continue", *expressions])
    for expression, pattern in expressions.items():
        assert re.search(pattern, "\n".join(said[expression])), said[expression]
    assert "  cache_len = {19, 19}," in said["p *session"]


def test_each_mistake_is_one_sentence(gdb: Gdb) -> None:
    mistakes = {
        "kestrel session nonsense": 'No symbol "nonsense" in current context.',
        "kestrel session 1": "1 is no kestrel_session but a int.",
        "kestrel kv": "usage: kestrel kv LAYER POS HEAD",
        "kestrel kv 2": "There is no layer 2: layers 0 to 1.",
        "kestrel kv -1": "There is no layer -1: layers 0 to 1.",
        "kestrel kv 0 19": "Position 19 is not in the cache of layer 0.",
        "kestrel kv 0 0 2": "There is no head 2: heads 0 to 1.",
        "kestrel kv 0 0 0 0": "usage: kestrel kv LAYER POS HEAD",
        "kestrel kv x": 'usage: kestrel kv LAYER POS HEAD (No symbol "x" in current context.)',
        "kestrel logits 0": "usage: kestrel logits N, N from 1 to 320",
        "kestrel logits 321": "usage: kestrel logits N, N from 1 to 320",
        "kestrel doors now": "usage: kestrel doors",
        "kestrel foo": "There is no kestrel foo; see: help kestrel",
    }
    before = ["kestrel token", "kestrel session"]
    said = gdb([*before, "run", "continue", *mistakes])
    for command, sentence in mistakes.items():
        assert said[command] == [sentence]
    for command in before:
        assert said[command] == ["The program is not running."]


def test_outside_the_library(gdb: Gdb) -> None:
    said = gdb(["break main", "run", "kestrel session"])
    assert said["kestrel session"][0].startswith("Neither this frame nor a caller has a session.")
    other = gdb(["break getpid", "run", "kestrel model"], ["sh", "-c", "exit 0"])
    assert other["kestrel model"] == [
        "libkestrel is not loaded yet, or was built without debug information."
    ]


def test_a_closed_session_is_no_crash(gdb: Gdb) -> None:
    said = gdb(
        ["run", "set $s = *session", "delete", "p session->cache_len = 0", "kestrel session"]
    )
    assert said["kestrel session"][-1].startswith("There is nothing to read at 0x0")


def test_help_names_every_subcommand(gdb: Gdb) -> None:
    said = gdb(["help kestrel", "help kestrel kv", "kestrel"])
    for name in ("session", "token", "logits", "kv", "model", "doors"):
        assert any(f"kestrel {name} -- " in line for line in said["help kestrel"])
    assert said["kestrel"] == said["help kestrel"]


def test_arguments_reach_the_program_as_they_are(debugkit: Any, tmp_path: Path) -> None:
    script = tmp_path / "run.gdb"
    script.write_text("run\n")
    words = ["a b", "", 'c"d', "e'f", "$HOME", "*", "\\", "ü"]
    line = ["gdb", "--batch-commands", str(script), "--", "printf", "<%s>\\n", *words]
    done = debugkit(*line)
    assert [one for one in done.stdout.splitlines() if one.startswith("<")] == [
        f"<{word}>" for word in words
    ]


def test_what_cannot_start_is_one_sentence(debugkit: Any) -> None:
    missing = debugkit("gdb", "--", "./nothing-here")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert missing.stderr == "debugkit: There is no program ./nothing-here.\n"
    no_gdb = debugkit("gdb", "--gdb", "no-such-gdb", "--", "true")
    assert no_gdb.returncode == 3
    assert "gdb is not installed" in no_gdb.stderr


def test_gdb_loads_the_script_that_lies_beside_the_library(tmp_path: Path) -> None:
    library = tmp_path / "libkestrel.so.0.1.0"
    shutil.copy(_loader.load().path.resolve(), library)
    (tmp_path / "libkestrel.so").symlink_to(library.name)
    shutil.copy(SCRIPT, tmp_path / f"{library.name}-gdb.py")
    gdb = shutil.which("gdb")
    assert gdb is not None
    done = subprocess.run(
        [
            *(gdb, "--nx", "-q", "--batch"),
            *("-iex", f"add-auto-load-safe-path {tmp_path}"),
            *("-ex", "help kestrel", "-ex", "info pretty-printer global kestrel"),
            *("-ex", "info pretty-printer .*libkestrel.* kestrel"),
            str(tmp_path / "libkestrel.so"),
        ],
        capture_output=True,
        text=True,
        timeout=WAIT,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert "kestrel session [EXPRESSION]" in done.stdout, done.stderr
    assert "ks_matrix" in done.stdout
    assert "declined" not in done.stdout + done.stderr


class Terminal:
    """A process on a terminal of its own, read until something is seen."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.master = master
        self.seen = ""

    def until(self, text: str) -> str:
        """What was printed up to and with `text`, since the last call."""
        end = time.monotonic() + WAIT
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"waited in vain for {text!r}; there was {self.seen!r}"
            self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        head, _, self.seen = self.seen.partition(text)
        return head + text

    def type(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())


@pytest.fixture
def terminal(debugkit: Any, program: Program, tmp_path: Path) -> Iterator[Terminal]:
    """`debugkit gdb -- driver` at a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        debugkit.arguments("gdb", "--", *program.command()),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        cwd=tmp_path,
        env=debugkit.environment(HOME=str(tmp_path), TERM="dumb", INPUTRC="/dev/null"),
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_an_interactive_gdb(terminal: Terminal) -> None:
    terminal.until("(gdb) ")
    terminal.type("run")
    assert "PHASE_IDLE" in terminal.until("  logits     none")
    terminal.until("(gdb) ")
    terminal.type("kestrel token")
    terminal.until("kestrel_prefill is computing 19 tokens")
    terminal.until("(gdb) ")
    terminal.type("delete")
    terminal.until("(y or n) ")
    terminal.type("y")
    terminal.until("(gdb) ")
    terminal.type("continue")
    assert "token " in terminal.until("exited normally")
    terminal.until("(gdb) ")
    terminal.type("quit")
    assert terminal.process.wait(WAIT) == 0
