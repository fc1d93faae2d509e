"""examples/ddp.py under simple_fsdp: it prints the same losses. Each line of code that differs is
marked with <-; lines that only DistributedDataParallel needs are gone.

    torchrun --nproc-per-node 2 examples/ddp_ported.py [STEPS]    # a laptop's CPU, or GPUs; the same line again resumes
    diff examples/ddp.py examples/ddp_ported.py

STEPS: at most 40, the length of the schedule, which is the default.
Needs simple_fsdp.py and gloo.py: copied beside this file, or this project installed."""

import glob  # <-
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # <- ranks save and load together
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # <-

from gloo import one_worker_thread  # <-
from simple_fsdp import data_parallel  # <-

FOLDER = "runs/ddp_ported"  # <- has a folder for each saved step
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
    else:  # <-
        one_worker_thread()  # <- works around a crash of gloo on CPUs
    ranks = (int(os.environ["WORLD_SIZE"]),)  # <-
    mesh = dist.init_device_mesh(device, ranks)  # <- joins the ranks, too
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    blocks = [Block() for _ in range(DEPTH)]
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB)).to(device)
    model = data_parallel(model, mesh)  # <- in place: there is no model.module
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}  # <- shards, as p

    def loss_of(x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def evaluate():
        """The held-out loss of the averaged weights."""
        parameters = dict(model.named_parameters())  # <-
        trained = {name: p.detach().clone() for name, p in parameters.items()}
        for name, p in parameters.items():
            p.copy_(ema[name])
        loss = mean(loss_of(*batch(-1 - rank, device)))
        for name, p in parameters.items():
            p.copy_(trained[name])
        return loss

    def state():  # <- of this rank: shards, by names that any number of ranks knows
        model_state, optimizer_state = get_state_dict(model, optimizer)  # <-
        saved = dict(model=model_state, ema=ema)  # <-
        return saved | dict(optimizer=optimizer_state, schedule=schedule.state_dict())  # <-

    whole = sorted(glob.glob(f"{FOLDER}/*/.metadata"))  # <- the file that is written last
    if whole:  # <-
        saved = state()  # <- has the tensors that are loaded into
        dcp.load(saved, checkpoint_id=os.path.dirname(whole[-1]))  # <- by any number of ranks
        states = dict(model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])  # <-
        set_state_dict(model, optimizer, **states)  # <-
        schedule.load_state_dict(saved["schedule"])

    for step in range(schedule.last_epoch, steps):
        total = torch.zeros((), device=device)
        for micro in range(ACCUM):
            x, y = batch((step * ACCUM + micro) * world + rank, device)
            loss = loss_of(x, y) / ACCUM  # <-
            loss.backward()  # <- no no_sync: each backward reduces, and gradients add up
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # <- of all ranks
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            for name, p in model.named_parameters():  # <-
                ema[name].mul_(EMA).add_(p, alpha=1 - EMA)

        if (step + 1) % 10 == 0 or step + 1 == steps:
            train, held_out = mean(total), evaluate()
            if rank == 0:
                print(
                    f"step {step + 1}: loss {train:.4f}, held out {held_out:.4f}, norm {norm:.3f}"
                )
            # <- Every rank saves its shards. A kill meanwhile leaves the folders of earlier steps whole.
            dcp.save(state(), checkpoint_id=f"{FOLDER}/{step + 1:06}")  # <-
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
