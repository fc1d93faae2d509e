"""main.py: bad data ends in one line and its exit code; every started run, on one rank or two, in its row.

    pytest tests/test_main.py        # no GPU; bad flags: tests/test_config.py

Faults are caused in this process where they can be; two ranks are forked for what they print, torchrun starts for an
error that both have. Runs are eager and tiny.
"""

import gzip
import json
import math
import re
import signal
import struct
import threading
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from forked import Job
from harness import ONE_GRAPH
from running import TINY, one_line, read, torchrun

import main
from model import Transformer, cross_entropy
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
n compile_s first_step_cpu_s tok_s mfu mfu_palm hfu loss skipped eval_loss eval_bpb eval_ppl eval_step""".split()

# ----------------------------------------------------------------------------------------------------------- bad data


def header(count):
    return struct.pack("<3i", 20240520, 1, count).ljust(1024, b"\0")


DATA = {  # --data, the file's bytes (None: no file), what the line names beside the file; more in test_data.py
    "missing text": ("text", None, "No such file"),
    "one token too short": ("bin", bytes(2 * 16), "token 16"),
    "cut off": ("bin", header(50) + bytes(98), "byte 8"),
}


@pytest.mark.parametrize("case", DATA)
def test_a_bad_data_file_exits_3_naming_file_and_place(case, train, tmp_path):
    form, content, place = DATA[case]
    path = tmp_path / "planted.bin"
    if content is not None:
        path.write_bytes(content)
    done = train("--data", f"{form}:{path}")
    assert done.code == 3 and done.row is None
    line = one_line(done.err)
    assert str(path) in line and place in line, line


def test_data_just_long_enough_is_trained_on(train, tmp_path):
    (tmp_path / "planted.bin").write_bytes(struct.pack("<17H", *range(17)))
    assert train("--data", f"bin:{tmp_path}/planted.bin", "--steps", 1).code == 0


# ------------------------------------------------------------------------------------------------------------ one rank


def test_a_run_of_one_step_ends_well_and_claims_no_statistics(train):
    done = train("--steps", 1)
    assert done.code == 0 and done.err == ""
    assert done.row["n"] == 0 and done.row["step_ms"] is None and done.row["tok_s"] is None
    assert [s["step"] for s in done.steps] == [1] and done.row["loss"] == done.steps[0]["loss"]


def test_the_learning_rate_warms_up_and_decays_to_a_tenth():
    c = flags.resolve(flags.parse("--lr 1 --warmup 4 --steps 104".split()), "cpu", 1)
    lr = [learning_rate(c, k) for k in range(104)]
    assert lr[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a > b for a, b in zip(lr[4:], lr[5:], strict=False))
    assert lr[54] == pytest.approx(0.55) and 0.1 < lr[-1] < 0.101


def test_schedules_other_than_the_cosine():
    def rates(argv):
        c = flags.resolve(flags.parse(f"--lr 1 --warmup 4 --steps 100 {argv}".split()), "cpu", 1)
        return [learning_rate(c, k) for k in range(100)]

    assert rates("--schedule constant") == [0.25, 0.5, 0.75, *[1.0] * 97]
    wsd = rates("--schedule wsd")
    assert wsd[:81] == [0.25, 0.5, 0.75, *[1.0] * 78]
    falls = [a - b for a, b in zip(wsd[80:], wsd[81:], strict=False)]
    assert falls == pytest.approx([0.045] * 19) and wsd[-1] == pytest.approx(0.145)
    assert all(0.1 <= each <= 1 for each in rates("--schedule wsd --warmup 95")[94:])


def test_the_optimizers_flags_reach_it(train):
    plain = train("--log-every", 1)
    same = train(*"--weight-decay 0.1 --optimizer adamw:beta1=0.9:beta2=0.95 --schedule cosine --log-every 1".split())
    assert [s["loss"] for s in plain.steps] == [s["loss"] for s in same.steps]
    for argv in ("--weight-decay 0", "--optimizer adamw:beta1=0.5", "--optimizer adamw:beta2=0.5",
                  "--schedule constant --warmup 0"):
        other = train(*argv.split(), "--log-every", 1, "--steps", 6)
        assert other.code == 0 and other.steps[-1]["loss"] != plain.steps[-1]["loss"], argv


@pytest.mark.parametrize("compile", ["none", pytest.param("model", marks=pytest.mark.slow)])
def test_a_change_is_found_where_the_head_of_main_py_says(compile, train, monkeypatch):
    """A second loss term, an optimizer, a figure of each step and a column of the row."""
    plain = train("--log-every", 1, "--compile", compile)
    told, log = runs.Run.training, runs.Run.log

    def training(run, step):
        run.told["mine"] = 7
        return told(run, step)

    def with_term(logits, targets):
        loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")
        return loss + logits.float().logsumexp(-1).square().sum()

    class SGD(AdamW):
        def step(self, grads, bad):
            torch._foreach_sub_(self.shards, [self.lr * grad for grad in grads])

    monkeypatch.setitem(cross_entropy.__globals__, "cross_entropy", with_term)  # model.py's name for it
    monkeypatch.setattr(steps_of, "cross_entropy", with_term)
    first = train("--log-every", 1, "--compile", compile, "--steps", 2)
    monkeypatch.setattr(parallelize, "AdamW", SGD)
    monkeypatch.setattr(runs.Run, "log", lambda run, k, loss, lr: log(run, k, loss, lr, mine=k))
    monkeypatch.setattr(runs.Run, "training", training)
    other = train("--log-every", 1, "--compile", compile, "--steps", 2)
    assert first.steps[0]["loss"] > plain.steps[0]["loss"] + 1
    assert other.steps[0]["loss"] == first.steps[0]["loss"] and other.steps[1]["loss"] != first.steps[1]["loss"]
    assert [each["mine"] for each in other.steps] == [0, 1] and other.row["mine"] == 7


SYSTEM = {  # flags that must not change the loss: values, relative tolerance over six steps
    "wrapper none": ("--wrapper none", 0), "replicate": ("--mode replicate", 0),
    "hybrid": ("--mode hybrid_shard:1", 0), "no reshard": ("--no-reshard", 0),
    "keep last": ("--keep-last", 0), "min shard": ("--min-shard-mib 0.001", 0),
    "mlp": ("--remat mlp", 0), "attn": ("--remat attn", 0),
    "both": ("--remat both", 0), "block": ("--remat block", 0), "pointwise": ("--remat pointwise", 0),
    "half": ("--depth 2 --remat block:0.5", 0), "chunked": ("--loss chunked:7", 1e-6),
    "flash": ("--attn flash", 0), "math": ("--attn math --remat block", 1e-5),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(one_thread, tmp_path_factory):
    """The steps of a run without system flags."""
    results = tmp_path_factory.mktemp("plain") / "rows.jsonl"
    argv = [*TINY, "--depth", "2", "--log-every", "1", "--results", str(results)]
    assert main.main(flags.parse(argv), 0, 0, 1) == 0
    return read(results)[1]


@pytest.mark.parametrize("case", SYSTEM)
def test_a_system_flag_does_not_change_the_loss(case, plain, train):
    argv, tolerance = SYSTEM[case]
    other = train("--depth", 2, *argv.split(), "--log-every", 1)
    assert other.code == 0
    for a, b in zip(plain, other.steps, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance, abs=0), a["step"]


def test_bf16_runs_and_stays_near_fp32(train):
    exact = train("--log-every", 1)
    half = train("--param-dtype", "bf16", "--reduce-dtype", "bf16", "--adam-dtype", "bf16", "--log-every", 1)
    assert half.code == 0 and half.row["param_dtype"] == half.row["reduce_dtype"] == "bf16"
    for a, b in zip(exact.steps, half.steps, strict=True):
        assert 0 < abs(a["loss"] - b["loss"]) < 0.02, a["step"]


def test_overfit_learns_its_batch(train):
    done = train("--data", "overfit", "--steps", 60, "--lr", "0.02", "--seqlen", 8)
    assert done.code == 0 and done.row["loss"] < done.steps[0]["loss"] / 2


def test_profiled_steps_leave_a_trace_and_enter_no_statistic(train, tmp_path):
    plain = train("--steps", 9)
    done = train("--steps", 9, "--profile", tmp_path / "traces")
    assert (plain.row["n"], done.row["n"]) == (6, 3)
    trace = tmp_path / "traces" / "rank0.trace.json.gz"
    assert str(trace) in done.out and "memory snapshot: it needs CUDA" in done.out
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"step 3", "step 4", "step 5", "aten::mm"} <= names and not {"step 2", "step 6"} & names


def test_v_prints_stages_and_placements_and_vv_writes_norms(train):
    quiet, v, vv = train(), train("-v"), train("-vv", "--log-every", 2)
    stages = ["model", "wrap", "weights", "optimizer", "first step"]
    patterns = [rf"^{stage} +[\d']+ +[\d']+$" for stage in stages]
    patterns += [r"^ +blocks\.0\.mlp\.up\.weight +\(128, 32\) +Shard\(dim=0\)"]
    patterns += [r"^units \(\d\): blocks\.0.*; in none: 4 of 16 parameters, [\d']+ elements$"]
    for done, says in ((quiet, False), (v, True), (vv, True)):
        assert done.code == 0 and done.err == ""
        assert [bool(re.search(pattern, done.out, re.MULTILINE)) for pattern in patterns] == [says] * len(patterns)
    assert not any(key.startswith(("norm/", "grad/")) for step in v.steps for key in step)
    assert [step["step"] for step in vv.steps] == [1, 2, 4, 6]
    for step in vv.steps:
        grads = {key: value for key, value in step.items() if key.startswith("grad/")}
        norms = {key: value for key, value in step.items() if key.startswith("norm/")}
        assert len(grads) == len(norms) == 16 and "grad/blocks.0.attn.q.weight" in grads
        assert math.sqrt(sum(g * g for g in grads.values())) == pytest.approx(step["grad_norm"], rel=1e-5)
        assert norms["norm/norm.weight"] == pytest.approx(math.sqrt(32), rel=0.05)
    assert [s["loss"] for s in vv.steps if s["step"] in (1, 6)] == [s["loss"] for s in quiet.steps]


def test_compile_options_are_read_as_python_literals():
    parsed = flags.parse("--compile-options max_autotune=True a.b=2 name=triton eq=x=1".split())
    assert compile_options(parsed) == {"max_autotune": True, "a.b": 2, "name": "triton", "eq": "x=1"}
    assert compile_options(flags.parse([])) == {}
    assert compile_options(flags.parse("--compile-options plain a=b".split())) == {"plain": True, "a": "b"}


@pytest.mark.parametrize(("mode", "plain"), [
    ("blocks", []), ("model", ["plain"]), ("fwdbwd", ["plain"]), pytest.param("step", [], marks=ONE_GRAPH),
])  # fmt: skip
def test_compile_options_reach_every_graph_of_the_model(mode, plain, train, monkeypatch):
    ran, compile = [], torch.compile

    def record(fn=None, options=None, **how):
        compiled, name = compile(fn, **{**how, "backend": "eager"}), getattr(fn, "__name__", type(fn).__name__)

        def run(*args, **kwargs):
            ran.append((name, options))
            return compiled(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", record)
    ours = ["max_autotune=False", "triton.cudagraphs=False"]
    done = train("--compile", mode, "--compile-options", *plain, *ours, "--steps", 2, "--world", 2, "--link", "none")
    assert done.code == 0, done.err
    options = {"max_autotune": False, "triton.cudagraphs": False}
    graphs = [how for name, how in ran if name != "update"]  # the optimizer's graph has none of them
    assert graphs and all(how.items() >= options.items() for how in graphs), ran
    assert all((how == options) == bool(plain) for how in graphs), ran
    assert done.row["compile"] == mode and done.row["flags"]["compile_options"] == [*plain, *ours]


def test_debug_shows_the_traceback(train, monkeypatch):
    planted(monkeypatch, "fwd", RuntimeError("planted"))
    done = train("--debug")
    assert "Traceback" in done.err and "error: rank 0: failed: RuntimeError: planted" in done.err.splitlines()[-1]
    assert done.code == 1 and done.row["outcome"] == "failed: RuntimeError: planted"


@pytest.mark.parametrize("how", ["", "--wrapper fsdp2", "--wrapper ddp", "--mode hybrid_shard:2"])
def test_a_simulated_world_trains_and_its_row_says_so(how, train):
    done = train("--world", 8, "--link", "20:370", "--steps", 5, "--compile", "none", *how.split())
    assert done.code == 0 and done.row["outcome"] == "ok", done.err
    assert done.row["world"] == "8(sim 20:370)" and "8(sim 20:370) ranks" in done.out
    moved = done.row["collectives"]
    assert ("all_gather" in moved) == ("reduce_scatter" in moved) == ("ddp" not in how)
    assert all(each["n"] > 0 and each["mib"] >= 0 and each["ms"] >= 0.02 * each["n"] for each in moved.values())
    assert done.row["tok_s"] == pytest.approx(8 * done.row["tok_s_rank"])
    assert abs(done.row["loss"] - math.log(256)) < 0.5  # equal shards: a model that can learn little
    assert "collectives" not in train("--compile", "none").row  # and afterwards a real group


# --------------------------------------------------------------------------------------------- what ends a started run


def planted(monkeypatch, where, error, call=1):
    """Raise `error` in the `call`-th forward, backward or update, or while weights are initialised."""
    took, count = main.Run.take, []

    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise error

    def due():
        count.append(0)
        return len(count) == call

    def take(run, step):
        took(run, step)
        loss_fn, update_fn = step.loss_fn, step.update_fn

        def loss(*batch):
            if where == "bwd":
                return Raise.apply(loss_fn(*batch)) if due() else loss_fn(*batch)
            if where == "fwd" and due():
                raise error
            return loss_fn(*batch)

        def update(*args):
            if where == "step" and due():
                raise error
            return update_fn(*args)

        step.loss_fn, step.update_fn = loss, update

    def init(_):
        raise error

    monkeypatch.setattr(main.Run, "take", take)
    if where == "init":
        monkeypatch.setattr(Transformer, "init_weights", init)


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")


@pytest.mark.parametrize("where", ["init", "fwd", "bwd", "step"])
def test_out_of_memory_exits_6_with_the_phase_in_the_row_and_what_to_turn(where, train, monkeypatch):
    planted(monkeypatch, where, OOM, call=1 if where == "init" else 3)
    done = train("--log-every", 1)
    assert done.code == 6 and done.row["outcome"] == f"OOM {where}"
    assert [s["step"] for s in done.steps] == ([] if where == "init" else [1, 2])
    assert done.row["n"] == 0 and done.row["step_ms"] is None and done.row["world"] == 1
    assert set(KEYS) <= done.row.keys()
    line = one_line(done.err)
    assert f"OOM {where}" in line and "2.00 GiB" in line, f"neither where nor the wanted bytes: {line}"
    knobs = ("smaller model", "ranks") if where == "init" else ("--batch", "--remat", "ranks")
    assert all(knob in line for knob in knobs), f"no way out: {line}"


def test_weights_that_are_bad_leave_a_row_in_every_compile_mode(train, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    for compile in "none", "fwdbwd":
        done = train("--init", tmp_path / "bad.safetensors", "--compile", compile)
        assert done.code == 4 and done.row["outcome"].startswith("failed: ") and "bad.safetensors" in one_line(done.err)


def test_ranks_leave_each_other_while_signals_and_hangs_are_still_watched(train, monkeypatch):
    """Else a second Ctrl-C, or torchrun's SIGTERM, would kill a rank in the last barrier, after its row says ok."""
    seen, leave = [], runs.shutdown

    def note():
        seen.append((signal.getsignal(signal.SIGTERM), [thread.name for thread in threading.enumerate()]))
        leave()

    monkeypatch.setattr(runs, "shutdown", note)
    assert train().code == 0
    [(handler, threads)] = seen
    assert handler not in (signal.SIG_DFL, signal.SIG_IGN) and "watchdog" in threads


