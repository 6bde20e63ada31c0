"""`debugkit trace` on the mock library under a real gdb: everything that should go well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from debugkit.records import Completion, Counted, Exit, Frame, Hit, Meta, comparable, read

pytestmark = pytest.mark.gdb

LIBRARY_FRAMES = ["decode_loop", "run_completion", "kestrel_run_completion"]


def hits(path: Path, kind: str) -> list[Hit]:
    return [r for r in read(path) if isinstance(r, Hit) and r.type == kind]


def functions(hit: Hit) -> list[str]:
    return [item.func for item in hit.stack if isinstance(item, Frame)]


@pytest.mark.parametrize("build", ["debug", "release"])
@pytest.mark.parametrize("host", ["native", "python"])
def test_one_prefill_and_its_decodes(debugkit, mock, tmp_path, build, host) -> None:
    command = [mock.run(build)] if host == "native" else mock.host(build)
    path = tmp_path / "trace.jsonl"
    done = debugkit("trace", "--json", str(path), "--", *command)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (prefill,) = hits(path, "prefill")
    assert prefill.args == {"n_tokens": 18}
    assert (prefill.state.seq_len, prefill.state.cache_len) == (0, (0, 0, 0, 0))
    assert functions(prefill)[:3] == ["kestrel_prefill", *LIBRARY_FRAMES[1:]]
    decodes = hits(path, "decode")
    assert [hit.args["token_id"] for hit in decodes] == list(range(218, 226))
    for n, hit in enumerate(decodes):
        assert hit.state.seq_len == 18 + n
        assert hit.state.cache_len == (18 + n,) * 4
        assert functions(hit)[:4] == ["kestrel_decode", *LIBRARY_FRAMES]
    assert all(frame.line > 0 for frame in prefill.stack if isinstance(frame, Frame))
    lines = done.stdout.splitlines()
    assert lines[-1] == "1 prefill + 8 decodes, EOS after 9 of max 32"
    assert "│ generated 9" in lines
    assert "│ decodes 8" in lines
    folded = [line for line in lines if "frames of Python and libffi" in line]
    assert len(folded) == (2 if host == "python" else 0)


def test_the_records_describe_the_run(debugkit, mock, tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    debugkit("trace", "--json", str(path), "--", mock.run())
    records = read(path)
    meta = records[0]
    assert isinstance(meta, Meta)
    assert meta.lib == mock.library()
    assert meta.build.startswith("kestrel 0.1.0, mock")
    assert meta.command == (mock.run(),)
    assert meta.arch == os.uname().machine
    assert records[-1] == Exit(records[-1].ts, "exited", code=0)
    (completion,) = [record for record in records if isinstance(record, Completion)]
    assert (completion.finish, completion.n_generated, completion.max_tokens) == ("stop", 9, 32)
    assert (completion.n_prompt, completion.n_cached) == (18, 0)
    assert (completion.n_prefills, completion.n_decodes) == (1, 8)


def test_two_runs_give_the_same_records(debugkit, mock, tmp_path) -> None:
    for name in ("one", "two"):
        assert debugkit("trace", "--json", name, "--", *mock.host("release")).returncode == 0
    first, second = (comparable(read(tmp_path / name)) for name in ("one", "two"))
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "summary"),
    [
        (("plain", "18", "32", "1"), "1 prefill + 0 decodes, EOS after 1 of max 32"),
        (("plain", "18", "5", "0"), "1 prefill + 4 decodes, max_tokens reached: 5 of max 5"),
        (("plain", "1", "2", "2"), "1 prefill + 1 decode, EOS after 2 of max 2"),
    ],
)
def test_why_it_ended(debugkit, mock, arguments, summary) -> None:
    done = debugkit("trace", "--", mock.run(), *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == summary


@pytest.mark.parametrize("shown", [0, 1, 3, 8, 100])
def test_decodes_beyond_the_limit_are_counted(debugkit, mock, tmp_path, shown) -> None:
    path = tmp_path / "trace.jsonl"
    done = debugkit("trace", "--max-decodes", str(shown), "--json", str(path), "--", mock.run())
    assert done.stdout.splitlines()[-1] == "1 prefill + 8 decodes, EOS after 9 of max 32"
    assert len(hits(path, "decode")) == min(shown, 8)
    hidden = [record.n for record in read(path) if isinstance(record, Counted)]
    assert hidden == ([8 - shown] if shown < 8 else [])


@pytest.mark.parametrize("limit", [(), ("--max-decodes", "2")])
def test_two_requests_in_one_process(debugkit, mock, tmp_path, limit) -> None:
    path = tmp_path / "trace.jsonl"
    done = debugkit("trace", *limit, "--json", str(path), "--", mock.run(), "twice")
    assert done.stdout.splitlines()[-3:] == [
        "request 1: 1 prefill + 8 decodes, EOS after 9 of max 32",
        "request 2: 1 prefill + 6 decodes, EOS after 7 of max 32",
        "in all: 2 prefills + 14 decodes",
    ]
    first, second = hits(path, "prefill")
    assert (first.req, second.req) == (1, 2)
    assert first.state.addr == second.state.addr
    # the second prompt has 38 tokens, of which 26 are in the cache
    assert second.args == {"n_tokens": 12}
    assert second.state.seq_len == 26
    decodes = hits(path, "decode")
    assert len(decodes) == (4 if limit else 14)
    assert [hit.req for hit in decodes] == sorted(hit.req for hit in decodes)


def test_layers_that_differ_are_seen(debugkit, mock, tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    done = debugkit("trace", "--json", str(path), "--", mock.run(), "ragged")
    assert done.returncode == 0
    assert "layers DIFFER: cache_len = 19 19 19 1" in done.stdout
    assert not hits(path, "decode")[1].state.layers_agree


def test_a_null_session_is_reported_and_survived(debugkit, mock) -> None:
    done = debugkit("trace", "--", mock.run(), "null")
    assert "PF-HIT      n_tokens=5  session 0x0: session is NULL" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("2 prefills + 8 decodes")
    assert done.returncode == 0


def test_tracing_changes_nothing_of_the_environment(debugkit, mock, tmp_path) -> None:
    env = debugkit.environment(SHELL="/bin/odd shell", COLUMNS="77")
    env.pop("LINES", None)
    command = [mock.run(), "environ"]
    plain = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    traced = subprocess.run(
        debugkit.arguments("trace", "--keep-output", str(tmp_path / "out"), "--", *command),
        env=env,
        capture_output=True,
        check=True,
    )
    assert traced.returncode == 0
    seen = (tmp_path / "out" / "stdout").read_text()
    ignored = ("_=", "OLDPWD=", "PWD=")  # the shell between gdb and the program sets these
    kept = [
        sorted(v for v in text.splitlines() if not v.startswith(ignored))
        for text in (seen, plain.stdout)
    ]
    assert kept[0] == kept[1]


def test_the_program_reads_our_standard_input(debugkit, mock) -> None:
    done = debugkit("trace", "--", mock.run(), "stdin", stdin="one\ntwo\n")
    assert "│ read one\n│ read two\n│ generated 9\n" in done.stdout


def test_arguments_arrive_as_they_were_typed(debugkit, tmp_path) -> None:
    odd = [
        "a b",
        "it's",
        '"q"',
        "$HOME",
        "*",
        "new\nline",
        "",
        "back\\slash",
        "-h",
        "ü",
        ">x",
        "2>&1",
    ]
    program = "import sys, json; print(json.dumps(sys.argv[1:]))"
    done = debugkit(
        "trace", "--keep-output", str(tmp_path), "--", sys.executable, "-c", program, *odd
    )
    assert "never loaded libkestrel" in done.stderr
    assert json.loads((tmp_path / "stdout").read_text()) == odd


def test_a_console_script_is_traced_through_its_interpreter(debugkit, mock, tmp_path) -> None:
    _, host, library = mock.host()
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n" + Path(host).read_text())
    tool.chmod(0o755)
    done = debugkit("trace", "--max-decodes", "1", "--", str(tool), library)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 prefill + 8 decodes, EOS after 9 of max 32"


def test_a_shell_that_becomes_the_program_is_followed(debugkit, mock) -> None:
    done = debugkit("trace", "--max-decodes", "0", "--", "sh", "-c", 'exec "$0"', mock.run())
    assert done.stdout.splitlines()[-1] == "1 prefill + 8 decodes, EOS after 9 of max 32"


def test_a_handled_signal_is_none_of_our_business(debugkit, mock) -> None:
    done = debugkit("trace", "--max-decodes", "0", "--", mock.run(), "usr1")
    assert done.returncode == 0, done.stderr
    assert "│ signals 1" in done.stdout


def test_doctor_finds_everything(debugkit, mock) -> None:
    done = debugkit("doctor", "--library", mock.library())
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", "gdb"],
        ["ok", "ptrace"],
        ["ok", "yama"],
        ["ok", "symbols"],
    ]


def test_doctor_finds_what_is_amiss(debugkit, mock, tmp_path) -> None:
    done = debugkit("doctor", "--library", mock.library("stripped"))
    assert done.returncode == 3
    assert "has no debug information" in done.stdout
    done = debugkit("doctor", "--library", mock.run())
    assert "not libkestrel" in done.stdout
    done = debugkit("doctor", "--library", str(tmp_path / "none.so"))
    assert "not an ELF file or does not exist" in done.stdout
    done = debugkit("doctor", "--gdb", "no-such-gdb")
    assert done.returncode == 3
    assert done.stdout.startswith("FAIL  gdb")
