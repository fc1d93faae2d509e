"""What is in a saved step, and a model to save: for the tests of checkpoints."""

import hashlib
import json
import warnings
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
    return checkpoint.find_checkpoint(c, batches, None, step.model.identity)


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


def hashes(step: Path) -> dict[str, str]:
    """Of dtype, shape and bytes of every tensor of a saved step, read by torch's own reader."""
    saved = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    state = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in saved.items()}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(state, storage_reader=dcp.FileSystemReader(step), no_dist=True)
    return {name: hashlib.blake2b(f"{t.dtype} {t.shape}".encode() + t.reshape(-1).view(torch.uint8).numpy().tobytes(),
                                  digest_size=16).hexdigest() for name, t in state.items()}  # fmt: skip


def logged_losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of all that the runs of `folder`/rows.jsonl logged, steps that were done again among them."""
    found = []
    for file in folder.glob("rows.steps/*.jsonl"):
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # the line that a kill cut short
                row = json.loads(line)
                found.append((row["step"], row["loss"]))
    return found