def test_any_other_error_is_one_line_exit_1_and_a_row(train, monkeypatch):
    planted(monkeypatch, "bwd", ValueError("planted\nin two lines"), call=2)
    done = train("--log-every", 1)
    assert done.code == 1 and done.row["outcome"] == "failed: ValueError: planted in two lines"
    assert "ValueError: planted in two lines" in one_line(done.err)
    assert done.row["loss"] == done.steps[0]["loss"] and len(done.steps) == 1


def test_a_results_file_that_is_lost_in_mid_run_costs_a_warning_and_not_the_run(train, monkeypatch):
    took = main.Run.take

    def take(run, step):  # after the check at the start: the file becomes a folder
        Path(run.c.results).unlink()
        Path(run.c.results).mkdir()
        took(run, step)

    monkeypatch.setattr(main.Run, "take", take)
    done = train()
    assert done.code == 0 and "outcome  ok" in done.out
    assert all(line.startswith("warning: ") for line in done.err.splitlines())
    assert "results file: IsADirectoryError" in done.err and '"outcome": "ok"' in done.err, "the row is lost"


# ----------------------------------------------------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    out, err, results = folder / "out", folder / "err", folder / "deep" / "rows.jsonl"
    argv = [*TINY, "--keep-last", "--log-every", 1, "--results", results]
    argv += ["--wandb", "offline:g:tags=a,b"]
    assert Job(2, argv, out, err=err, cwd=folder, COLUMNS="100").wait() == [0, 0], err.read_text()
    return SimpleNamespace(out=out.read_text(), err=err.read_text(), folder=folder, results=results)


