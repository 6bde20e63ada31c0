"""Estimates for a board with an RK3588, from bytes, multiply-adds and two limits. No measurement.

    python bench/mca.py --json build/mca.json && python bench/board.py --mca build/mca.json

Decode: the bytes that one token reads (packed weights and cached rows) over the memory's read
bandwidth. Prefill: the multiply-adds of the matrix products over the rate of four Cortex-A76, taken
from bench/mca.py, and those of attention over what their float32 units can issue, both multiplied
by what this library reaches of such rates when caches and memory take part (--efficiency).

Speculation and batches: a pass over k+1 rows waits for the same bytes and computes k+1 times as
much, so it costs max(memory, (k+1) compute) / max(memory, compute).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

Q4, Q8 = 144 / 256, 272 / 256  # bytes per weight, scales included
CORES = 4
FLOAT_RATE = 2.3 * 8  # GMAC/s of one core: two fmla of four float32 a cycle


@dataclass(frozen=True)
class Text:
    """The text model of a released checkpoint: sizes as in its config.json."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int  # per expert, where there are experts
    experts: int = 0
    used: int = 1  # experts per token
    head_dim: int = 128
    vocab: int = 151936

    @property
    def layer_weights(self) -> int:
        """Weights of all layers that one token is multiplied with."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + self.used * 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        """Weights of the output matrix."""
        return self.vocab * self.hidden

    @property
    def row_bytes(self) -> int:
        """Bytes that one cached token takes, f16."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2

    def attention_macs(self, n_tokens: int) -> float:
        """Multiply-adds of a prompt's attention: every token with itself and all before it."""
        pairs = n_tokens * (n_tokens + 1) / 2
        return self.layers * self.heads * self.head_dim * 2 * pairs

    def decode_bytes(self, depth: int) -> float:
        """Bytes that one token reads: q4 layers, q8 output matrix, float32 router, cached rows."""
        router = self.layers * self.experts * self.hidden * 4
        return self.layer_weights * Q4 + self.head_weights * Q8 + router + depth * self.row_bytes

    def prompt_bytes(self, n_tokens: int) -> float:
        """Bytes that a short prompt reads: every weight once, of the experts those that it hits."""
        if not self.experts:
            return self.decode_bytes(0)
        of_token = self.layers * self.used * 3 * self.hidden * self.inner * Q4
        hit = self.experts * (1 - (1 - self.used / self.experts) ** n_tokens)
        return self.decode_bytes(0) + of_token * (hit / self.used - 1)


MODELS = (
    Text("Qwen3-VL-2B", 2048, 28, 16, 8, 6144),
    Text("Qwen3-VL-8B", 4096, 36, 32, 8, 12288),
    Text("Qwen3-30B-A3B", 2048, 48, 32, 4, 768, experts=128, used=8),
)


def mca_rate(path: Path, tile: str, tokens: int) -> float:
    """GMAC/s of one Cortex-A76 in the tiles of a type, from bench/mca.py."""
    rows = json.loads(path.read_text())["results"]
    return float(
        max(
            row["gmacs"]
            for row in rows
            if row["core"] == "neoverse-n1" and row["tile"] == tile and row["tokens"] >= tokens
        )
    )


@click.command()
@click.option("--mca", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--bandwidth", default=20.0, show_default=True, help="GB/s that four cores read.")
@click.option("--efficiency", default=0.7, show_default=True, help="Of what cores can issue.")
def main(mca: Path, bandwidth: float, efficiency: float) -> None:
    """Print the estimates as Markdown."""
    prefill_rate = CORES * mca_rate(mca, "q4_expanded", 1) * efficiency
    attention_rate = CORES * FLOAT_RATE * efficiency
    few_rate = CORES * mca_rate(mca, "q4_packed", 1) * efficiency
    click.echo(
        f"Assumed: {bandwidth:.0f} GB/s; on four Cortex-A76 prefill {prefill_rate:.0f} GMAC/s, a "
        f"few rows {few_rate:.0f} GMAC/s, attention {attention_rate:.0f} GMAC/s.\n"
    )
    click.echo("| model | MB per token | decode | at depth 2,048 | 18 tokens | 2,044 tokens |")
    click.echo("|---|---|---|---|---|---|")
    for model in MODELS:
        token, deep = (model.decode_bytes(n) / bandwidth * 1e-6 for n in (0, 2048))
        per_token = model.layer_weights / prefill_rate * 1e-9
        long = 2044 * per_token + model.attention_macs(2044) / attention_rate * 1e-9
        short = max(18 * per_token, model.prompt_bytes(18) / bandwidth * 1e-9)
        click.echo(
            f"| {model.name} | {model.decode_bytes(0) / 1e6:,.0f} | {token:.0f} ms | {deep:.0f} ms "
            f"| {short:.2f} s | {long:.0f} s |"
        )
    click.echo("\n| model | " + " | ".join(f"c({k})" for k in range(1, 9)) + " |")
    click.echo("|---" * 9 + "|")
    for model in MODELS[:2]:
        memory = model.decode_bytes(256) / bandwidth * 1e-9
        compute = (model.layer_weights + model.head_weights) / few_rate * 1e-9
        costs = (max(memory, (k + 1) * compute) / max(memory, compute) for k in range(1, 9))
        click.echo(f"| {model.name} | " + " | ".join(f"{cost:.2f}" for cost in costs) + " |")


if __name__ == "__main__":
    main()
