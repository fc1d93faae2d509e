"""What is in a saved step, and a model to save: for the tests of checkpoints."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from running import TINY, resolved
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

from trainer.checkpoint import load as checkpoint
from trainer.data import Batches
from trainer.parallelize import build

UNEVEN = ["--vocab", "257", "--steps", "2"]  # the embedding: 129 and 128 rows


def contents(step):
    """Every tensor of a saved step, read by torch's own reader."""
    dcp_to_torch_save(step, f"{step}.pt")
    return torch.load(f"{step}.pt")


def parameters(step):
    return {n: t for n, t in contents(step).items() if n.startswith(("emb.", "blocks.", "norm.", "head."))}


def assert_bitwise(a, b):
    assert a.keys() == b.keys() and len(a) > 3
    for name, t in a.items():
        assert t.dtype == b[name].dtype and torch.equal(t, b[name]), name


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in Path(folder).glob("step-????????"))


def state_of(step):
    """What a saved step's train_state.json says."""
    return json.loads(Path(step, "train_state.json").read_text())


def start_of(c, step, batches):
    """The checkpoint that a run of these begins at."""
    return checkpoint.find_start(c, batches, None, step.model.identity)


def made(world, *argv, seed=0):
    """Config, step and batches, on `world` ranks of a group that is there."""
    c = resolved([*TINY, *UNEVEN, *argv], world)
    rank = dist.get_rank()
    batches = Batches("random", global_batch=4, seqlen=c.seqlen, vocab=c.vocab, seed=0, rank=rank, world=world)
    torch.manual_seed(seed)
    return c, build(c, torch.device("cpu"), world), batches


def raw(t):
    return t.reshape(-1).view(torch.uint8).numpy().tobytes()


def whole(step):
    """Dtype, shape and bytes of every tensor that is saved."""
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in checkpoint.tensors(step).items()}
    return {n: (str(t.dtype), t.shape, raw(t)) for n, t in state.items()}