def test_two_ranks_print_the_header_the_steps_and_the_result_once(two_ranks):
    lines = two_ranks.out.splitlines()
    expected = [r"commit [0-9a-f]{12}(?: \(dirty\))?, torch \S+, CPU .*, 2 ranks",
                r"depth=1  width=32  head_dim=16  grouping=2  seqlen=16  batch=2  effective_batch=4  steps=6  "
                r"keep_last=True  compile=none; all flags: (\S+)",
                r"attention: sdpa flash \(auto\)",
                r"data stdlib, .* tokens, .*", r"28'000 parameters, .* MiB on this rank; 0 of 16 replicated.*",
                r"weight decay 0\.1 for 8 parameters; none for the 8 with one dimension",
                r"[\d.]+ MFLOP per token \(causal; PaLM [\d.]+\), \S+ TFLOP per step and rank", r"ln V = 5\.5452",
                r"note: --warmup 10 is not below --steps 6: the learning rate ends at 0\.0018",
                *(rf"step {k}/6  loss \d\.\d{{4}}  lr \S+  \|g\| \S+  .* ms  .* tok/s" for k in range(1, 7)),
                r"outcome  ok, loss \d\.\d{4}", r"memory   .* MiB resident, .*",
                r"step     .* ms median \[.*\] n 3, compile n/a s", r"speed    .* tok/s, .* tok/s/rank",
                r"MFU, %   n/a: no peak is known of CPU .*", r"row      \S+\.jsonl", r"curve    \S+\.steps/\S+\.jsonl",
                r"W&B      wandb sync \S+/offline-run-\S+",
                r"draw it  \S+ -m lab\.report \S+ --run \S+ --html \S+\.html"]  # fmt: skip
    assert len(lines) == len(expected), two_ranks.out
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (pattern, line)
    settings = json.loads((two_ranks.folder / re.fullmatch(expected[1], lines[1])[1]).read_text())
    assert settings == read(two_ranks.results)[0]["flags"] | dict(world=2)


