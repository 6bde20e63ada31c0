"""What the ARM inner loops can do on cores that are not here: llvm-mca over the built objects.

    cmake --preset aarch64 && cmake --build build/aarch64 && python bench/mca.py

For every tile of the dot-product kernels it takes the loop over groups out of the object file, lets
llvm-mca issue it 200 times, and prints cycles per sdot beside two limits of the core:

    of sdot   two sdot per cycle (neoverse-n1, the model nearest to a Cortex-A76): what a loop of
              nothing but sdot would reach
    of loop   the same limit less the other vector instructions the arithmetic needs: per four rows,
              a token and a group that is eight sdot, one conversion (or the subtraction in its
              place), one product of two scales and one multiply-add, so no loop can pass 8/11 =
              0.73 of the first limit

A simulation: it knows the pipelines, not the caches, and not the memory. llvm-mca and a binutils
for aarch64 are needed (Debian: llvm-19, binutils-aarch64-linux-gnu).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from harness import ROOT, write_json

ITERATIONS = 200
OBJECT = (
    ROOT / "build/aarch64/libkestrel/CMakeFiles/kestrel_objects.dir/src/kernels/neon_dotprod.c.o"
)
TILE = re.compile(r"(q4_packed|q8_packed|q4_expanded)_(\d)x(\d)$")
GROUP = 32  # columns
ROWS = 8  # of a row block


@dataclass(frozen=True)
class Core:
    """A processor that llvm-mca models, and what stands for it in a board."""

    model: str
    stands_for: str
    ghz: float
    sdot_per_cycle: float  # the issue limit of a 128-bit sdot


# The A76 issues two 128-bit sdot per cycle. The A55's vector unit is two pipes of 64 bits: one.
CORES = (Core("neoverse-n1", "Cortex-A76", 2.3, 2.0), Core("cortex-a55", "Cortex-A55", 1.8, 1.0))

# What takes a slot of the vector pipes: names a v or q register, and is no load or store.
VECTOR = re.compile(r"\b[vq]\d+\b")
MEMORY = re.compile(r"^(ld|st|prf)")


@dataclass(frozen=True)
class Result:
    """One loop on one core."""

    tile: str
    row_blocks: int
    tokens: int
    core: str
    instructions: int
    sdots: int
    other_vector: int
    loads: int
    spills: int
    cycles: float  # per group
    cycles_per_sdot: float
    of_sdot: float
    of_loop: float
    gmacs: float  # 1e9 multiply-adds per second and core

    def line(self) -> str:
        """The row as text."""
        return (
            f"{self.tile:12} {self.row_blocks}x{self.tokens}  {self.core:12}"
            f"{self.instructions:6} {self.sdots:5} {self.other_vector:6} {self.loads:6}"
            f"{self.spills:7} {self.cycles:8.1f} {self.cycles_per_sdot:9.3f}"
            f"{self.of_sdot:9.2f} {self.of_loop:8.2f} {self.gmacs:8.1f}"
        )


HEADER = (
    f"{'tile':12} BxT  {'core':12}{'instr':>6} {'sdot':>5} {'vector':>6} {'loads':>6}"
    f"{'spills':>7} {'cycles':>8} {'cyc/sdot':>9}{'of sdot':>9} {'of loop':>8} {'GMAC/s':>8}"
)


def functions(objdump: str, path: Path) -> dict[str, list[tuple[int, str]]]:
    """Name -> [(address, instruction)] of an object file."""
    text = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[tuple[int, str]]] = {}
    body: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := re.match(r"^[0-9a-f]+ <(.+)>:$", line):
            body = found.setdefault(match[1], [])
        elif match := re.match(r"^\s*([0-9a-f]+):\s+(.*)$", line):
            body.append((int(match[1], 16), match[2].split("//")[0].strip()))
    return found


def hot_loop(body: list[tuple[int, str]]) -> list[str]:
    """The instructions of the longest loop without a branch inside: the loop over groups."""
    place = {address: i for i, (address, _) in enumerate(body)}
    best: list[str] = []
    for i, (_, text) in enumerate(body):
        branch = re.match(r"^(b\.\w+|cbn?z|tbn?z)\s.*?([0-9a-f]+) <", text)
        start = place.get(int(branch[2], 16)) if branch else None
        if start is None or start > i or i - start <= len(best):
            continue
        inside = [line for _, line in body[start:i]]
        if not any(re.match(r"^(b|b\.\w+|cbn?z|tbn?z|ret|bl)\s", line) for line in inside):
            best = [*inside, re.sub(r"[0-9a-f]+ <.*>", ".Lloop", text)]
    return best


def simulate(tool: str, code: list[str], core: Core) -> float:
    """Cycles of one iteration."""
    source = ".Lloop:\n" + "\n".join(code) + "\n"
    command = [tool, "-mtriple=aarch64", f"-mcpu={core.model}", f"-iterations={ITERATIONS}"]
    result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    match = re.search(r"Total Cycles:\s+(\d+)", result.stdout)
    if result.returncode != 0 or match is None:
        raise click.ClickException(f"{tool} refused the loop: {result.stderr.strip()[:300]}")
    return int(match[1]) / ITERATIONS


def examine(name: str, code: list[str], core: Core, tool: str) -> Result:
    """One loop on one core."""
    match = TILE.match(name)
    assert match is not None
    row_blocks, tokens = int(match[2]), int(match[3])
    kinds = Counter(line.split()[0] for line in code)
    sdots = kinds["sdot"]
    vector = [line for line in code if VECTOR.search(line) and not MEMORY.match(line)]
    cycles = simulate(tool, code, core)
    other = len(vector) - sdots
    # Of the 16-byte slots that a loop must have: eight sdot and three more per four rows and token.
    needed = sdots * 11 / 8
    return Result(
        tile=match[1],
        row_blocks=row_blocks,
        tokens=tokens,
        core=core.model,
        instructions=len(code),
        sdots=sdots,
        other_vector=other,
        loads=sum(n for kind, n in kinds.items() if kind.startswith("ld")),
        spills=sum(bool(re.match(r"^(ld|st)[rp]\s.*\bq\d+.*\[sp", line)) for line in code),
        cycles=cycles,
        cycles_per_sdot=cycles / sdots,
        of_sdot=sdots / cycles / core.sdot_per_cycle,
        of_loop=needed / cycles / core.sdot_per_cycle,
        gmacs=GROUP * ROWS * row_blocks * tokens / cycles * core.ghz,
    )


def tool_named(names: list[str]) -> str:
    """The first of these programs that is here."""
    for name in names:
        if found := shutil.which(name):
            return found
    raise click.ClickException(f"none of {', '.join(names)} is installed")


@click.command()
@click.option("--object", "path", type=click.Path(path_type=Path), default=OBJECT)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(path: Path, json_path: Path | None) -> None:
    """Simulate the inner loops of the dot-product kernels."""
    if not path.exists():
        raise click.ClickException(f"{path}: not built; cmake --preset aarch64 first")
    objdump = tool_named(["aarch64-linux-gnu-objdump", "llvm-objdump"])
    mca = tool_named([*(f"llvm-mca-{n}" for n in range(30, 13, -1)), "llvm-mca"])
    version = subprocess.run([mca, "--version"], capture_output=True, text=True, check=True).stdout
    bodies = functions(objdump, path).items()
    found = {name: hot_loop(body) for name, body in bodies if TILE.match(name)}
    results: list[Result] = []
    click.echo(HEADER)
    for core in CORES:
        for name, code in sorted(found.items()):
            if "sdot" not in " ".join(code):
                raise click.ClickException(f"{path}: no loop of sdot found in {name}")
            results.append(examine(name, code, core, mca))
            click.echo(results[-1].line())
    for core in CORES:
        best = max((r for r in results if r.core == core.model), key=lambda r: r.gmacs)
        peak = core.sdot_per_cycle * 16 * core.ghz
        click.echo(
            f"\n{core.model} for a {core.stands_for} at {core.ghz} GHz: at best {best.gmacs:.1f} "
            f"GMAC/s per core of {peak:.1f} ({best.tile} {best.row_blocks}x{best.tokens})",
            nl=False,
        )
    tool = re.search(r"version [\d.]+", version)
    click.echo(f"\nllvm-mca {tool[0] if tool else ''}")
    facts: dict[str, Any] = {"object": str(path), "results": [asdict(r) for r in results]}
    write_json(json_path, facts)


if __name__ == "__main__":
    sys.exit(main())
