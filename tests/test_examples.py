"""examples/: the scripts run as they are, and a Llama's collectives are bucketed per decoder layer."""

import json
import re
import runpy
import shutil
import sys
from difflib import SequenceMatcher
from importlib.util import find_spec

import pytest
import torch
from harness import free_port
from running import ROOT, ran

FILES = "hf_trainer.py", "own_loop.py", "ddp.py", "ddp_ported.py"
TRAINER, OWN_LOOP, DDP, PORTED = (ROOT / "examples" / name for name in FILES)
without = not find_spec("transformers")
needs_transformers = pytest.mark.skipif(without, reason="needs transformers: pip install -e '.[hf]'")


def on_two_ranks(script, *argv, cwd=None, alone=False):
    """What it prints, once it has ended well. alone: as `python SCRIPT`, without torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    env = dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    done = ran(sys.executable, *torchrun * (not alone), script, *argv, cwd=cwd, **env)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.slow
@needs_transformers
def test_the_trainer_does_what_a_loop_in_one_process_does(tmp_path):
    """Its losses, gradient norms (before clipping), evaluations and the saved model."""
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[hf]'")
    from transformers import LlamaForCausalLM

    printed = on_two_ranks(TRAINER, str(tmp_path))
    log = [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]
    script = runpy.run_path(str(TRAINER))
    samples = script["samples"](64, seed=1), script["samples"](16, seed=2)
    data, held_out = (torch.stack([row["labels"] for row in rows]) for rows in samples)
    model = script["tiny_llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    norms = []
    evaluations = []
    for tokens in data[:48].split(8):  # of each 8, rank 0 takes the first 4
        losses.append(model(tokens, labels=tokens).loss)
        losses[-1].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) % 3 == 0:
            with torch.no_grad():
                evaluations.append(model(held_out, labels=held_out).loss.item())
    losses = [loss.item() for loss in losses]
    assert min(norms) > 0.5 and losses[-1] < losses[0] - 0.1, "nothing is clipped or learnt: this proves nothing"
    for key, expected in dict(loss=losses, grad_norm=norms, eval_loss=evaluations).items():
        assert [row[key] for row in log if key in row] == pytest.approx(expected, rel=1e-4), key

    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert saved.config.architectures == ["LlamaForCausalLM"]
    assert saved(held_out, labels=held_out).loss.item() == pytest.approx(evaluations[-1], rel=1e-4)


def steps_of(printed):
    """Step, loss, held-out loss and norm of each line."""
    return [[float(word) for word in re.findall(r"[\d.]+", line)] for line in printed.splitlines() if "loss" in line]


def test_each_line_of_code_of_the_port_that_differs_is_marked():
    """As docs/tutorial.md and the file itself say."""
    _, ours = theirs_and_ours = [path.read_text().splitlines() for path in (DDP, PORTED)]
    equal = SequenceMatcher(None, *theirs_and_ours, autojunk=False).get_matching_blocks()
    same = {line for block in equal for line in range(block.b, block.b + block.size)}
    code = ours.index("import glob  # <-")  # the docstring is before it
    differ = [line for i, line in enumerate(ours) if i >= code and i not in same and line]
    assert 10 < len(differ) < 40 and differ == [line for line in ours[code:] if "# <-" in line]


@pytest.mark.long
@pytest.mark.parametrize("script", [DDP, PORTED])
def test_more_steps_than_the_schedule_has_are_refused(script):
    done = ran(sys.executable, script, "41", PYTHONPATH=str(ROOT))
    assert done.code and done.err == "STEPS 41: at most 40, since the learning rate is zero after that\n", done.err


@pytest.mark.long
def test_a_script_on_ddp_and_its_port_print_the_same_to_the_digit_resumed_or_not(tmp_path):
    """Accumulation, clipping, schedule, EMA, evaluation, checkpoint: docs/tutorial.md begins with these files."""
    theirs = on_two_ranks(DDP, cwd=tmp_path)
    lines = steps_of(theirs)
    assert [line[0] for line in lines] == [10, 20, 30, 40]
    assert lines[-1][1] < lines[0][1] - 0.5 and lines[0][3] > 1, "nothing is learnt or clipped: this proves nothing"
    assert on_two_ranks(PORTED, "25", cwd=tmp_path).splitlines()[:2] == theirs.splitlines()[:2]
    saved = tmp_path / "runs/ddp_ported"
    assert sorted(path.name for path in saved.iterdir()) == ["000010", "000020", "000025"]
    # A kill in the save of step 30, when one of two ranks had written its file.
    shutil.copytree(saved / "000020", saved / "000030", ignore=shutil.ignore_patterns(".metadata", "__1_*"))
    assert on_two_ranks(PORTED, cwd=tmp_path).splitlines() == theirs.splitlines()[2:]


KILLED = """
import os, runpy, sys, torch
save = torch.save
def cut_off(saved, path):
    if os.path.exists("runs/ddp/checkpoint.pt"):
        with open(path, "wb") as file:
            file.write(b"half")
        os._exit(9)
    save(saved, path)
torch.save = cut_off
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.long
def test_a_script_on_ddp_that_is_killed_while_it_saves_goes_on_from_the_save_before(tmp_path):
    env = dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", RANK="0", WORLD_SIZE="1")
    env |= dict(LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    (tmp_path / "killed.py").write_text(KILLED.replace("sys.argv[1]", repr(str(DDP))))
    assert ran(sys.executable, "killed.py", cwd=tmp_path, **env).code == 9
    again = ran(sys.executable, DDP, cwd=tmp_path, **env)
    assert [line[0] for line in steps_of(again.out)] == [20, 30, 40], again.err


@pytest.mark.slow
def test_a_loop_of_your_own_trains_as_one_process_and_goes_on_from_what_it_saved(tmp_path):
    cut = tmp_path / "cut"
    cut.mkdir()
    whole = steps_of(on_two_ranks(OWN_LOOP, "60", cwd=tmp_path))
    texts = [on_two_ranks(OWN_LOOP, steps, cwd=cut) for steps in ("45", "60")]
    assert all("compiling; " in text for text in texts), "nothing is said while the compiler works"
    assert "after step" not in texts[0]
    assert texts[1].startswith("after step 45 of 60, which runs/own_loop holds\n")
    parts = [*map(steps_of, texts)]
    assert [len(part) for part in parts] == [3, 1], "the second one did not go on, or the first did not save its end"
    assert [line for line in sum(parts, []) if line[0] != 45] == whole
    ((step, loss, *_),) = steps_of(on_two_ranks(OWN_LOOP, "80", cwd=cut, alone=True))
    assert step == 80 and loss < whole[-1][1], "one rank did not go on from what two have saved"
    again = on_two_ranks(OWN_LOOP, "60", cwd=tmp_path, alone=True)
    assert again == "after step 60 of 60, which runs/own_loop holds\n", "it does not say that nothing is left to do"

    own = runpy.run_path(str(OWN_LOOP))
    torch.manual_seed(0)
    blocks = [own["Block"]() for _ in range(own["DEPTH"])]
    vocab = own["VOCAB"]
    width = own["WIDTH"]
    model = torch.nn.Sequential(torch.nn.Embedding(vocab, width), *blocks, torch.nn.Linear(width, vocab))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 10)
        optimizer.zero_grad()
        batches = [own["batch"](2 * step + rank, "cpu") for rank in range(2)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss < 0.2, "nothing is learnt: this proves nothing"
    assert whole[0][1] == pytest.approx(loss.item(), abs=1e-3)
    assert whole[0][3] == pytest.approx(norm.item(), abs=4e-3)