def test_two_ranks_append_one_row_with_every_key_and_the_steps(two_ranks):
    row, steps = read(two_ranks.results)
    assert set(KEYS) <= row.keys(), set(KEYS) - row.keys()
    settings = dict(world=2, outcome="ok", wrapper="simple", mode="fully_shard", compile="none", attn="sdpa",
                    remat="none", remat_ratio=1.0, loss_kind="full", depth=1, width=32, seqlen=16, batch=2,
                    grad_accum=1, param_dtype="fp32", reduce_dtype="fp32", n=3, compile_s=None, mfu=None,
                    mfu_palm=None, hfu=None)  # fmt: skip
    assert {key: row[key] for key in settings} == settings
    given = dict(depth=1, width=32, head_dim=16, grouping=2, seqlen=16, steps=6, batch=2, compile="none",
                 wandb="offline", group="g", tags=["a", "b"])  # fmt: skip
    assert {name: row["flags"][name] for name in given} == given
    assert {f.name for group in (flags.Training, flags.System) for f in fields(group)} <= row["flags"].keys()
    assert re.fullmatch("[0-9a-f]{40}", row["commit"]) and isinstance(row["dirty"], bool)
    assert row["torch"] == torch.__version__ and row["device"].startswith("CPU")
    assert row["step_ms_min"] <= row["step_ms"] <= row["step_ms_max"] and row["peak_rss_mib"] > 100
    assert row["tok_s"] == pytest.approx(2 * 2 * 16 / row["step_ms"] * 1e3)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    assert all({"loss", "lr", "grad_norm", "ms", "tok_s"} <= s.keys() for s in steps)
    assert row["loss"] == steps[-1]["loss"] and abs(steps[0]["loss"] - math.log(256)) < 0.1


@pytest.mark.parametrize(
    ("argv", "code", "pattern"),
    [("--depth 0", 2, "--depth 0: must be at least 1"),
     pytest.param("--data bin:/absent.bin", 3, "error: .*/absent.bin", marks=pytest.mark.slow)],
)
def test_two_ranks_print_an_error_that_both_have_once(argv, code, pattern, tmp_path):
    done = torchrun(*TINY, "--results", tmp_path / "rows.jsonl", *argv.split())
    assert done.code == code
    assert len(re.findall(pattern, done.err)) == 1, f"not once: {done.err}"
    assert "Traceback" not in done.err and done.out == ""
