"""Jobs of real ranks that are stopped and go on, also in another layout, train what the undisturbed job trains.

    pytest tests/test_going_on.py        # no GPU; half a minute on one core; -m slow: four ranks

Ranks are forked from a process that has imported torch (tests/forked.py).
"""

import functools
import hashlib
import json
import re
from types import SimpleNamespace

import pytest
from forked import Job
from running import TINY
from saved import hashes, logged_losses, state_of

slow = pytest.mark.slow


def digest(values):
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(steps, every, *parts): a job per part, "RANKS FLAGS", each but the first going on where the one before
    had done `every` steps more. What they trained on and logged, each in its part, and the step saved at the end."""
    root = tmp_path_factory.mktemp("jobs")
    flags = "--data stdlib --log-every 1 --warmup 2 --keep 9".split()

    @functools.cache
    def job(steps, every, *parts):
        folder = root / digest((steps, every, parts))
        (folder / "samples").mkdir(parents=True)
        ranks, *argv = parts[-1].split()
        argv = [*TINY, *flags, "--steps", steps, "--save-every", every, "--save", folder / "run", *argv]
        if len(parts) > 1:
            argv += ["--resume", job(steps, every, *parts[:-1]) / f"run/step-{every * (len(parts) - 1):08d}"]
        done = Job(int(ranks), [*argv, "--results", folder / "rows.jsonl"], folder / "log", folder / "samples")
        assert not any(done.wait(300)), (folder / "log").read_text()
        return folder

    def trained(steps, every, *parts):
        losses = {}
        samples = {}
        for i in range(len(parts)):
            folder = job(steps, every, *parts[: i + 1])
            last = folder / f"run/step-{steps:08d}"
            state = state_of(last)
            part = range(every * i, every * (i + 1) if i + 1 < len(parts) else steps)  # in steps, from 0
            losses |= {step: loss for step, loss in logged_losses(folder) if step - 1 in part}
            lines = [json.loads(line) for file in folder.glob("samples/*") for line in file.read_text().splitlines()]
            assert len(lines) == len(dict(lines)), "a sample was given twice"
            samples |= {sample: tokens for sample, tokens in lines if sample // state["global_batch"] in part}
        return SimpleNamespace(losses=losses, samples=samples, last=last, state=state)

    return trained


@slow
def test_ten_steps_are_five_and_five_by_hash_of_parameters_moments_and_losses(trained):
    straight = trained(10, 0, "2")
    resumed = trained(10, 5, "2", "2")
    tensors = hashes(straight.last)
    again = hashes(resumed.last)
    moments = {name for name in tensors if re.match(r"[mv]\.|t$", name)}
    found = [{"parameters": digest(sorted((k, v) for k, v in hashes.items() if k not in moments)),
              "moments": digest(sorted((k, v) for k, v in hashes.items() if k in moments)),
              "losses": digest(sorted(run.losses.items()))}
             for hashes, run in ((tensors, straight), (again, resumed))]  # fmt: skip
    assert found[0] == found[1] and tensors == again and len(moments) == 33 and len(straight.losses) == 10
    assert resumed.state.pop("origin")
    assert resumed.state.pop("run") != straight.state.pop("run")
    assert straight.state == resumed.state
    assert straight.samples == resumed.samples
    assert len(straight.samples) == 40


PARTS = {  # global batch 4 or 12
    "2-1": (10, 5, "2", "1 --batch 4"),
    "4-2-3-1": (12, 3, "4 --batch 3", "2 --batch 3 --grad-accum 2", "3 --batch 4", "1 --batch 4 --grad-accum 3"),
    "modes": (12, 4, "4 --batch 3", "2 --batch 6 --mode replicate", "4 --batch 3 --mode hybrid_shard"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["2-1", *(pytest.param(name, marks=slow) for name in PARTS if name != "2-1")])
def test_on_other_ranks_the_losses_and_samples_are_those_of_the_undisturbed_run(name, trained):
    steps, every, *parts = PARTS[name]
    alone = trained(steps, 0, parts[0])
    changed = trained(steps, every, *parts)
    differ = {step: abs(loss - alone.losses[step]) for step, loss in changed.losses.items()}
    assert differ.keys() == set(range(1, steps + 1)) and max(differ.values()) <= 1e-5, differ
    assert changed.samples == alone.samples
    assert len(alone.samples) == alone.state["samples"] == changed.state["samples"]
