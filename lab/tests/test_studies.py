"""What all studies share, and the arithmetic of those that count without ranks. Never a speed."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import one_line, rows_of

from lab.report import __main__ as report
from lab.studies import __main__ as everything
from lab.studies import accounting, pipeline, precision, study
from trainer.step_costs import kept_per_block

ROOT = Path(study.__file__).parents[2]


@pytest.mark.parametrize("name", study.names())
def test_a_study_has_what_the_shared_part_calls(name):
    module = study.study(name)
    assert all(callable(getattr(module, each)) for each in ("settings", "measure", "table", "figure"))
    assert f"python -m lab.studies.{name}" in module.__doc__


# A command line of a study, and what its one line on stderr says. Flags of all studies are tried with one of them.
REFUSED = {
    "accounting --repeat 0": "--repeat 0: must be at least 1",
    "accounting --foo": "--foo: no such flag",
    "accounting --device gpu": "--device: invalid choice",
    "accounting --small --results /proc/none/x.jsonl": "--results /proc/none/x.jsonl",
    "accounting --small --plots /proc/none": "--plots /proc/none: ",
    f"accounting --small --plots {__file__}": f"--plots {__file__}: File exists",
    "attention": "--device cpu: the default lengths are for a GPU; give --small, or --seqlen",
    "attention --sweep reference --seqlen 1000": "--seqlen 1000: must divide the 32768 tokens",
    "attention --head-dim 0": "--head-dim 0: must be at least 1",
    "attention --heads 32 --kv-heads 5": "--kv-heads 5: must divide the 32",
    "attention --backend fast": "--backend: invalid choice: 'fast'",
    "collectives --ranks 17": "--ranks 17: a study starts 16 processes at most",
    "collectives --ranks 0": "--ranks 0: must be at",
    "collectives --ranks 1": "--ranks 1: one rank has nobody",
    "collectives --mb -1": "--mb -1: must be above 0",
    "collectives --dtypes int3": "--dtypes: invalid choice",
    "collectives --backend nccl": "--backend nccl: not there for cpu; use gloo",
    "collectives --backend x": "--backend x: not",
    "collectives --pieces 0": "--pieces 0: must be at least 1",
    "ddp --link none": "--link none: has no latency or takes no time",
    "ddp --link fast": "--link fast: must be",
    "ddp --link measured:none.jsonl": "--link measured:none.jsonl: No such file",
    "ddp --ranks 99": "--ranks 99: a study starts 16",
    "ddp --ranks 1": "--ranks 1: one rank has nobody",
    "ddp --buckets 0": "--buckets 0: must be above 0",
    "ddp --world 0": "--world 0: ",
    "ddp --world 1": "--world 1: one rank has nobody",
    "memory": "--device cpu: the default size is for a GPU; give --small, or --size",
    "memory --context 0": "--context 0: must be at least 1",
    "phases": "--device cpu: the default sizes are for a GPU; give --small, or --sizes",
    "phases --sizes huge": "--sizes: invalid choice: 'huge'",
    "pipeline --small --batch 7": "--batch 7: must be a multiple of --replicas 2",
    "zero1 --ranks 17": "--ranks 17: a study starts 16",
    "zero1 --ranks 0": "--ranks 0: must be at",
    # Of all studies:
    "--only phase": "--only: invalid choice",
    "--foo": "--foo: no such flag",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_wrong_is_one_line_and_exit_code_2(call_study, capfd, words):
    name, *flags = words.split()
    if name in study.names():
        done = call_study(study.study(name), *flags)
        code, err = done.code, done.err
    else:
        with pytest.raises(SystemExit) as exit:
            everything.main([name, *flags])
        code, err = exit.value.code, capfd.readouterr().err
    assert code == 2 and REFUSED[words] in one_line(err)


@pytest.mark.parametrize("words", ["phases --sizes tiny", "memory --size tiny", "attention --seqlen 64",
                                   "phases --small", "memory --small", "attention --small"])  # fmt: skip
def test_what_is_asked_for_by_name_is_begun_on_a_cpu(call_study, monkeypatch, words):
    monkeypatch.setattr(study, "run", lambda name, settings, *_: sys.exit(len(settings)))
    name, *flags = words.split()
    assert call_study(study.study(name), *flags).code > 2


def test_a_study_under_torchrun_and_a_gpu_that_is_not_there_are_refused(call_study, monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            study.main(accounting, ["--device", "cuda"])
    torchrun = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    assert "without torchrun" in one_line(call_study(accounting).err)


def test_rows_are_appended_once_and_a_failure_is_tried_again(call_study, tmp_path, capfd, monkeypatch):
    tried = []
    here = study.timing.environment(torch.device("cpu")) | dict(dirty=False)
    monkeypatch.setattr(study.timing, "environment", lambda device: here)

    def measure(setting, args):
        tried.append(setting["x"])
        if setting["x"] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 2 GiB")
        if setting["x"] == 3 and tried.count(3) == 1:
            raise ValueError("broken")
        return dict(y=setting["x"] ** 2)

    results = tmp_path / "rows.jsonl"
    args = Namespace(device="cpu", results=results, again=False, any_commit=False)
    settings = [dict(x=x) for x in (1, 2, 3)]
    rows = study.run("toy", settings, measure, args)
    assert [row["outcome"].partition(" ")[0] for row in rows] == ["ok", "OOM", "failed:"] and rows[0]["y"] == 1
    assert [row["outcome"] for row in study.run("toy", settings, measure, args)][2] == "ok" and tried == [1, 2, 3, 3]
    assert len(rows_of(results)) == 4 and len(study.newest("toy", rows_of(results))) == 3
    others = [row | dict(commit="0" * 40) for row in rows_of(results)]
    results.write_text("".join(json.dumps(row) + "\n" for row in others))
    args.any_commit = True
    study.run("toy", settings, measure, args)
    assert len(tried) == 4
    args.any_commit = False
    study.run("toy", settings, measure, args)
    assert tried[4:] == [1, 2, 3]
    args.again = True
    study.run("toy", settings[:1], measure, args)
    assert tried[7:] == [1]
    others = [dict(study="toy", setting=settings[1], outcome="ok") | here | dict(dirty=True)]
    others += [dict(study="toy", seqlen=8, outcome="ok") | here]  # of a time before rows had settings
    results.write_text("".join(json.dumps(row) + "\n" for row in others))
    args.again = False
    study.run("toy", settings[1:2], measure, args)
    assert tried[8:] == [2]
    assert "there already" in capfd.readouterr().out


def test_a_time_above_the_peak_of_a_device_is_no_result(monkeypatch):
    assert study.impossible("CPU", 1e30, 1e-3) is None
    h100 = "NVIDIA H100 80GB HBM3"
    assert study.impossible(h100, 989e9, 1.0) is None
    assert study.impossible(h100, 2 * 989e9, 1.0) == "1978 TFLOP/s of at most 989"
    assert study.impossible(h100, 68e9, 1.0, dtype="fp32") == "68 TFLOP/s of at most 67"
    assert study.impossible(h100, 66e9, 1.0, 3.4e9, "fp32") is None  # a cache may hold some of it
    assert study.impossible(h100, 0, 1.0, 3.5e9) == "4 TB/s of at most 3.35"
    monkeypatch.setattr(study.torch, "get_float32_matmul_precision", lambda: "high")
    assert study.impossible(h100, 68e9, 1.0, dtype="fp32") is None  # TF32
    monkeypatch.setattr(study, "device_peak", lambda name: 1e9)
    args = Namespace(device="cpu")
    found = study.outcome(lambda *_: dict(flops={"forward": 2e6}, forward_ms=3.0, forward_ms_min=1.0), {}, args)
    assert found["outcome"].startswith("refused: forward in 1 ms") and "forward_ms" not in found
    assert study.outcome(lambda *_: dict(flops={"forward": 2e6}, forward_ms=3.0), {}, args)["outcome"] == "ok"


def test_the_timing_loop_warms_up_and_takes_turns():
    seen = []
    times = study.milliseconds({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, "cpu", 2, warmup=1)
    assert seen == ["a", "b"] * 3 and [len(ms) for ms in times.values()] == [2, 2]


def test_report_prints_the_table_of_a_study_and_checks_it(call_study, tmp_path, capfd):
    pytest.importorskip("matplotlib")
    results = tmp_path / "rows.jsonl"
    done = call_study(accounting, "--small", "--results", results)
    assert done.code == 0 and "| xxl | states GiB | 3'276 |" in done.out and "plots/study-accounting.png" in done.out
    assert report.main(f"--study accounting --results {results} --plots {tmp_path}".split()) == 0
    out = capfd.readouterr().out
    table = "\n".join(line for line in out.splitlines() if line.startswith("|"))
    assert table in done.out and (tmp_path / "study-accounting.svg").stat().st_size > 5000
    page = tmp_path / "README.md"
    page.write_text(f"<!-- report: study accounting rows.jsonl -->\n{table}\n")
    assert report.check([page]) == (1, [])
    page.write_text(page.read_text().replace("3'276", "3'277"))
    assert "'3'277' where the rows give '3'276'" in report.check([page])[1][0]


@pytest.mark.parametrize("argv, told", [
    ("--study acounting", "did you mean accounting?"),
    ("--study accounting --results nowhere.jsonl", "no file nowhere.jsonl"),
    ("--study accounting seqlen", "leave out axes"), ("--check --study accounting", "take no other flags"),
])  # fmt: skip
def test_report_refuses_what_is_no_study(isolated, capfd, argv, told):
    with pytest.raises(SystemExit) as exit:
        report.main(argv.split())
    assert exit.value.code == 2 and told in capfd.readouterr().err


@pytest.mark.parametrize("code", [2, 3])
def test_all_studies_run_one_after_the_other(monkeypatch, code):
    ran = []

    def run(command):
        ran.append(command)
        return SimpleNamespace(returncode=code * ("lab.studies.pipeline" in command[2]))

    monkeypatch.setattr(everything.subprocess, "run", run)
    assert everything.main("--small -- --repeat 2".split()) == code * ("pipeline" in study.names())
    assert ran[0] == [sys.executable, "-m", f"lab.studies.{study.names()[0]}", "--small", "--repeat", "2"]
    assert len(ran) == len(study.names())


def test_a_table_is_of_the_newest_settings_alone():
    def row(**setting):
        return dict(study="ddp", setting=setting, outcome="ok", device="c", torch="t")

    rows = [row(kind="simulated", width=8, link="1:1"), row(kind="simulated", width=16, link="1:1"),
            row(kind="simulated", width=16, link="2:2", way="flat"), row(kind="real", width=8, link=None),
            row(kind="real", width=16, link=None)]  # fmt: skip
    assert study.newest("ddp", rows) == [rows[2], rows[4]]
    assert study.newest("ddp", rows[:2]) == rows[1:2]


def test_a_cell_is_formatted_or_empty_and_a_row_that_failed_shows_why():
    columns = {"a": "{name}", "b": "{ms:,.1f}", "c": "{nbytes:KiB ,.0f} of {ms}"}
    rows = [dict(setting=dict(name="x"), outcome="ok", ms="1234.56", nbytes=2048), dict(name="y", ms=None),
            dict(name="z", ms=2, outcome="OOM a|b"), dict(setting=dict(name="w"), outcome="failed: no")]  # fmt: skip
    columns["d"] = lambda row: str(row["nbytes"] + 1)
    assert study.lines(rows, columns).splitlines() == [
        "| a | b | c | d |", "|---|---:|---:|---:|", "| x | 1'234.6 | 2 of 1234.56 | 2049 |", "| y |  |  |  |",
        "| z | 2.0 | OOM a/b |  |", "| w | failed: no |  |  |"]  # fmt: skip
    assert study.lines([], dict(a="{a}", b="{b}")) == "| a | b |\n|---|---|"


def test_published_lines_stand_beside_their_rows_and_the_others_below_them():
    theirs = {1: dict(x=1, gb="5"), 2: dict(x=2, gb="6")}
    rows = [dict(setting=dict(x=2), ms=3), dict(setting=dict(x=7), ms=4)]
    found = study.beside(rows, theirs, lambda row: row["setting"]["x"])
    assert study.lines(found, {"x": "{x}", "ms": "{ms}", "gb": "{gb}"}).splitlines()[2:] == [
        "| 2 | 3 | 6 |", "| 7 | 4 |  |", "| 1 |  | 5 |"]  # fmt: skip


@pytest.mark.parametrize("name", study.names())
def test_a_figure_of_rows_that_failed_says_that_there_is_none(name):
    plots = pytest.importorskip("lab.report.plots", exc_type=ImportError)
    with pytest.raises(plots.NoFigure, match="no row has a figure"):
        study.figure(study.study(name), [dict(outcome="failed: no")], None)


def test_a_plot_leaves_out_what_a_logarithm_has_not(tmp_path):
    plots = pytest.importorskip("lab.report.plots", exc_type=ImportError)
    svg, png = study.curves(tmp_path, "toy", {"a": [(44, 0.0), (55, None), (66, 8.0)]}, "x", "y", {"here": 60})
    assert svg.name == "study-toy.svg" and png.stat().st_size > 1000
    assert [f">{x}<" in svg.read_text() for x in (44, 55, 66)] == [False, False, True]
    with pytest.raises(plots.NoFigure):
        study.curves(tmp_path, "toy", {"a": [(1, 0.0)]}, "x", "y")


def test_accounting_of_the_published_case_and_by_what_each_wrong_step_is_off():
    found = accounting.measure(accounting.XXL)
    figures = found["figures"]
    assert figures["parameters"] == 126 * 2 * 16384 * 53248
    assert round(figures["states GiB"]) == 3276 and round(figures["kept GiB per token"], 4) == 0.0163
    assert [figures[f"devices of {size}"] for size in ("80 GiB", "80", "95")] == [41, 44, 38]
    assert round(figures["kept GiB per token sharded by half"], 4) == 0.0083
    assert round(figures["batch tokens"], -2) == 25300 and round(figures["batch tokens a device"]) == 395
    assert round(figures["batch tokens, both links at once"], -2) == 20400
    wrong = [value for _, value in found["steps"]]
    assert round(wrong[0]) == 641 and wrong[-1] == figures["batch tokens"]
    assert [round(b / a, 2) for a, b in zip(wrong, wrong[1:], strict=False)] == [78.97, 0.45, 1.12]


def test_accounting_holds_at_its_threshold_and_says_where_no_batch_does():
    c = SimpleNamespace(**accounting.XXL)
    once = accounting.block(c, accounting.measure(accounting.XXL)["figures"]["batch tokens"])
    assert math.isclose(once["compute"], once["weights"] + once["activations"])
    slow = accounting.measure(accounting.XXL | dict(gb_per_s=1.0))["figures"]
    assert slow["batch tokens"] == slow["batch tokens, both links at once"] == math.inf
    assert accounting.block(SimpleNamespace(**accounting.XXL | dict(tp=1)), 1.0)["activations"] == 0


@pytest.mark.parametrize("matrices", [2, 3])
def test_accounting_counts_what_linear_layers_keep(matrices):
    """Beside what autograd saves for them: [tokens, D] once for those that share it, bf16."""
    D = 8
    F = 24
    tokens = 5
    x = torch.randn(tokens, D, dtype=torch.bfloat16, requires_grad=True)
    w = [torch.randn(D, F, dtype=torch.bfloat16, requires_grad=True) for _ in range(matrices - 1)]
    down = torch.randn(F, D, dtype=torch.bfloat16, requires_grad=True)
    kept = {}
    weights = {each.untyped_storage().data_ptr() for each in (*w, down)}

    def keep(t):
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        wide = [x @ each for each in w]
        y = (wide[0] * wide[1] if matrices == 3 else wide[0].relu()) @ down
    setting = accounting.XXL | dict(width=D, mlp_width=F, blocks=1, matrices=matrices)
    counted = accounting.measure(setting)["figures"]["kept GiB per token"] * 2**30 * tokens
    assert sum(kept.values()) == counted and y.shape == (tokens, D)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("times", [(1, 2), (3, 1), (2, 2)])
def test_both_schedules_take_the_time_of_the_formula_and_keep_what_they_should(p, m, times):
    for name, kept in (("gpipe", [m] * p), ("1f1b", [min(m, p - s) for s in range(p)])):
        took, most = pipeline.simulate(name, p, m, *times)
        assert took == (m + p - 1) * sum(times) and most == kept, name


def test_a_schedule_whose_stages_wait_for_each_other_is_an_error(monkeypatch):
    def backward_first(stage, p, m):
        return [("B", 0), ("F", 0)]

    monkeypatch.setitem(pipeline.SCHEDULES, "gpipe", backward_first)
    with pytest.raises(RuntimeError, match="wait for each other"):
        pipeline.simulate("gpipe", 2, 1, 1, 1)


def test_counted_bytes_by_checkpoints_are_those_of_the_formula(one_thread):
    c = pipeline.SMALL | dict(width=32, head_dim=8, layers=5, seqlen=16)
    blocks, config = pipeline.stage(c, "cpu")
    x = torch.randn(2, 16, 32, requires_grad=True)
    row = dict(setting=c) | pipeline.checkpoints(blocks, x)
    assert [*row["counted"]] == [1, 2, 3, 5] and row["none"] == 5 * row["a_int"]
    assert all(pipeline.formula(row, n)[1] == size for n, size in row["counted"].items())
    statistics = 4 * 2 * 16 * (4 + 4)  # fp32: mean and deviation of two norms, and of each of 4 heads the log of a sum
    assert row["a_int"] - statistics == kept_per_block(config) * row["a_in"] and row["a_in"] == x.nbytes


def test_pipeline_finds_the_best_micro_batch(call_study, tmp_path):
    words = ["--small", "--width", 16, "--head-dim", 8, "--seqlen", 8, "--layers", 2, "--repeat", 1]
    done = call_study(pipeline, *words, "--results", tmp_path / "rows.jsonl")
    rows = rows_of(tmp_path / "rows.jsonl")
    assert done.code == 0 and [row["setting"].get("micro_batch") for row in rows] == [1, 2, 4, 8, None]
    for row in rows[:-1]:
        slots = 8 // row["setting"]["micro_batch"] + 4 - 1
        assert math.isclose(row["batch_ms"], slots * (row["forward_ms"] + row["backward_ms"]), abs_tol=1e-3)
        assert math.isclose(row["gpipe_ms"], row["batch_ms"]) and math.isclose(row["1f1b_ms"], row["batch_ms"])
    least = min(rows[:-1], key=lambda row: row["batch_ms"])["setting"]["micro_batch"]
    assert [line.split()[3] for line in done.out.splitlines() if "; least time" in line] == [f"{least},"]


def test_sums_of_low_precision_are_those_that_were_published():
    found = dict(precision.sums("cpu", 1000))
    assert [round(found["sum of 1000 x 0.01"][name], 4) for name in ("fp32", "fp16", "bf16")] == [10.0001, 9.9531, 4.0]
    assert round(found["sum in fp32 of terms in the dtype"]["fp16"], 4) == 10.0021
    assert all(value == 10 for value in found["sum with Kahan's compensation"].values())
    rounded = found["sum with stochastic rounding, mean of 100"]
    assert abs(rounded["fp16"] - 10) < 0.1 and abs(rounded["bf16"] - 10) < 0.5 and rounded["bf16"] > 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_takes_either_neighbour_and_the_mean_is_right(dtype):
    torch.manual_seed(0)
    low = torch.tensor(1.0, dtype=dtype)
    step = torch.finfo(dtype).eps
    made = precision.stochastic(torch.full((40000,), 1 + 0.3 * step, dtype=torch.float64), dtype).double()
    assert set(made.tolist()) == {low.item(), 1 + step} and abs((made.mean().item() - 1) / step - 0.3) < 0.02
    exact = torch.tensor([0.75, -3.0, 1024.0], dtype=torch.float64)
    assert torch.equal(precision.stochastic(exact, dtype).double(), exact)


def test_dtypes_of_a_model_are_found_by_running_it_and_the_published_loss_is_wrong(isolated):
    before = [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")]
    found = {what: kinds["fp16"] for what, kinds in precision.dtypes("cpu")}
    assert [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")] == before
    names = "parameters", "first layer", "norm", "logits", "loss"
    assert [found[f"autocast, CUDA: {name}"] for name in names] == "fp32 fp16 fp32 fp16 fp32".split()
    assert [found[f"autocast, CPU: {name}"] for name in names] == "fp32 fp16 fp16 fp16 fp32".split()
    assert found["autocast, CPU: gradients"] == found["MixedPrecisionPolicy: gradients"] == "fp32"
    assert found["MixedPrecisionPolicy: parameters, gathered"] == found["MixedPrecisionPolicy: loss"] == "fp16"
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    rows = [dict(study="precision", setting={"part": "dtypes"}, outcome="ok", commit="a", torch="b", device="c",
                 lines=precision.dtypes("cpu"))]  # fmt: skip
    wrong = [line for line in precision.table(rows)[1].splitlines() if line.endswith("| wrong |")]
    assert len(wrong) == 1 and wrong[0].startswith("| autocast, CUDA: loss |")


def test_the_variance_that_a_norm_needs_is_lost_in_low_precision(one_thread):
    torch.manual_seed(0)
    (_, big), (_, right) = precision.norm("cpu", 0, 300)
    assert big["fp16"] == math.inf and abs(right["fp16"] / big["fp32"] - 1) < 0.01
    (_, cancelled), (_, right) = precision.norm("cpu", 100, 1)
    assert abs(cancelled["bf16"] / cancelled["fp32"] - 1) > 0.5 and abs(right["bf16"] / cancelled["fp32"] - 1) < 0.05


def test_a_gradient_summed_in_bf16_is_further_off_the_more_micro_batches_there_are(one_thread):
    torch.manual_seed(0)
    few, many = (dict(precision.gradients("cpu", n))[f"gradient of {n} micro-batches: relative error"] for n in (1, 64))
    assert many["bf16"] > 2 * few["bf16"] and many["bf16"] > 1000 * many["fp32"]
