"""Check a saved embedded model against every case and print a table. Owns: is it good enough?

    python -m pykestrel.embedded.train.evaluate DIR [--weights bf16|q8|q4] [--answers FILE]

The greedy answer is the expected one exactly if, with the expected answer fed in, each of its
tokens and the end of turn is the likeliest next token; so one pass per case decides it. The margin
of a case is the smallest gap between the probabilities of the first and the second candidate.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from . import cases
from .model import Qwen3, Shape, rounded
from .train import Encoder, padded

STABLE = 0.30  # a pinned case needs this margin in bf16 and must be right in q8 and q4


@dataclass(frozen=True)
class Verdict:
    """Whether the case is answered right, its margin, and a number of its answer's tokens."""

    case: cases.Case
    right: bool
    margin: float
    tokens: int


def load(directory: Path, precision: str) -> Qwen3:
    """The saved network in float32, its matrices rounded as the given type would store them."""
    config = json.loads((directory / "config.json").read_text())
    net = Qwen3(Shape.from_config(config))
    tensors = load_file(directory / "model.safetensors")
    net.load_state_dict(
        {
            name: rounded(t.float(), precision) if t.dim() == 2 else t.float()
            for name, t in tensors.items()
        }
    )
    return net.eval()


def encode(encoder: Encoder, case: cases.Case) -> tuple[list[int], list[bool]]:
    """Ids of the prompt as the chat template renders it, with the answer; the answer is marked."""
    prompt: list[int] = []
    for role, content in case.messages:
        body = encoder.text(f"{role}\n{content}")
        prompt += [encoder.start, *body, encoder.end, *encoder.newline]
    prompt += [encoder.start, *encoder.text("assistant\n")]
    answer = [*encoder.text(case.answer), encoder.end]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


@torch.no_grad()
def judge(net: Qwen3, encoder: Encoder, items: list[cases.Case], batch: int = 16) -> list[Verdict]:
    """A verdict for each case."""
    rows = sorted(((c, encode(encoder, c)) for c in items), key=lambda row: len(row[1][0]))
    out: list[Verdict] = []
    for i in range(0, len(rows), batch):
        group = rows[i : i + batch]
        ids, targets = padded([row for _, row in group], encoder.pad)
        wanted = targets >= 0
        best = net(ids, wanted).softmax(-1).topk(2)
        start = 0
        for j, (c, _) in enumerate(group):
            n = int(wanted[j].sum())
            span = slice(start, start + n)
            start += n
            right = bool((best.indices[span, 0] == targets[j][wanted[j]]).all())
            gap = float((best.values[span, 0] - best.values[span, 1]).min())
            out.append(Verdict(c, right, gap if right else -gap, n))
    return out


def table(verdicts: list[Verdict]) -> None:
    """Print one line per group: cases, share that is right, smallest and typical margin."""
    print(f"{'group':30} {'cases':>6} {'right':>7} {'margin min':>11} {'median':>7}")
    groups: dict[str, list[Verdict]] = {}
    for v in verdicts:
        groups.setdefault(v.case.group, []).append(v)
    for name, group in sorted(groups.items()):
        margins = sorted(v.margin for v in group if v.right) or [0.0]
        share = 100 * sum(v.right for v in group) / len(group)
        middle = margins[len(margins) // 2]
        print(f"{name:30} {len(group):6} {share:6.1f}% {margins[0]:11.3f} {middle:7.3f}")


def stable(directory: Path, encoder: Encoder) -> list[cases.Case]:
    """Pinned cases that hold with a margin in bf16 and stay right in q8 and q4."""
    items = cases.pinned()
    keep = {v.case for v in judge(load(directory, "bf16"), encoder, items) if v.margin >= STABLE}
    for precision in ("q8", "q4"):
        right = {v.case for v in judge(load(directory, precision), encoder, items) if v.right}
        for lost in keep - right:
            print(f"not pinned, wrong in {precision}: {lost.messages[-1][1]}", file=sys.stderr)
        keep &= right
    return [c for c in items if c in keep]


def main() -> None:
    """Evaluate, print the table, and write the pinned answers if asked."""
    parser = argparse.ArgumentParser(description="evaluate the embedded model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--weights", choices=("bf16", "q8", "q4"), default="bf16")
    parser.add_argument("--answers", type=Path, help="write the pinned conversations here")
    parser.add_argument("--wrong", action="store_true", help="list the cases that fail")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    encoder = Encoder(Tokenizer.from_file(str(args.directory / "tokenizer.json")))
    net = load(args.directory, args.weights)
    verdicts = judge(net, encoder, cases.all_cases() + cases.pinned())
    table(verdicts)
    if args.wrong:
        for v in verdicts:
            if not v.right:
                print(f"wrong: {v.case.group}: {v.case.messages[-1][1]!r} -> {v.case.answer!r}")
    if args.answers is not None:
        kept = stable(args.directory, encoder)
        data = [{"messages": c.as_messages(), "answer": c.answer} for c in kept]
        args.answers.write_text(json.dumps(data, indent=2) + "\n")
        print(f"{len(kept)} of {len(cases.pinned())} pinned conversations written")


if __name__ == "__main__":
    main()
