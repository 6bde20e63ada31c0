"""Train the embedded model and write the checkpoint directory.

    python -m pykestrel.embedded.train.train OUT_DIR [--steps N]

Needs the tokenizer in OUT_DIR (made by `tokenizer.py`). The result depends on the seed, the number
of steps and the machine's rounding; evaluate.py decides whether it is good, not its bytes.
"""

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, distributed, multiprocessing
from torch.nn import functional

from . import corpus
from .model import Qwen3, Shape
from .tokenizer import token_id

POOL = 384  # conversations that are sorted by length together
IGNORE = -100
END_WEIGHT = 4.0  # when to stop is the hardest part of counting, and one token in twenty of it


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
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    x = (step - warm) / max(1, steps - warm)
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


def share_gradients(net: Qwen3, workers: int) -> None:
    """Replace every gradient by its mean over the workers, in one exchange."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    distributed.all_reduce(flat)
    flat /= workers
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g))


def work(rank: int, args: argparse.Namespace) -> None:
    """One worker: train on its own stream of conversations, in step with the others."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    distributed.init_process_group(
        "gloo", init_method=f"file://{args.meeting}", rank=rank, world_size=args.workers
    )
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    encoder = Encoder(tokenizer)
    net = Qwen3(Shape(vocabulary=tokenizer.get_vocab_size()))
    if args.resume:
        tensors = load_file(args.out / "model.safetensors")
        net.load_state_dict({name: t.float() for name, t in tensors.items()})
    optimisers = make_optimisers(net, args.peak)
    source = batches(encoder, 1000 * args.seed + rank, args.tokens, args.longest)
    r = random.Random(args.seed)  # the same in every worker
    begun, seen, running = time.monotonic(), 0, 0.0
    for step in range(args.steps):
        ids, targets = next(source)
        rate = learning_rate(step, args.steps, args.peak)
        precision = precision_of(step, args.steps, r)
        loss = advance(net, optimisers, rate, ids, targets, precision, encoder.end, args.workers)
        seen += ids.numel() * args.workers
        running += (loss - running) / min(step + 1, 50)
        if rank == 0 and (step % 50 == 49 or step + 1 == args.steps):
            spent = time.monotonic() - begun
            print(
                f"step {step + 1} loss {running:.4f} {seen / spent:.0f} tok/s {spent:.0f} s",
                flush=True,
            )
        if rank == 0 and ((step + 1) % args.every == 0 or step + 1 == args.steps):
            save(net, encoder, args.out)
    distributed.destroy_process_group()


def advance(
    net: Qwen3,
    optimisers: list[torch.optim.Optimizer],
    rate: float,
    ids: Tensor,
    targets: Tensor,
    precision: str,
    end: int,
    workers: int,
) -> float:
    """One step of training; returns the loss of this worker's batch."""
    wanted = targets != IGNORE
    for group in [g for o in optimisers for g in o.param_groups]:
        group["lr"] = rate
    right = targets[wanted]
    each = functional.cross_entropy(net(ids, wanted, precision), right, reduction="none")
    weight = torch.where(right == end, END_WEIGHT, 1.0)
    loss = (each * weight).sum() / weight.sum()
    net.zero_grad(set_to_none=True)
    loss.backward()
    share_gradients(net, workers)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
    return float(loss.detach())


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
    """Parse the command line and start the workers."""
    parser = argparse.ArgumentParser(description="train the embedded model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--tokens", type=int, default=3072, help="positions per worker's batch")
    parser.add_argument("--longest", type=int, default=600, help="longest conversation in tokens")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--every", type=int, default=100, help="save each so many steps")
    parser.add_argument("--resume", action="store_true", help="start from the weights in OUT_DIR")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.meeting = str(Path(folder) / "meeting")
        multiprocessing.spawn(work, (args,), nprocs=args.workers)


if __name__ == "__main__":
    main()
