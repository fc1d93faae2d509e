"""main.py: what its flags do, and what a started run, on one rank or two, prints and leaves in its row.

    pytest tests/test_main.py        # no GPU; bad flags: tests/test_config.py, bad data: tests/test_data.py

Faults are caused in this process; two ranks are forked for what they print. Runs are eager and tiny.
"""

import json
import math
import re
import signal
import threading
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import planted
import pytest
import torch
import torch.nn.functional as F
from forked import Job
from harness import ONE_GRAPH
from running import TINY, fails, read, resolved

import main
from model import cross_entropy
from trainer import config as flags
from trainer import parallelize
from trainer import run as runs
from trainer import step as steps_of
from trainer.optimizer import AdamW, learning_rate
from trainer.parallelize import compile_options

pytestmark = pytest.mark.usefixtures("isolated")

# DESIGN, "A row"; what depends on the device is that of a CPU
KEYS = """date commit dirty torch device world wrapper mode compile attn remat remat_ratio loss_kind depth width seqlen
batch grad_accum param_dtype reduce_dtype flags outcome peak_rss_mib first_step_peak_mib step_ms step_ms_min step_ms_max
n compile_s first_step_cpu_s tok_s mfu mfu_palm hfu loss skipped eval_loss eval_bpb eval_ppl eval_step
eval_examples""".split()

# ------------------------------------------------------------------------------------------------------------ one rank


def test_a_run_of_one_step_ends_well_and_claims_no_statistics(trains):
    done = trains("--steps", 1)
    assert done.err == ""
    assert done.row["n"] == 0 and done.row["step_ms"] is None and done.row["tok_s"] is None
    assert done.steps[0]["step"] == 1
    assert [done.row["loss"]] == done.losses


def rates(argv):
    """Of each step."""
    c = resolved(f"--lr 1 --warmup 4 {argv}")
    return [learning_rate(c, k) for k in range(c.steps)]


def test_the_learning_rate_warms_up_and_decays_to_a_tenth():
    lr = rates("--steps 104")
    assert lr[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a > b for a, b in zip(lr[4:], lr[5:], strict=False))
    assert lr[54] == pytest.approx(0.55)
    assert 0.1 < lr[-1] < 0.101


@pytest.mark.long
def test_a_warmup_by_its_share_of_the_steps_is_that_of_as_many_steps():
    def of(argv):
        c = resolved(f"--lr 1 {argv}")
        return [learning_rate(c, k) for k in range(c.steps)]

    for schedule in ("cosine", "wsd", "constant"):
        # Rounded up, as transformers does.
        usual = f"--steps 33 --schedule {schedule}"
        assert of(f"{usual} --warmup-ratio 0.1") == of(f"{usual} --warmup 4")
    assert of("--steps 33 --warmup-ratio 0.1") != of("--steps 33")


def test_schedules_other_than_the_cosine():
    assert rates("--steps 100 --schedule constant") == [0.25, 0.5, 0.75, *[1.0] * 97]
    wsd = rates("--steps 100 --schedule wsd")
    assert wsd[:81] == [0.25, 0.5, 0.75, *[1.0] * 78]
    falls = [a - b for a, b in zip(wsd[80:], wsd[81:], strict=False)]
    assert falls == pytest.approx([0.045] * 19)
    assert wsd[-1] == pytest.approx(0.145)
    assert all(0.1 <= each <= 1 for each in rates("--steps 100 --schedule wsd --warmup 95")[94:])


@pytest.mark.long
def test_the_optimizers_flags_reach_it(train, trains):
    plain = train("--log-every", 1)
    same = train(*"--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --schedule cosine --log-every 1".split())
    assert plain.losses == same.losses
    for argv in ("--weight-decay 0", "--adam-beta1 0.5", "--adam-beta2 0.5",
                  "--schedule constant --warmup 0"):
        other = trains(*argv.split(), "--log-every", 1, "--steps", 6)
        assert other.losses[-1] != plain.losses[-1], argv


def test_a_change_is_found_where_the_head_of_main_py_says(train, monkeypatch):
    """A second loss term, an optimizer, a figure of each step and a column of the row."""
    plain = train("--log-every", 1)
    plain_training = runs.Run.training
    log_step = runs.Run.log_step

    def training(run, *args):
        run.extra_columns["mine"] = 7
        return plain_training(run, *args)

    def with_term(logits, targets):
        loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")
        return loss + logits.float().logsumexp(-1).square().sum()

    class SGD(AdamW):
        def step(self, grads, skip):
            torch._foreach_sub_(self.shards, [self.lr * grad for grad in grads])

    monkeypatch.setitem(cross_entropy.__globals__, "cross_entropy", with_term)  # model.py's name for it
    monkeypatch.setattr(steps_of, "cross_entropy", with_term)
    first = train("--log-every", 1, "--steps", 2)
    monkeypatch.setattr(parallelize, "AdamW", SGD)
    monkeypatch.setattr(runs.Run, "log_step", lambda run, k, loss, lr: log_step(run, k, loss, lr, mine=k))
    monkeypatch.setattr(runs.Run, "training", training)
    other = train("--log-every", 1, "--steps", 2)
    assert first.losses[0] > plain.losses[0] + 1
    assert other.losses[0] == first.losses[0]
    assert other.losses[1] != first.losses[1]
    assert [each["mine"] for each in other.steps] == [0, 1]
    assert other.row["mine"] == 7


