"""Train the embedded model and write the checkpoint directory.

    python -m pykestrel.embedded.train.train OUT_DIR [--steps N]

Needs the tokenizer in OUT_DIR (made by `tokenizer.py`). The result depends on the seed, the number
of steps and the machine's rounding; evaluate.py decides whether it is good, not its bytes.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from . import corpus
from .model import Qwen3, Shape
from .tokenizer import token_id

POOL = 384  # conversations that are sorted by length together
IGNORE = -100


class Encoder:
    """Conversations to token ids with the targets that are to be learnt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start = token_id(tokenizer, "<|im_start|>")
        self.end = token_id(tokenizer, "<|im_end|>")
        self.pad = token_id(tokenizer, "<|endoftext|>")
        self.newline = tokenizer.encode("\n").ids

    def text(self, text: str) -> list[int]:
        """Ids of plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def conversation(self, c: corpus.Conversation) -> tuple[list[int], list[bool]]:
        """Ids of the whole conversation and, for each, whether it is to be predicted."""
        ids: list[int] = []
        learnt: list[bool] = []

        def add(part: list[int], learn: bool) -> None:
            ids.extend(part)
            learnt.extend([learn] * len(part))

        if c.system is not None:
            head = [self.start, *self.text("system\n" + c.system), self.end, *self.newline]
            add(head, False)
        for turn in c.turns:
            add([self.start, *self.text("user\n" + turn.user), self.end, *self.newline], False)
            add([self.start, *self.text("assistant\n")], False)
            add([*self.text(turn.answer), self.end], turn.learn)
            add(self.newline, False)
        return ids, learnt


def batches(
    encoder: Encoder, seed: int, tokens: int, longest: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches (ids, targets) of about `tokens` positions, rows of similar length."""
    r = random.Random(seed)
    while True:
        rows: list[tuple[list[int], list[bool]]] = []
        while len(rows) < POOL:
            row = encoder.conversation(corpus.conversation(r))
            if len(row[0]) <= longest:
                rows.append(row)
        rows.sort(key=lambda row: len(row[0]))
        ready: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in rows:
            if (len(ready[-1]) + 1) * len(row[0]) > tokens and ready[-1]:
                ready.append([])
            ready[-1].append(row)
        r.shuffle(ready)
        for group in ready:
            yield padded(group, encoder.pad)


def padded(group: list[tuple[list[int], list[bool]]], pad: int) -> tuple[Tensor, Tensor]:
    """Right-padded ids [b, n] and next-token targets [b, n], IGNORE where nothing is learnt."""
    n = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), n), pad)
    targets = torch.full((len(group), n), IGNORE)
    for i, (row, learnt) in enumerate(group):
        line = torch.tensor(row)
        ids[i, : len(row)] = line
        wanted = torch.tensor(learnt[1:], dtype=torch.bool)
        targets[i, : len(row) - 1] = torch.where(wanted, line[1:], IGNORE)
    return ids, targets


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Short warm-up, then a cosine down to a fiftieth."""
    if step < 100:
        return peak * (step + 1) / 100
    x = (step - 100) / max(1, steps - 100)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * x)))


def precision_of(step: int, steps: int, r: random.Random) -> str:
    """Exact weights at first; in the last half often rounded ones, so that q4 answers alike."""
    return "q4" if step > steps // 2 and r.random() < 0.5 else "f32"


def make_optimisers(net: Qwen3, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms.

    Muon with its steps scaled to AdamW's size learns to copy in about half as many steps here.
    """
    inner = [p for name, p in net.named_parameters() if p.dim() == 2 and "embed" not in name]
    outer = [p for name, p in net.named_parameters() if p.dim() < 2 or "embed" in name]
    return [
        torch.optim.Muon(
            inner, lr=peak, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(outer, lr=peak, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0),
    ]


def train(args: argparse.Namespace, encoder: Encoder, shape: Shape) -> Qwen3:
    """Run the training loop and return the network."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    net = Qwen3(shape)
    optimisers = make_optimisers(net, args.peak)
    source = batches(encoder, args.seed, args.tokens, args.longest)
    r = random.Random(args.seed + 1)
    begun, seen, running = time.monotonic(), 0, 0.0
    for step in range(args.steps):
        ids, targets = next(source)
        wanted = targets != IGNORE
        for group in [g for o in optimisers for g in o.param_groups]:
            group["lr"] = learning_rate(step, args.steps, args.peak)
        logits = net(ids, wanted, precision_of(step, args.steps, r))
        loss = functional.cross_entropy(logits, targets[wanted])
        net.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        seen += ids.numel()
        running += (loss.item() - running) / min(step + 1, 50)
        if step % 50 == 49 or step + 1 == args.steps:
            spent = time.monotonic() - begun
            print(
                f"step {step + 1} loss {running:.4f} {seen / spent:.0f} tok/s {spent:.0f} s",
                flush=True,
            )
        if args.every and step % args.every == args.every - 1:
            save(net, encoder, args.out)
    return net


def save(net: Qwen3, encoder: Encoder, out: Path) -> None:
    """Write model.safetensors (bf16), config.json and generation_config.json."""
    tensors = {k: v.detach().bfloat16().contiguous() for k, v in net.state_dict().items()}
    weights = out / "model.safetensors"
    save_file(tensors, weights, {"format": "pt"})
    weights.chmod(0o644)  # the writer leaves it readable by its owner alone
    config = net.shape.config(encoder.end, encoder.pad)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "do_sample": False,
        "eos_token_id": [encoder.end, encoder.pad],
        "pad_token_id": encoder.pad,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description="train the embedded model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--tokens", type=int, default=6144, help="positions per batch")
    parser.add_argument("--longest", type=int, default=1024, help="longest conversation in tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=0, help="save each so many steps")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    shape = Shape(vocabulary=tokenizer.get_vocab_size())
    encoder = Encoder(tokenizer)
    net = train(args, encoder, shape)
    print(sum(p.numel() for p in net.parameters()), "parameters")
    save(net, encoder, args.out)


if __name__ == "__main__":
    main()
