"""Teaches the small gpt-oss its conversations: `python -m demo.train DATASET.npz OUT.pt`.

Recipe: AdamW, cosine from 3e-3, fp32 weights; from 40 % on with the rounding of serving (MXFP4 experts through a
straight-through estimator, bf16 residuals). Only generated tokens count. Words in noise spans are exchanged at random
at every use. The last part of the data is never trained on and measures recall on fresh prompts.
Needs torch, numpy and safetensors only, so it runs where no tokenizer is installed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demo.checkpoint import WEIGHTS, unpack
from demo.model import Shape, SmallGptOss

CONTROL = 199_998


class Batches:
    """Samples as padded batches of similar length, with fresh noise."""

    def __init__(self, data: dict[str, np.ndarray[Any, Any]], device: str, held_out: float = 0.06) -> None:
        self.offsets, self.device = data["offsets"], device
        self.tokens, self.marks = data["tokens"].astype(np.int64), data["marks"]
        self.used, self.steps = len(data["used"]), data["steps"]
        self.plain = torch.tensor(np.append(np.flatnonzero(data["used"] < CONTROL), self.used), device=device)
        self.head = torch.full((self.used + 1,), -1, dtype=torch.long)
        self.head[torch.from_numpy(data["outputs"]).long()] = torch.arange(len(data["outputs"]))
        self.head = self.head.to(device)
        count = len(self.offsets) - 1
        self.split = count - int(count * held_out)

    def train(self, budget: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Endless batches of about `budget` tokens; lengths are mixed at random from batch to batch."""
        rng = np.random.default_rng(seed)
        lengths = np.diff(self.offsets)
        while True:
            order = rng.permutation(self.split)
            for chunk in np.array_split(order, max(1, len(order) // 2048)):
                chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
                groups = list(_groups(chunk, lengths, budget))
                for index in rng.permutation(len(groups)):
                    yield self.batch(groups[index], rng)

    def held_out(self, budget: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The held-out samples, once."""
        rng = np.random.default_rng(0)
        lengths = np.diff(self.offsets)
        kept = np.arange(self.split, len(lengths))
        for group in _groups(kept[np.argsort(lengths[kept], kind="stable")], lengths, budget):
            yield self.batch(group, rng)

    def batch(self, group: np.ndarray[Any, Any], rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """rows [B, T], marks [B, T], step of each sequence [B]; noise words exchanged, at a rate per sequence."""
        spans = [(self.offsets[i], self.offsets[i + 1]) for i in group]
        width = -(-max(b - a for a, b in spans) // 64) * 64
        rows = np.zeros((len(group), width), dtype=np.int64)
        marks = np.zeros((len(group), width), dtype=np.int64)
        for line, (a, b) in enumerate(spans):
            rows[line, : b - a], marks[line, : b - a] = self.tokens[a:b], self.marks[a:b]
        rate = rng.choice([0.0, 0.05, 0.3, 0.7, 1.0], size=(len(group), 1))
        swap = torch.from_numpy((marks == 1) & (rng.random(rows.shape) < rate)).to(self.device)
        out = torch.from_numpy(rows).to(self.device)
        words = self.plain[torch.randint(len(self.plain), out.shape, device=self.device)]
        steps = torch.from_numpy(self.steps[group].astype(np.int64)).to(self.device)
        return torch.where(swap, words, out), torch.from_numpy(marks).to(self.device), steps


def _groups(order: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], budget: int) -> Iterator[np.ndarray[Any, Any]]:
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - start) * (lengths[order[end]] + 63) > budget:
            yield order[start:end]
            start = end


def log_probabilities(
    model: SmallGptOss, batches: Batches, rows: Tensor, marks: Tensor, serving: bool
) -> tuple[Tensor, Tensor]:
    """Log probability of every generated token, and the line of the batch that it is in."""
    hidden = model(rows, serving)
    where = (marks[:, 1:] == 2).nonzero()
    wanted = batches.head[rows[where[:, 0], where[:, 1] + 1]]
    return model.log_probability(hidden[where[:, 0], where[:, 1]], wanted), where[:, 0]


@torch.no_grad()
def evaluate(model: SmallGptOss, batches: Batches, budget: int) -> tuple[float, float, dict[int, float]]:
    """On held-out prompts, rounded as served: share of sequences with every token above 1/2, the mean least
    probability, and each step's least probability."""
    worst: dict[int, float] = {}
    good = total = 0
    mean = 0.0
    for rows, marks, steps in batches.held_out(budget):
        logp, line = log_probabilities(model, batches, rows, marks, serving=True)
        least = torch.zeros(len(rows), device=rows.device).scatter_reduce(0, line, logp, "amin").exp()
        good, total, mean = good + int((least > 0.5).sum()), total + len(rows), mean + float(least.sum())
        for step, value in zip(steps.tolist(), least.tolist(), strict=True):
            worst[step] = min(value, worst.get(step, 1.0))
    return good / total, mean / total, worst


def rate(step: int, steps: int, peak: float) -> float:
    """Learning rate: 3 % warm-up, then cosine to 1 % of the peak."""
    warm = max(1, steps * 3 // 100)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def train(args: argparse.Namespace) -> SmallGptOss:
    """The training loop; `--seconds` shortens the schedule to what fits."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    data = dict(np.load(args.dataset))
    batches = Batches(data, args.device)
    shape = Shape(hidden=args.hidden, intermediate=args.intermediate, layers=args.layers)
    model = SmallGptOss(shape, len(data["used"]), len(data["outputs"])).to(args.device)
    if args.resume:
        adopt(model, unpack(WEIGHTS), data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {len(batches.steps)} samples, {args.device}",
        flush=True,
    )
    start, done = time.time(), 0.0
    for step, (rows, marks, _) in enumerate(batches.train(args.tokens, args.seed), 1):
        serving = done > (0.2 if args.resume else 0.4)
        for group in optimizer.param_groups:
            group["lr"] = rate(int(done * 10_000), 10_000, args.lr)
        logp, _ = log_probabilities(model, batches, rows, marks, serving)
        loss = -logp.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        spent = (time.time() - start) / args.seconds if args.seconds else 0.0
        done = max(step / args.steps, spent)
        if step % args.every == 0 or done >= 1:
            report(model, batches, args, step, loss.item(), time.time() - start)
            save(model, data, args.out)
        if done >= 1:
            break
    return model


def save(model: SmallGptOss, data: dict[str, np.ndarray[Any, Any]], path: Path) -> None:
    """Weights, shape and the token ids behind the rows."""
    ids = {name: torch.from_numpy(data[name]) for name in ("used", "outputs")}
    torch.save({"model": model.state_dict(), "shape": model.describe(), **ids}, path)


@torch.no_grad()
def adopt(model: SmallGptOss, old: dict[str, Any], data: dict[str, np.ndarray[Any, Any]]) -> None:
    """Goes on from an earlier checkpoint: layers as they are, rows by token id; new tokens keep their fresh rows."""
    mine, theirs = model.state_dict(), old["model"]
    for name, value in theirs.items():
        if name not in ("embedding", "head"):
            mine[name].copy_(value)
    mine["embedding"][-1] = theirs["embedding"][-1]
    rows = {int(t): i for i, t in enumerate(old["used"])}
    heads = {int(old["used"][r]): i for i, r in enumerate(old["outputs"])}
    for i, token in enumerate(data["used"]):
        if int(token) in rows:
            mine["embedding"][i] = theirs["embedding"][rows[int(token)]]
    for i, row in enumerate(data["outputs"]):
        if int(data["used"][row]) in heads:
            mine["head"][i] = theirs["head"][heads[int(data["used"][row])]]


def report(
    model: SmallGptOss, batches: Batches, args: argparse.Namespace, step: int, loss: float, seconds: float
) -> None:
    """One line of progress, and the hardest steps."""
    share, mean, worst = evaluate(model, batches, args.tokens)
    hard = sorted(worst.items(), key=lambda item: item[1])[:6]
    print(
        f"step {step} loss {loss:.5f} recall {share:.4f} least {mean:.3f} {seconds:.0f}s "
        + " ".join(f"{s}:{p:.2f}" for s, p in hard),
        flush=True,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on from weights.safetensors, not from scratch")
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--intermediate", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=0.0, help="stop by then, the schedule fitted to it")
    parser.add_argument("--tokens", type=int, default=24_000, help="tokens of a batch, padding included")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=250, help="steps between reports")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