SYSTEM = {  # flags that must not change the loss: values, relative tolerance over six steps
    "wrapper none": ("--wrapper none", 0), "replicate": ("--mode replicate", 0),
    "hybrid": ("--mode hybrid_shard --replicas 1", 0), "no reshard": ("--no-reshard", 0),
    "keep last": ("--keep-last", 0), "min shard": ("--min-shard-mib 0.001", 0),
    "mlp": ("--remat mlp", 0), "attn": ("--remat attn", 0),
    "both": ("--remat both", 0), "block": ("--remat block", 0), "pointwise": ("--remat pointwise", 0),
    "half": ("--depth 2 --remat block --remat-ratio 0.5", 0), "chunked": ("--loss chunked --loss-chunk 7", 1e-6),
    "flash": ("--attn flash", 0), "math": ("--attn math --remat block", 1e-5),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(one_thread, tmp_path_factory):
    """The losses of a run without system flags."""
    results = tmp_path_factory.mktemp("plain") / "rows.jsonl"
    argv = [*TINY, "--depth", "2", "--log-every", "1", "--results", str(results)]
    assert main.main(flags.parse(argv), 0, 0, 1) == 0
    return [step["loss"] for step in read(results)[1]]


@pytest.mark.long
@pytest.mark.parametrize("case", SYSTEM)
def test_a_system_flag_does_not_change_the_loss(case, plain, trains):
    argv, tolerance = SYSTEM[case]
    other = trains("--depth", 2, *argv.split(), "--log-every", 1)
    assert other.losses == pytest.approx(plain, rel=tolerance, abs=0)


@pytest.mark.long
def test_bf16_runs_and_stays_near_fp32(train, trains):
    exact = train("--log-every", 1)
    half = trains("--param-dtype", "bf16", "--reduce-dtype", "bf16", "--adam-dtype", "bf16", "--log-every", 1)
    assert half.row["param_dtype"] == half.row["reduce_dtype"] == "bf16"
    assert all(0 < abs(a - b) < 0.02 for a, b in zip(exact.losses, half.losses, strict=True))


@pytest.mark.long
def test_overfit_learns_its_batch(trains):
    done = trains("--data", "overfit", "--steps", 60, "--lr", "0.02", "--seqlen", 8)
    assert done.row["loss"] < done.losses[0] / 2


@pytest.mark.long
def test_v_prints_stages_and_placements_and_vv_writes_norms(train):
    quiet = train()
    v = train("-v")
    vv = train("-vv", "--log-every", 2)
    stages = ["model", "wrap", "weights", "optimizer", "first step"]
    patterns = [rf"^{stage} +[\d']+ +[\d']+$" for stage in stages]
    patterns += [r"^ +blocks\.0\.mlp\.up\.weight +\(128, 32\) +Shard\(dim=0\)"]
    patterns += [r"^units \(\d\): blocks\.0.*; in none: 4 of 16 parameters, [\d']+ elements$"]
    for done, says in ((quiet, False), (v, True), (vv, True)):
        assert done.code == 0
        assert done.err == ""
        assert [bool(re.search(pattern, done.out, re.MULTILINE)) for pattern in patterns] == [says] * len(patterns)
    assert not any(key.startswith(("norm/", "grad/")) for step in v.steps for key in step)
    assert vv.logged == [1, 2, 4, 6]
    for step in vv.steps:
        grads = {key: value for key, value in step.items() if key.startswith("grad/")}
        norms = {key: value for key, value in step.items() if key.startswith("norm/")}
        assert len(grads) == len(norms) == 16
        assert "grad/blocks.0.attn.q.weight" in grads
        assert math.sqrt(sum(g * g for g in grads.values())) == pytest.approx(step["grad_norm"], rel=1e-5)
        assert norms["norm/norm.weight"] == pytest.approx(math.sqrt(32), rel=0.05)
    assert [s["loss"] for s in vv.steps if s["step"] in (1, 6)] == [s["loss"] for s in quiet.steps]


def test_compile_options_are_read_as_python_literals():
    parsed = flags.parse("--compile-options max_autotune=True a.b=2 name=triton eq=x=1".split())
    assert compile_options(parsed) == {"max_autotune": True, "a.b": 2, "name": "triton", "eq": "x=1"}
    assert compile_options(flags.parse([])) == {}
    assert compile_options(flags.parse("--compile-options plain a=b".split())) == {"plain": True, "a": "b"}


@pytest.mark.long
@pytest.mark.parametrize(("mode", "plain"), [
    ("blocks", []), ("model", ["plain"]), ("fwdbwd", ["plain"]), pytest.param("step", [], marks=ONE_GRAPH),
])  # fmt: skip
def test_compile_options_reach_every_graph_of_the_model(mode, plain, trains, monkeypatch):
    ran = []
    compile = torch.compile

    def record(fn=None, options=None, **how):
        compiled = compile(fn, **{**how, "backend": "eager"})
        name = getattr(fn, "__name__", type(fn).__name__)

        def run(*args, **kwargs):
            ran.append((name, options))
            return compiled(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", record)
    ours = ["max_autotune=False", "triton.cudagraphs=False"]
    done = trains("--compile", mode, "--compile-options", *plain, *ours, "--steps", 2, "--world", 2, "--link", "none")
    options = {"max_autotune": False, "triton.cudagraphs": False}
    graphs = [how for name, how in ran if name != "update"]  # the optimizer's graph has none of them
    assert graphs and all(how.items() >= options.items() for how in graphs), ran
    assert all((how == options) == bool(plain) for how in graphs), ran
    assert done.row["compile"] == mode
    assert done.row["flags"]["compile_options"] == [*plain, *ours]


def test_debug_shows_the_traceback(train):
    done = train("--debug", fault="0:1:forward:raise")
    told = "failed: RuntimeError: an injected fault"
    assert "Traceback" in done.err
    assert f"error: rank 0: {told}" in done.err.splitlines()[-1]
    assert done.code == 1
    assert done.row["outcome"] == told


@pytest.mark.long
@pytest.mark.parametrize("how", ["", "--wrapper fsdp2", "--wrapper ddp", "--mode hybrid_shard --replicas 2"])
def test_a_simulated_world_trains_and_its_row_says_so(how, train, trains):
    done = trains("--world", 8, "--link", "20:370", "--steps", 5, "--compile", "none", *how.split())
    assert done.row["outcome"] == "ok", done.err
    assert done.row["world"] == "8(sim 20:370)"
    assert "8(sim 20:370) ranks" in done.out
    moved = done.row["collectives"]
    assert ("all_gather" in moved) == ("reduce_scatter" in moved) == ("ddp" not in how)
    assert all(each["n"] > 0 and each["mib"] >= 0 and each["ms"] >= 0.02 * each["n"] for each in moved.values())
    assert done.row["tok_s"] == pytest.approx(8 * done.row["tok_s_rank"])
    assert abs(done.row["loss"] - math.log(256)) < 0.5  # equal shards: a model that can learn little
    assert "collectives" not in train("--compile", "none").row  # and afterwards a real group


# --------------------------------------------------------------------------------------------- what ends a started run


def test_ranks_leave_each_other_while_signals_and_hangs_are_still_watched(trains, monkeypatch):
    """Else a second Ctrl-C, or torchrun's SIGTERM, would kill a rank in the last barrier, after its row says ok."""
    seen = []
    leave = runs.shutdown

    def note():
        seen.append((signal.getsignal(signal.SIGTERM), [thread.name for thread in threading.enumerate()]))
        leave()

    monkeypatch.setattr(runs, "shutdown", note)
    trains()
    [(handler, threads)] = seen
    assert handler not in (signal.SIG_DFL, signal.SIG_IGN)
    assert "watchdog" in threads


def test_any_other_error_is_one_line_exit_1_and_a_row(train, monkeypatch):
    monkeypatch.setitem(planted.ERRORS, "raise", lambda: ValueError("planted\nin two lines"))
    done = train("--log-every", 1, fault="0:2:backward:raise")
    fails(done, 1, "ValueError: planted in two lines")
    assert done.row["outcome"] == "failed: ValueError: planted in two lines"
    assert set(KEYS) <= done.row.keys()
    assert done.losses == [done.row["loss"]]


def test_a_results_file_that_is_lost_in_mid_run_costs_a_warning_and_not_the_run(trains, monkeypatch):
    took = main.Run.resume_into

    def take(run, step):  # after the check at the start: the file becomes a folder
        Path(run.config.results).unlink()
        Path(run.config.results).mkdir()
        took(run, step)

    monkeypatch.setattr(main.Run, "resume_into", take)
    done = trains()
    assert "outcome  ok" in done.out
    assert all(line.startswith("warning: ") for line in done.err.splitlines())
    assert "results file: IsADirectoryError" in done.err and '"outcome": "ok"' in done.err, "the row is lost"


# ----------------------------------------------------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    out = folder / "out"
    err = folder / "err"
    results = folder / "deep" / "rows.jsonl"
    argv = [*TINY, "--keep-last", "--log-every", 1, "--results", results]
    argv += ["--tracker", "wandb", "--wandb-mode", "offline", "--tracker-group", "g", "--wandb-tags", "a", "b"]
    assert Job(2, argv, out, err=err, cwd=folder, COLUMNS="100").wait() == [0, 0], err.read_text()
    return SimpleNamespace(out=out.read_text(), err=err.read_text(), folder=folder, results=results)


def test_two_ranks_print_the_header_the_steps_and_the_result_once(two_ranks):
    # A path that does not fit beside its words has a line of its own.
    lines = two_ranks.out.replace("all flags:\n    ", "all flags: ").splitlines()
    expected = [r"commit [0-9a-f]{12}(?: \(dirty\))?, torch \S+", r"CPU .*, 2 ranks",
                r"depth=1  width=32  head_dim=16  grouping=2  seqlen=16  batch=2  effective_batch=4  steps=6",
                r"    keep_last=True  compile=none", r"all flags: (\S+)",
                r"attention: sdpa flash \(auto\)",
                r"data stdlib, .* tokens, .*", r"28'000 parameters, .* MiB on this rank",
                r"weight decay 0\.1 for 8 parameters, none for the 8 with one dimension",
                r"[\d.]+ MFLOP per token \(causal; PaLM [\d.]+\)", r"\S+ TFLOP per step and rank",
                r"ln V = 5\.5452: the loss where every token is equally likely",
                r"note: --warmup 10 leaves none of --steps 6 after warm-up: the learning rate ends at 0\.0018",
                *(rf"step {k}/6  loss \d\.\d{{4}}  lr \S+  \|g\| \S+  .* ms  .* tok/s" for k in range(1, 7)),
                r"outcome  ok, loss \d\.\d{4}", r"memory   .* MiB resident, .*",
                r"step     .* ms median of 3 steps \[.*\]", r"speed    .* tok/s, .* tok/s/rank",
                r"row      \S+\.jsonl", r"curve    \S+\.steps/\S+\.jsonl",
                r"repeat   \S*bin/torchrun --nproc-per-node 2 main\.py --config \S+\.settings\.json",
                r"wandb    wandb sync \S+/offline-run-\S+",
                r"draw it  \S+ -m lab\.report \S+ --run \S+ --html \S+\.html"]  # fmt: skip
    assert len(lines) == len(expected), two_ranks.out
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (pattern, line)
    header = two_ranks.out.partition("ln V = ")[0].splitlines()
    assert max(len(line) for line in header if ".settings.json" not in line) <= 100
    settings = json.loads((two_ranks.folder / re.fullmatch(expected[4], lines[4])[1]).read_text())
    assert settings == read(two_ranks.results)[0]["flags"]


def test_two_ranks_append_one_row_with_every_key_and_the_steps(two_ranks):
    row, steps = read(two_ranks.results)
    assert set(KEYS) <= row.keys(), set(KEYS) - row.keys()
    settings = dict(world=2, outcome="ok", wrapper="simple", mode="fully_shard", compile="none", attn="auto",
                    remat="none", remat_ratio=1.0, loss_kind="full", depth=1, width=32, seqlen=16, batch=2,
                    grad_accum=1, param_dtype="fp32", reduce_dtype="fp32", n=3, compile_s=None, mfu=None,
                    mfu_palm=None, hfu=None)  # fmt: skip
    assert {key: row[key] for key in settings} == settings
    given = dict(depth=1, width=32, head_dim=16, grouping=2, seqlen=16, steps=6, batch=2, compile="none",
                 tracker=["wandb"], wandb_mode="offline", tracker_group="g", wandb_tags=["a", "b"])  # fmt: skip
    assert {name: row["flags"][name] for name in given} == given
    assert {f.name for group in (flags.Training, flags.System) for f in fields(group)} <= row["flags"].keys()
    assert re.fullmatch("[0-9a-f]{40}", row["commit"])
    assert isinstance(row["dirty"], bool)
    assert row["torch"] == torch.__version__
    assert row["device"].startswith("CPU")
    assert row["step_ms_min"] <= row["step_ms"] <= row["step_ms_max"]
    assert row["peak_rss_mib"] > 100
    assert row["tok_s"] == pytest.approx(2 * 2 * 16 / row["step_ms"] * 1e3)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    assert all({"loss", "lr", "grad_norm", "ms", "tok_s"} <= s.keys() for s in steps)
    assert row["loss"] == steps[-1]["loss"]
    assert abs(steps[0]["loss"] - math.log(256)) < 0.1
