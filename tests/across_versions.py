"""One version of torch beside another: the main job, checkpoints in both directions, fine-tuning. Processes on a CPU.

    ./launch.sh test versions 2.14.1    # this file, by that version's interpreter; PINNED_PYTHON is the other
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import free_port
from running import ROOT, TORCHRUN, one_line, rows_of
from tiny_hf import logits, write_data, write_model

PINNED = os.environ.get("PINNED_PYTHON", sys.executable)
TINY = """
    --depth 2 --width 64 --head-dim 16 --grouping 2 --seqlen 32
    --batch 2 --steps 4 --warmup 0 --log-every 1
""".split()


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess:
    """A command in the repository, on a CPU, with no environment of torchrun."""
    environment = dict(os.environ)
    for name in TORCHRUN:
        environment.pop(name, None)
    environment["OMP_NUM_THREADS"] = "1"
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PYTHONPATH"] = str(ROOT)
    words = [str(word) for word in command]
    return subprocess.run(
        words,
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )


def on_two_ranks(python: str, *command: str | Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = ["--master-port", str(free_port())]
    done = run(python, *torchrun, *port, *command)
    assert done.returncode == 0, done.stderr


def losses(results: Path) -> list[float]:
    """The losses of the steps of the last run in a results file, which ended well."""
    row = rows_of(results)[-1]
    assert row["outcome"] == "ok", row["outcome"]
    steps = results.with_suffix(".steps") / f"{row['run']}.jsonl"
    return [step["loss"] for step in rows_of(steps)]


@pytest.mark.parametrize("mode", ["fwdbwd", "blocks"])
def test_the_main_job_learns(mode, tmp_path):
    results = tmp_path / "rows.jsonl"
    flags = f"--depth 8 --compile {mode} --steps 12 --log-every 1 --results {results}"
    done = run(
        "./launch.sh",
        "run",
        *flags.split(),
        NO_INSTALL="1",
        PYTHON=sys.executable,
        NPROC="2",
    )
    assert done.returncode == 0, done.stderr
    steps = losses(results)
    assert len(steps) == 12
    assert steps[-1] < steps[0] - 0.5
    said = [line for line in done.stderr.splitlines() if "torch 2.13" in line]
    assert said == []


def test_one_graph_trains_or_says_what_it_needs(tmp_path):
    results = tmp_path / "rows.jsonl"
    done = run(sys.executable, "main.py", *TINY, "--compile", "step", "--results", results)
    if torch.__version__ < (2, 13):
        assert done.returncode == 2
        assert one_line(done.stderr).startswith("error: --compile step needs torch >= 2.13")
    else:
        assert done.returncode == 0, done.stderr
        assert len(losses(results)) == 4


@pytest.mark.skipif(PINNED == sys.executable, reason="the pinned torch has no other beside it")
@pytest.mark.parametrize("saved_by", ["the pinned version", "this version"])
def test_a_checkpoint_is_resumed_by_the_other_version(saved_by, tmp_path):
    first = PINNED
    second = sys.executable
    if saved_by == "this version":
        first, second = second, first
    before = tmp_path / "before.jsonl"
    after = tmp_path / "after.jsonl"
    job = ["main.py", *TINY, "--save-every", "2"]
    on_two_ranks(first, *job, "--save", tmp_path / "saved", "--results", before)
    shutil.copytree(tmp_path / "saved", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/step-00000004")
    on_two_ranks(second, *job, "--save", tmp_path / "resumed", "--results", after)

    assert rows_of(before)[0]["torch"] != rows_of(after)[0]["torch"]
    whole = losses(before)
    resumed = losses(after)
    assert len(whole) == 4
    assert resumed == pytest.approx(whole[2:], abs=1e-5)  # the last step's needs AdamW's moments, too


def test_a_tiny_model_is_fine_tuned_on_two_ranks(tmp_path):
    write_model(tmp_path / "model")
    write_data(tmp_path / "chat.jsonl")
    places = ["--model", tmp_path / "model", "--data", tmp_path / "chat.jsonl"]
    places += ["--export", tmp_path / "out", "--results", tmp_path / "rows.jsonl"]
    how = "--seqlen 48 --batch 2 --steps 8 --lr 1e-2 --warmup 0 --log-every 1"
    on_two_ranks(sys.executable, "finetune.py", *places, *how.split())
    steps = losses(tmp_path / "rows.jsonl")
    assert len(steps) == 8
    assert steps[-1] < steps[0] - 0.1
    assert not torch.equal(logits(tmp_path / "out"), logits(tmp_path / "model"))
