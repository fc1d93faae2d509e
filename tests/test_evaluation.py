"""--eval-every and --sample: data that training never sees, the same loss of it on any ranks, in no step's time.

    pytest tests/test_evaluation.py        # no GPU; what compiles is slow

The split is that of trainer/data.py; runs are those of main.py, eager and tiny, on one rank in this process, on two
forked.
"""

import math
import os
import re
import shutil
import signal
import struct
import time
from types import SimpleNamespace

import pytest
import torch
from forked import Job
from harness import ONE_GRAPH
from running import TINY, end_of_signal, fails, read
from saved import state_of, steps_in

from lean import IGNORE
from trainer import run as runs
from trainer import trackers
from trainer.data import Batches, DataError, check_files
from trainer.measuring import memory

pytestmark = pytest.mark.usefixtures("isolated", "one_thread")

T = 16
EVERY_2 = "--eval-every 2 --eval-batches 3 --log-every 1".split()


def batches(source, **changes):
    return Batches(source, **{"global_batch": 8, "seqlen": T, "vocab": 65536, "seed": 3, **changes})


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Values of --data. In the bin files, token number i is i."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_bytes(bytes(range(256)) * 8)
    for name, ids in dict(a=range(700), b=range(700, 2000)).items():
        (folder / f"{name}.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    return dict(stdlib="stdlib", overfit="overfit", text=f"text:{folder}/a.txt", bin=f"bin:{folder}/*.bin")


# ------------------------------------------------------------------------------------------------------------ the split


def test_without_a_split_batches_are_what_they_always_were(tmp_path):
    (tmp_path / "a.bin").write_bytes(struct.pack("<1000H", *range(1000)))
    stream = batches(f"bin:{tmp_path}/a.bin")
    assert [stream.position(sample) for sample in (0, 1, 2, 61, 62, 200)] == [805, 229, 549, 32, 736, 374]
    assert stream.fingerprint == "77117b439bca8b732028f515c06181d4"
    assert not stream.held
    assert next(batches("random"))[0][0, :4].tolist() == [26530, 29851, 20238, 20475]


@pytest.mark.parametrize("kind", ["stdlib", "overfit", "text", "bin"])
def test_no_token_that_is_held_out_is_trained_on(kind, sources):
    seqlen = 4096 if kind in ("stdlib", "overfit") else T
    stream = batches(sources[kind], seqlen=seqlen, hold_out=True)
    trained = [stream.position(sample) for sample in range(4 * stream.epoch_samples)]
    size = stream.stream.ends[-1]
    assert max(trained) + seqlen + 1 <= stream.held[0]
    assert stream.held[-1] + seqlen + 1 <= size
    assert size - stream.held[0] == max(size // 64, seqlen + 1)
    assert all(b - a == seqlen for a, b in zip(stream.held, stream.held[1:], strict=False))
    assert len(set(trained)) > stream.epoch_samples  # several offsets of the grid
    assert "more held out" in stream.description
    assert stream.fingerprint != batches(sources[kind]).fingerprint


def test_random_tokens_that_are_held_out_are_others():
    stream = batches("random", hold_out=True)
    trained = {tuple(row.tolist()) for _ in range(20) for row in next(stream)[0]}
    held = [tuple(row.tolist()) for tokens, _ in stream.held_out(20) for row in tokens]
    assert len(set(held)) == 160
    assert not trained & set(held)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["stdlib", "overfit", "text", "bin", "random"])
def test_what_is_held_out_is_the_same_on_any_ranks_and_wherever_training_is(kind, sources):
    source = sources.get(kind, kind)
    whole = [*batches(source, hold_out=True).held_out(2)]
    assert [[*part.shape] for pair in whole for part in pair] == [[8, T]] * 2 * len(whole)
    for world in (2, 4):
        ranks = [batches(source, rank=rank, world=world, hold_out=True, start=80) for rank in range(world)]
        parts = [[*each.held_out(2)] for each in ranks]
        for k, (tokens, targets) in enumerate(whole):
            assert torch.equal(torch.cat([part[k][0] for part in parts]), tokens)
            assert torch.equal(torch.cat([part[k][1] for part in parts]), targets)
        assert all(next(each)[0].shape == (8 // world, T) and each.sample == 88 for each in ranks)


def test_rows_that_the_last_batch_lacks_have_no_label(sources):
    stream = batches(sources["bin"], hold_out=True, global_batch=3, seqlen=6)  # 31 tokens: 5 samples
    (_, first), (tokens, last) = stream.held_out(9)
    assert len(stream.held) == 5
    assert (first != IGNORE).all()
    assert torch.equal(last[:2, :-1], tokens[:2, 1:])
    assert (last[2] == IGNORE).all()
    assert [len([*stream.held_out(n)]) for n in (1, 2, 3)] == [1, 2, 2]


@pytest.mark.parametrize("kind", ["text", "bin"])
def test_data_too_short_to_hold_out_a_sequence_is_refused_before_torch_is_there(kind, tmp_path, train):
    path = tmp_path / "short"
    size = 2 if kind == "bin" else 1
    path.write_bytes(bytes((2 * T + 1) * size))
    message = f"{kind}:{path}, token 33: expected at least 34 tokens .*--eval-every holds out.*leave out --eval-every"
    with pytest.raises(DataError, match=message):
        check_files(f"{kind}:{path}", T, hold_out=True)
    with pytest.raises(DataError, match=message):
        batches(f"{kind}:{path}", hold_out=True)
    check_files(f"{kind}:{path}", T)
    if kind == "bin":
        fails(train("--data", f"bin:{path}", "--eval-every", 1), 3, "--eval-every", str(path))
    path.write_bytes(bytes((2 * T + 2) * size))
    stream = batches(f"{kind}:{path}", hold_out=True)
    assert (stream.epoch_samples, len(stream.held)) == (1, 1)
    assert stream.held[0] == T + 1


# ----------------------------------------------------------------------------------------------------------------- runs


def evaluations(done):
    return {s["step"]: s["eval_loss"] for s in done.steps if "eval_loss" in s}


def lines(done):
    """What training logged, without times."""
    return [[s[key] for key in ("step", "loss", "lr", "grad_norm")] for s in done.steps if "ms" in s]


@pytest.fixture
def slow_and_large(monkeypatch):
    """Evaluations that take 0.4 s and 400 MiB more."""

    def evaluate(*args):
        time.sleep(0.4)
        torch.ones(100 << 20).sum()
        return found(*args)

    found = runs.evaluate
    monkeypatch.setattr(runs, "evaluate", evaluate)


@pytest.mark.long
def test_an_evaluation_is_logged_beside_the_loss_and_in_no_steps_time_or_memory(train, slow_and_large, monkeypatch):
    told = []

    class Tracker:
        id, place, first_step = "a", "nowhere", 0

        def __init__(self, *_):
            self.log = lambda step, values: told.append((values, step))
            self.summarize = lambda row: None
            self.finish = lambda: None

    monkeypatch.setitem(trackers.KINDS, "wandb", Tracker)
    once = train("--eval-every", "1000", "--eval-batches", "3", *EVERY_2[2:], "--steps", 7)
    done = train(*EVERY_2, "--steps", 7, "--tracker", "wandb")
    assert once.code == done.code == 0
    assert done.err == ""
    assert lines(done) == lines(once)  # training does not notice
    found = evaluations(done)
    assert [*found] == [2, 4, 6, 7]
    assert evaluations(once) == {7: found[7]}
    for s in done.steps:
        if "eval_loss" in s:
            assert s.keys() == {"step", "tokens", "loss", "eval_loss", "eval_bpb", "eval_examples"}
            assert s["loss"] == next(each["loss"] for each in done.steps if each["step"] == s["step"])
            assert s["eval_bpb"] == pytest.approx(s["eval_loss"] / math.log(2))
            assert abs(s["eval_loss"] - 5.5) < 0.5
    assert (done.steps[-1], 7) in told
    assert done.steps[-1]["eval_loss"] == found[7]
    assert (done.row["eval_loss"], done.row["eval_step"]) == (found[7], 7)
    assert done.row["eval_bpb"] > 7
    assert f"held-out loss {found[7]:.4f}  {found[7] / math.log(2):.4f} bits per byte" in done.out
    bits = f"{found[7] / math.log(2):.4f} bits per byte"
    assert f"held out loss {found[7]:.4f}, {bits}, of 6 examples, after step 7" in done.out
    assert done.row["n"] == 4 and done.row["step_ms_max"] < 400 and max(s.get("ms", 0) for s in done.steps) < 400
    if os.access(memory.CLEAR_REFS, os.W_OK):
        assert done.row["peak_rss_mib"] < memory.memory_now("cpu") + 200


@pytest.mark.long
def test_zero_steps_evaluate_a_checkpoint_and_leave_it_as_it_is(train, trains, tmp_path):
    saved = train(*EVERY_2, "--steps", 4, "--save", f"{tmp_path}/run")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    done = trains(*EVERY_2, "--steps", 0, "--resume", f"{tmp_path}/run", "--sample", 3)
    assert done.err == "" and done.row["eval_loss"] == saved.row["eval_loss"] < 5.5
    assert done.row["loss"] is None
    assert done.row["resumed_after"] == 4
    assert "step 4/4  held-out loss" in done.out
    head, text, after = done.out[done.out.index("sample   8 bytes of held-out data") :].splitlines()[:3]
    assert re.fullmatch(r" {9}.{8}\|.{3}", text) and after.startswith("outcome  ok"), "text of several lines is one"
    assert "learning rate ends" not in done.out
    assert "no step was timed" not in done.out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == files


def test_without_evaluations_a_row_says_so_and_holds_nothing_out(train):
    done = train()
    assert [done.row[key] for key in ("eval_loss", "eval_bpb", "eval_step")] == [None] * 3
    assert "held" not in done.out
    assert not evaluations(done)


def test_the_loss_is_that_of_the_model_on_what_is_held_out(train, tmp_path):
    """At a learning rate of almost nothing: that of the weights it began with."""
    path = tmp_path / "ids.bin"
    path.write_bytes(struct.pack("<4000H", *[int(t) for t in torch.randint(300, (4000,))]))
    took = runs.Run.resume_into
    models = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.Run, "resume_into", lambda run, step: (took(run, step), models.append(run)))
        done = train("--data", f"bin:{path}", "--vocab", 300, "--lr", "1e-30", "--eval-every", 3, "--wrapper", "none")
    assert done.code == 0 and done.row["eval_bpb"] is None and "bits per byte" not in done.out
    (run,) = models
    with torch.no_grad():
        rows = torch.stack([run.batches.row(i, held=True) for i in range(len(run.batches.held))])
        expected = run.step.model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()
    assert len(rows) == 3
    assert done.row["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.long
def test_a_resumed_run_evaluates_as_the_run_that_was_not_stopped(train, trains, tmp_path):
    argv = [*EVERY_2, *"--warmup 2 --steps 7".split()]
    whole = train(*argv, "--save", "whole")
    trains(*argv, "--save", "cut", "--save-every", 3)
    for step in (6, 7):
        shutil.rmtree(tmp_path / f"cut/step-0000000{step}")
    resumed = train(*argv, "--save", "cut")
    assert whole.code == resumed.code == 0
    assert "resuming after step 3" in resumed.out
    assert evaluations(resumed) == {k: each for k, each in evaluations(whole).items() if k > 3}
    assert lines(resumed) == lines(whole)[3:]
    state = state_of("whole/step-00000007")
    assert state["best"] == min(evaluations(whole).values())


@pytest.mark.long
def test_the_best_step_is_kept_named_and_still_the_best_after_resuming(train, trains, tmp_path, monkeypatch):
    losses = dict(zip(range(1, 9), (5.0, 3.0, 4.0, 3.5, 3.0, 4.0, 2.0, 6.0), strict=True))
    monkeypatch.setattr(runs, "evaluate", lambda c, step, *_: dict(eval_loss=losses[int(step.optimizer.t)]))
    folder = tmp_path / "run"
    argv = "--save", folder, "--keep", "1", "--keep-best", "--eval-every", 1
    first = trains(*argv, "--save-every", "2", "--save-async", "--steps", 4)
    assert (first.row["best_step"], first.row["best_eval_loss"]) == (2, 3.0)
    assert steps_in(folder) == [2, 4]
    assert "best 3.0000, after step 2" in first.out
    assert train("--resume", folder / "step-00000002", "--eval-every", 1, "--steps", 3).row["resumed_after"] == 2
    assert train(*argv, "--steps", 6).row["best_step"] == 2 and steps_in(folder) == [2, 6]  # 3.0 again is not lower
    third = train(*argv, "--steps", 8)
    assert third.row["best_step"] == 7 and steps_in(folder) == [7, 8]  # saved because it was better
    elsewhere = train(*argv, "--steps", 8, "--resume", folder / "step-00000007", "--save", "other")
    assert elsewhere.row["best_step"] == 8 and elsewhere.row["best_eval_loss"] == 6.0  # the best of this folder


@pytest.mark.long
def test_a_run_goes_on_only_with_the_same_split(train, trains, folder):
    refused = train("--save", folder, "--steps", 8, "--eval-every", 2)
    fails(refused, 4, "held-out data no (now yes)")
    assert "--eval-every" in refused.err
    assert "evaluated" not in refused.out
    argv = "--save", "split"
    trains(*argv, "--eval-every", 2)
    refused = train(*argv, "--steps", 8)
    fails(refused, 4, "held-out data yes (now no)")
    other = trains(*argv, "--steps", 8, "--eval-every", "1", "--eval-batches", "2")
    assert "--eval-every 2 (now 1)" in other.out and [*evaluations(other)] == [7, 8]


@pytest.mark.long
def test_two_ranks_evaluate_and_write_as_one(trains, tmp_path, sources):
    """The text holds out three samples: a batch of four lacks one, and rank 1 has a micro-batch without a label."""
    argv = [*EVERY_2, "--sample", 40, "--data", sources["text"], "--seqlen", 8]
    out = tmp_path / "out"
    err = tmp_path / "err"
    results = tmp_path / "two" / "rows.jsonl"
    job = Job(2, [*TINY, *argv, *"--batch 1 --grad-accum 2".split(), "--results", results], out, err=err)
    one = trains(*argv, "--batch", 4)
    assert job.wait() == [0, 0], err.read_text()
    row, steps = read(results)
    assert [*evaluations(one)] == [2, 4, 6]
    assert row["eval_loss"] == steps[-1]["eval_loss"]
    found = {s["step"]: s["eval_loss"] for s in steps if "eval_loss" in s}
    assert found == pytest.approx(evaluations(one), rel=1e-6)
    head = "sample   4 bytes of held-out data, then after | 40 that the model wrote:\n"
    text = out.read_text()
    assert text.count(head) == 3 and "3 more held out" in text  # after steps 2, 4 and 6
    assert text.split(head)[3].split("\noutcome")[0] == one.out.split(head)[3].split("\noutcome")[0]


@pytest.mark.long
def test_simulated_ranks_evaluate_and_list_the_collectives_of_a_step(train):
    plain, done = (train("--world", 4, "--link", "none", *argv) for argv in ([], EVERY_2))
    assert done.code == 0
    assert [*evaluations(done)] == [2, 4, 6]
    assert done.row["collectives"] == plain.row["collectives"]


def test_a_loss_that_is_not_finite_is_told_and_ends_nothing(trains, monkeypatch):
    monkeypatch.setattr(runs, "evaluate", lambda *_: dict(eval_loss=math.nan, eval_bpb=math.nan))
    done = trains(*EVERY_2)
    assert done.row["outcome"] == "ok" and done.row["eval_loss"] == "nan"
    assert "held-out loss nan" in done.out and "held out loss nan" in done.out and done.row["loss"] < 6


def test_a_signal_in_an_evaluation_stops_it_and_loses_no_step(train, monkeypatch, tmp_path):
    def evaluate(c, step, batches, device, check_for_stop):
        os.kill(os.getpid(), signal.SIGTERM)
        check_for_stop()
        pytest.fail("it went on")

    monkeypatch.setattr(runs, "evaluate", evaluate)
    done = train(*EVERY_2, "--save", "run")
    assert done.code == 143
    assert "after step 2" in end_of_signal(done.err)
    assert [each.name for each in (tmp_path / "run").glob("step-*")] == ["step-00000002"]


def test_memory_that_runs_out_in_an_evaluation_says_where(train, monkeypatch):
    def forward(held, count):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Batches, "held_out", forward)
    done = train(*EVERY_2)
    fails(done, 6, "(evaluation)")
    assert done.row["outcome"] == "OOM eval"


# -------------------------------------------------------------------------------------------------------------- samples


@pytest.mark.long
def test_a_sample_of_token_ids_goes_on_beyond_the_length_of_a_sequence(train, trains, sources):
    done = trains("--data", sources["bin"], "--vocab", 2000, "--sample", 30)
    assert "sample   8 token ids of training data, then after | 30 that" in done.out
    given, _, written = done.out.split("wrote:\n")[1].split("\n")[0].partition(" | ")
    given = [int(word) for word in given.split()]
    written = [int(word) for word in written.split()]
    assert given == [*range(given[0], given[0] + 8)] and len(written) == 30 and max(written) < 2000
    assert train("--data", sources["bin"], "--vocab", 2000, "--sample", 30).out.count(" ".join(map(str, written))) == 1


@pytest.mark.long
def test_a_model_writes_what_it_has_learnt(trains, tmp_path):
    (tmp_path / "text").write_bytes(b"abcd" * 500)
    how = "--vocab 300 --lr 0.01 --warmup 5 --steps 60 --eval-every 60 --sample 24".split()  # ids from 256 on: no bytes
    done = trains("--data", f"text:{tmp_path}/text", *how)
    assert done.row["eval_loss"] < 0.5
    assert "abcdabcdabcdabcd" in done.out.split("|")[-1]


def test_what_a_model_writes_controls_no_terminal():
    ids = [*b"a\tb\n\x1b[2J\r\x07\xff", *"é".encode()]
    assert Batches.readable(SimpleNamespace(bytes=True), ids) == "a\tb\n\ufffd[2J\ufffd\ufffd\ufffdé"


# ------------------------------------------------------------------------------------------------- what is compiled

WAYS = ["--compile blocks", "--compile fwdbwd --grad-accum 2 --accum-sync last",
        pytest.param("--compile step", marks=ONE_GRAPH)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_an_evaluation_compiles_nothing_and_changes_no_compiled_step(how, train, trains):
    counted = {}
    for every in (1, 1000):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        done = trains("--eval-every", every, "--log-every", 1, "--sample", 3, *how.split())
        counted[every] = torch._dynamo.utils.counters["stats"]["unique_graphs"], lines(done), evaluations(done)[6]
    assert counted[1] == counted[1000]
    assert counted[1][0] > 0
    eager = train("--eval-every", 6, *how.replace(how.split()[1], "none").split())
    assert counted[1][2] == pytest.approx(eager.row["eval_loss"], rel=1e-5)
