"""examples/: the Hugging Face script runs as it is, and its model's collectives are bucketed per decoder layer."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import free_port
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap import compile_options
from simple_fsdp import data_parallel
from trainer.profiling.collectives import capture, collectives, saved

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
SCRIPT = Path(__file__).parents[1] / "examples" / "hf_llama.py"


@pytest.fixture(scope="module")
def tiny_llama():
    return runpy.run_path(str(SCRIPT))["tiny_llama"]


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) <= 40


@pytest.mark.slow
def test_a_llama_is_gathered_and_reduced_once_per_layer(tiny_llama):
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        model = data_parallel(tiny_llama(), dist.init_device_mesh("cpu", (8,)))
        loss = lambda x: model(x, labels=x, use_cache=False).loss  # noqa: E731
        graphs = capture(loss, (torch.zeros(2, 16, dtype=torch.long),), compile_options(model))
        kinds = {name: [c.kind for c in collectives(gm)] for name, gm in graphs.items()}
        gaps = {name: [c.gap for c in collectives(gm) if c.kind == "all-gather"] for name, gm in graphs.items()}
    finally:
        dist.destroy_process_group()
    assert kinds["forward"] == ["all-gather"] * 5  # embedding, three layers, norm and head
    assert sorted(kinds["backward"]) == ["all-gather"] * 4 + ["reduce-scatter"] * 5
    assert gaps["forward"].count(0) == 2 and gaps["backward"].count(0) == 0
    assert saved(graphs["forward"])["gathered"] == 0


@pytest.mark.slow
def test_the_script_trains_and_its_losses_are_those_of_the_unwrapped_model(tiny_llama):
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(SCRIPT.parents[1]), CUDA_VISIBLE_DEVICES="")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    done = subprocess.run([*torchrun, SCRIPT], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"rank (\d)  step (\d)  loss (\d+\.\d{6})", done.stdout)
    got = {(int(rank), int(step)): float(loss) for rank, step, loss in lines}
    assert len(got) == 10

    torch.manual_seed(0)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generators = [torch.Generator().manual_seed(1 + rank) for rank in (0, 1)]
    for step in range(1, 6):
        batches = [torch.randint(256, (4, 64), generator=g) for g in generators]
        losses = [model(x, labels=x, use_cache=False).loss for x in batches]
        assert [got[rank, step] for rank in (0, 1)] == pytest.approx([loss.item() for loss in losses], abs=2e-5)
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
