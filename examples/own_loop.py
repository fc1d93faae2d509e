"""A training loop of your own under simple_fsdp: compile, clip, schedule, evaluate, save, go on from what was saved.

    torchrun --nproc-per-node 2 examples/own_loop.py [STEPS]    # a laptop's CPU, or GPUs; the same line again goes on
    python examples/own_loop.py [STEPS]                         # one rank; it goes on from what two have saved, too

What differs from a loop for DDP is marked with <-. Needs simple_fsdp.py, overlap.py and gloo.py: copied beside this
file, or this project installed."""

import glob
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gloo import one_worker_thread
from overlap import compile_options
from simple_fsdp import data_parallel

FOLDER = "runs/own_loop"  # a folder for each saved step in it
VOCAB, WIDTH, DEPTH = 64, 64, 2
# What torchrun tells each rank; without torchrun there is one.
ALONE = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")


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


def mean(value):
    """Over the ranks. A collective: every rank calls it."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    os.environ.update(ALONE | os.environ)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        one_worker_thread()  # <- works around a crash of gloo on CPUs
    mesh = dist.init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))  # joins the ranks, too

    torch.manual_seed(0)
    blocks = [Block() for _ in range(DEPTH)]
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB)).to(device)
    model = data_parallel(model, mesh)  # <- in place of DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # <- after it: of the shards
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))

    def loss_of(x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    compiled = torch.compile(loss_of, fullgraph=True, options=compile_options(model))  # <- as one

    whole = sorted(glob.glob(f"{FOLDER}/*/.metadata"))  # the file that is written last
    if whole:
        states, optimizers = get_state_dict(model, optimizer)
        saved = dict(model=states, optimizer=optimizers, schedule=schedule.state_dict())
        dcp.load(saved, checkpoint_id=os.path.dirname(whole[-1]))  # <- by any number of ranks
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        schedule.load_state_dict(saved["schedule"])
        if mesh.get_rank() == 0:
            print(f"after step {schedule.last_epoch} of {steps}, which {FOLDER} holds")

    if mesh.get_rank() == 0 and schedule.last_epoch < steps:
        print("compiling; minutes the first time, seconds when cached", flush=True)
    for step in range(schedule.last_epoch, steps):
        x, y = batch(seed=step * mesh.size() + mesh.get_rank(), device=device)  # this rank's own
        loss = compiled(x, y)
        loss.backward()  # <- gradients come averaged over the ranks, as shards
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # <- of all ranks
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        if (step + 1) % 20 == 0 or step + 1 == steps:
            with torch.no_grad():  # <- on every rank: weights are gathered
                held_out = mean(compiled(*batch(seed=-1 - mesh.get_rank(), device=device)))
            train_loss = mean(loss.detach())
            if mesh.get_rank() == 0:
                print(
                    f"step {step + 1}: loss {train_loss:.4f}, held out {held_out:.4f}, norm {norm.item():.3f}"
                )
            states, optimizers = get_state_dict(model, optimizer)  # <- every rank saves its shards
            saved = dict(model=states, optimizer=optimizers, schedule=schedule.state_dict())
            dcp.save(saved, checkpoint_id=f"{FOLDER}/{step + 1:06}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
