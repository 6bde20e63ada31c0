"""`debugkit step`: a scripted walk, and one by typed commands."""

from __future__ import annotations

import pytest

from debugkit.step import ScriptError, parse_command


def test_commands_and_their_beginnings() -> None:
    assert parse_command("t") == "token"
    assert parse_command(" Layer ") == "layer"
    for word in ("", "x", "tokens"):
        with pytest.raises(ScriptError):
            parse_command(word)


@pytest.mark.gdb
def test_a_scripted_walk(debugkit, kestrel_run, request_of) -> None:
    command = [str(kestrel_run), *request_of("--max-tokens", "4", "--spec", "off")]
    done = debugkit("step", "--script", "layer layer finish token layer token", "--", *command)
    assert done.returncode == 0, done.stderr
    panels = [part.splitlines() for part in done.stdout.split("\n── ")[1:]]
    titles = [panel[0] for panel in panels[:7]]
    assert titles == [
        "prefill, before the pass",
        "prefill, after layer 0",
        "prefill, after layer 1",
        "prefill, after the pass",
        "decode 1, before the pass",
        "decode 1, after layer 0",
        "decode 2, before the pass",
    ]
    layer_0 = panels[1]
    assert "  seq_len   0    phase PREFILL" in layer_0
    (filled,) = [line for line in layer_0 if line.startswith("  cache_len")]
    assert filled.split()[-3:] == ["18", "layer", "0"]
    assert "░" not in filled
    assert "█" not in layer_0[layer_0.index(filled) + 1]
    assert any(line.startswith("  seq_len   18    phase IDLE") for line in panels[3])
    logits = next(line for line in panels[3] if line.startswith("  logits"))
    sampled = next(line for line in panels[4] if line.startswith("  sampled"))
    assert logits.split()[1] == sampled.split()[1]  # greedy: the best is sampled
    assert "request 1 ends: 1 prefill + 3 decodes, max_tokens reached: 4 of max 4" in done.stdout


@pytest.mark.gdb
def test_typed_commands_and_quitting(debugkit, mock) -> None:
    done = debugkit("step", "--", mock.run(), stdin="what\nhelp\n\nq\n")
    assert done.returncode == 0, done.stderr
    assert "There is no command 'what'" in done.stdout
    assert "to the end of the request" in done.stdout
    assert "── decode 1, before the pass" in done.stdout
    assert "decode 2" not in done.stdout
    assert "The program was ended." in done.stdout
    done = debugkit("step", "--script", "token jump", "--", mock.run())
    assert done.returncode == 2
    assert "There is no command 'jump'" in done.stderr
