"""A usual training script on DistributedDataParallel, to be compared line by line with examples/ddp_ported.py:
gradient accumulation, clipping, a warm-up with cosine decay, an EMA of the weights, evaluation, a checkpoint, resuming.

    torchrun --nproc-per-node 2 examples/ddp.py [STEPS]        # a laptop's CPU, or GPUs; the same line again resumes

STEPS: at most 40, the length of the schedule, which is the default."""

import contextlib
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FILE = "runs/ddp/checkpoint.pt"
VOCAB, WIDTH, DEPTH = 64, 64, 2
STEPS, WARMUP, ACCUM, EMA = 40, 5, 2, 0.9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def batch(seed, device):
    """Your data: [8, 16] tokens and the next ones. Here each token is three times the one before, plus one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (8, 16), generator=generator).to(device)
    return tokens, (3 * tokens + 1) % VOCAB


def learning_rate(step):
    decay = 0.5 + 0.5 * math.cos(math.pi * min(1, step / STEPS))
    return min(1, (step + 1) / WARMUP) * decay


def mean(value):
    """Over the ranks."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    if steps > STEPS:
        sys.exit(f"STEPS {steps}: at most {STEPS}, since the learning rate is zero after that")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    blocks = [Block() for _ in range(DEPTH)]
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    ema = {name: p.detach().clone() for name, p in model.module.named_parameters()}

    def loss_of(x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def evaluate():
        """The held-out loss of the averaged weights."""
        parameters = dict(model.module.named_parameters())
        trained = {name: p.detach().clone() for name, p in parameters.items()}
        for name, p in parameters.items():
            p.copy_(ema[name])
        loss = mean(loss_of(*batch(-1 - rank, device)))
        for name, p in parameters.items():
            p.copy_(trained[name])
        return loss

    if os.path.exists(FILE):
        saved = torch.load(FILE, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        ema = saved["ema"]

    for step in range(schedule.last_epoch, steps):
        total = torch.zeros((), device=device)
        for micro in range(ACCUM):
            x, y = batch((step * ACCUM + micro) * world + rank, device)
            last = micro == ACCUM - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_of(x, y) / ACCUM
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            for name, p in model.module.named_parameters():
                ema[name].mul_(EMA).add_(p, alpha=1 - EMA)

        if (step + 1) % 10 == 0 or step + 1 == steps:
            train, held_out = mean(total), evaluate()
            if rank == 0:
                print(
                    f"step {step + 1}: loss {train:.4f}, held out {held_out:.4f}, norm {norm:.3f}"
                )
                os.makedirs(os.path.dirname(FILE), exist_ok=True)
                saved = dict(model=model.module.state_dict(), ema=ema)
                saved |= dict(optimizer=optimizer.state_dict(), schedule=schedule.state_dict())
                torch.save(saved, FILE + ".new")
                os.replace(FILE + ".new", FILE)  # a kill while it writes leaves the old one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
