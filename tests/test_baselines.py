"""--wrapper fsdp2 and ddp train as ours does: two gloo ranks, fp32, the losses and norms of every step."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import free_port, spawn

from trainer import baselines
from trainer import config as flags
from trainer.baselines import build
from trainer.data import Batches

ROOT = Path(__file__).parents[1]
SMALL = "--device cpu --depth 2 --width 64 --head-dim 16 --vocab 257 --seqlen 32 --batch 4 --compile none".split()
CELLS = ["simple", "fsdp2", "fsdp2 --no-reshard", "fsdp2 --compile blocks", "ddp", "ddp --loss chunked --chunk 10",
         "ddp --compile blocks"]  # fmt: skip
ACCUMULATING = ["simple", *(f"{w} --accum-sync {s}" for w in ("fsdp2", "ddp") for s in ("every", "last"))]


COMPILE = torch.compile


def without_code(function, options=None, **how):
    """What is compiled and hooked where, without Inductor's slow code generation."""
    return COMPILE(function, backend="aot_eager", **how)


def train(argv: str, steps=6) -> list[tuple[float, float]]:
    torch._dynamo.reset()
    torch.compile = without_code
    rank, world = dist.get_rank(), dist.get_world_size()
    c = flags.resolve(flags.parse([*SMALL, "--wrapper", *argv.split()]), "cpu", world)
    step = build(c, torch.device("cpu"), world)
    step.optimizer.lr.fill_(3e-3)
    total = world * c.batch
    batches = Batches("stdlib", global_batch=total, seqlen=c.seqlen, vocab=256, seed=0, rank=rank, world=world)
    return [(step(*next(batches)).item(), step.grad_norm.item()) for _ in range(steps)]


def whole_batch(mesh):
    return {cell: train(cell) for cell in CELLS}


def micro_batches(mesh):
    return {cell: train(f"{cell} --grad-accum 2") for cell in ACCUMULATING}


def half_precision(mesh):
    cells = [f"{w} --reduce-dtype bf16" for w in ("simple", "fsdp2")] + ["ddp"]
    return {cell: train(f"{cell} --param-dtype bf16") for cell in cells}


@pytest.fixture(scope="module")
def two_ranks():
    return spawn(2, [whole_batch, micro_batches, half_precision])


@pytest.mark.parametrize(("check", "limit"), [("whole_batch", 2e-6), ("micro_batches", 2e-6), ("half_precision", 0.03)])
def test_every_wrapper_has_the_losses_and_norms_of_ours(two_ranks, check, limit):
    ours, others = two_ranks[check]
    assert ours == others  # on both ranks
    expected = next(values for cell, values in ours.items() if cell.startswith("simple"))
    assert expected[-1][0] < expected[0][0] - 0.1
    for cell, values in ours.items():
        for i, name in enumerate(("loss", "norm")):
            apart = max(abs(a[i] - b[i]) for a, b in zip(values, expected, strict=True))
            assert apart <= (limit, 5 * limit)[i], f"{cell}: {name} differs by {apart}"


@pytest.mark.slow
def test_one_command_compares_them_in_one_process_group(tmp_path):
    cells, rows = ["simple:none", "fsdp2:none", "ddp:none"], tmp_path / "rows.jsonl"
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    small = [*SMALL, "--steps", "6", "--results", str(rows)]
    argv = [*torchrun, "-m", "trainer.baselines", *cells, "--", *small]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["cell"] for row in written] == cells and {row["world"] for row in written} == {2}
    assert written[0]["ratio"] == 1 and all(row["n"] == 3 and row["ratio"] > 0 for row in written)
    assert all(cell in done.stdout for cell in cells)


@pytest.mark.parametrize(("cells", "argv", "message"), [
    ("simple:none fsdp2:step", "", "cells fsdp2:step"), ("simple:none", "--device cuda", "--device cuda: .*no GPU"),
])  # fmt: skip
def test_what_cannot_be_compared_is_one_line(cells, argv, message, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        baselines.main(cells.split(), flags.parse(argv.split()), 0, 0, 1)
    err = capfd.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1 and re.search(message, err), err


def test_fsdp2_at_one_rank_and_its_name_in_the_configuration():
    c = flags.resolve(flags.parse([*SMALL, "--wrapper", "fsdp2"]), "cpu", 1)
    assert c.wrapper == "fsdp2" and flags.changed(c)["wrapper"] == "fsdp2"
    assert flags.resolve(replace(c, system=replace(c.system, wrapper="ddp")), "cpu", 1).mode == "replicate"
