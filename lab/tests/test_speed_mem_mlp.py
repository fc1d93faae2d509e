"""speed_mem_tests_mlp.py: no switch changes the loss but those that may; every end is a row; its memory as published.

    pytest lab/tests/test_speed_mem_mlp.py        # no GPU, no code generation; one run starts two ranks
"""

import csv
import json
import math
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

import speed_mem_tests_mlp as mlp
from lab.sweeps import sweep

PROGRAM = Path(mlp.__file__)
TINY = "--device cpu --width 16 --seqlen 8 --blocks 2 --batch 2 --vocab 32 --grow 2 --steps 5".split()
KEYS = """date commit dirty torch device world width seqlen batch compile param_dtype reduce_dtype flags outcome line
init_mib pre_step0_mib first_step_peak_mib second_step_peak_mib peak_rss_mib step_ms step_ms_min step_ms_max n compile_s
loss after_model_mib after_data_parallel_mib""".split()  # but for the MLP's own those of main.py
MIB = 2**20

pytestmark = pytest.mark.usefixtures("isolated")


@pytest.fixture
def generates_no_code(monkeypatch):
    """What torch.compile captures runs as it is, forward and backward."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="aot_eager"))


def row_of(argv: str, code: int = 0, world: int = 1) -> dict:
    """The row of a run in this process."""
    Path("rows.jsonl").unlink(missing_ok=True)
    assert mlp.main(mlp.parse([*TINY, "--results", "rows.jsonl", *argv.split()]), 0, 0, world) == code
    if dist.is_initialized():
        dist.destroy_process_group()
    (line,) = Path("rows.jsonl").read_text().splitlines()
    return json.loads(line)


def switches_of(table: str) -> list[str]:
    """The flags of each row of a published table, as words."""
    [settings] = sweep.studies(str(mlp.SETTINGS / f"{table}.txt"), False, 4, []).values()
    return [setting.split(" ", 1)[1] for setting in settings]


def published(name: str) -> list[dict]:
    return list(csv.DictReader((PROGRAM.parent / "published" / f"{name}.csv").read_text().splitlines()))


# ---------------------------------------------------------------- the published figures


@pytest.mark.parametrize("table, mib", [("mlp_1024", 352), ("mlp_4096", 3072)])
def test_parameters_are_the_published_ones(table, mib):
    with torch.device("meta"):
        model = mlp.MLP(mlp.parse(["--table", table]))
    assert sum(p.numel() * 4 for p in model.parameters()) == mib * MIB
    told = {row["init_mib"] for row in published(table)}
    assert told == {"348" if table == "mlp_1024" else "3072"}  # 4 MiB below what this model counts to


def counted_peak(switches: str, ranks: int, monkeypatch) -> float:
    """MiB of tensors at the peak of the second step of the 4 x 4096 model, from shapes alone."""
    c = mlp.parse(["--width", "4096", "--seqlen", "4096", "--blocks", "4", *switches.split()])
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = dist.init_device_mesh("cpu", (ranks,))  # reads numbers, which fake tensors have not
    monkeypatch.setattr(dist, "init_device_mesh", lambda *_: mesh)
    with FakeTensorMode():
        model = mlp.build(c, torch.device("cpu"), ranks)
        step = mlp.Step(c, model, torch.device("cpu"))
        tokens, targets = torch.randint(c.vocab, (2, c.batch, c.seqlen))
        step.run(tokens, targets)  # makes Adam's moments
        tracker = MemTracker()
        tracker.track_external(model, step.optimizer, tokens, targets)
        with tracker:
            step.run(tokens, targets)
    dist.destroy_process_group()
    return sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values()) / MIB


@pytest.mark.parametrize("row, ranks, cuda", [(0, 1, 0), (1, 1, -2048), (4, 4, 0)])
def test_eager_peaks_are_the_published_ones(monkeypatch, row, ranks, cuda):
    """cuda: there, under autocast, the gradient of the bf16 logits is never fp32. Above the count stand 16 MiB each."""
    counted = counted_peak(switches_of("mlp_4096")[row], ranks, monkeypatch) + cuda
    assert 15 < int(published("mlp_4096")[row]["peak_mib"]) - counted < 18


def test_every_published_row_has_its_switches():
    names = {path.stem for path in mlp.SETTINGS.iterdir()}
    assert names == set(get_args(get_args(get_type_hints(mlp.Config)["table"])[0]))
    for name in names:
        for row, each in zip(published(name), switches_of(name), strict=True):
            label = str(next(iter(row.values())))
            c = mlp.parse(each.split())
            assert c.autocast == ("autocast" in label)
            if name == "mlp_4096":
                assert c.data_parallel == (label.startswith(("data_parallel", "same")))
                assert c.compile == ("fwdbwd" if "fwd+bwd" in label or "2x" in label else
                                     "model" if "compile(model" in label else "none"), label  # fmt: skip
                assert c.reshard == (label not in ("data_parallel", "data_parallel+compile(2x)"))
            if name in ("mlp_1024", "mlp_4096"):
                assert c.param_dtype == ("bf16" if "param=bf16" in label or "same" in label else "fp32")
                assert c.reduce_dtype == ("bf16" if "reduce=bf16" in label or "same" in label else "fp32")
            if name == "mlp_compile_options":
                graphs = ["triton.cudagraphs=True", "epilogue_fusion=True", "shape_padding=True"]
                assert [*c.compile_options] == dict(none=[]).get(label, graphs if "+" in label else [f"{label}=True"])


# ---------------------------------------------------------------- a row


def test_no_system_switch_changes_the_loss(generates_no_code):
    row = row_of("--blocks 1 --no-data-parallel")
    assert row["loss"] < math.log(32) + 0.6 and row["outcome"] == "ok" and row["compile_s"] is None
    for argv in ("", "--no-reshard", "--init meta", "--compile fwdbwd --no-reshard", "--compile step"):
        other = row_of(f"--blocks 1 {argv}")
        assert abs(other["loss"] - row["loss"]) < 1e-6, argv
        assert (other["compile_s"] is None) == ("--compile" not in argv)


def test_inductor_gets_the_options(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda f, **how: given.append(how) or f)
    for argv in ("", "--compile-options shape_padding=False", "--world 2 --compile-options overlap max_autotune=True"):
        row_of(f"--compile model {argv}")
    plain, own, overlapping = (how["options"] for how in given if "fullgraph" in how)
    assert plain == {} and own == {"shape_padding": False}
    assert overlapping["max_autotune"] is True and "post_grad_custom_post_pass" in overlapping


@pytest.mark.parametrize("argv", ["--autocast --no-data-parallel", "--autocast", "--param-dtype bf16",
                                  "--reduce-dtype bf16", "--param-dtype bf16 --reduce-dtype bf16"])  # fmt: skip
def test_half_precision_changes_the_loss_a_little(argv):
    row = row_of("")
    other = row_of(argv)
    apart = abs(other["loss"] - row["loss"])
    assert apart < 0.02 and (apart > 0 or argv == "--reduce-dtype bf16")  # which five steps of Adam need not show
    added = {flag.replace("no-", "").strip("-").replace("-", "_") for flag in argv.split() if flag[0] == "-"}
    assert {name for name, value in other["flags"].items() if value != row["flags"][name]} == added


def test_a_row_has_the_keys_of_main_and_its_milestones(capsys):
    row = row_of("--init meta")
    assert set(KEYS) <= row.keys() and row["n"] == 2 and row["world"] == 1
    order = [key for key in row if key.startswith("after_")]
    assert order == [f"after_{name}_mib" for name in "model data_parallel to_empty init_weights optimizer".split()]
    assert row["init_mib"] == row["after_model_mib"] and row["pre_step0_mib"] == max(row[key] for key in order)
    assert "step 2" in capsys.readouterr().out


def test_simulated_ranks_are_told_apart():
    row = row_of("--world 4 --link none")
    assert row["world"] == "4(sim none)" and math.isfinite(row["loss"]) and row["outcome"] == "ok"


@pytest.mark.parametrize("phase, error, code, outcome", [
    ("build", torch.OutOfMemoryError("CUDA out of memory."), 6, "OOM init"),
    ("loss", torch.OutOfMemoryError("CUDA out of memory."), 6, "OOM fwd"),
    ("loss", ValueError("no | such"), 1, "failed: ValueError: no | such"),
    ("loss", None, 5, "failed: FloatingPointError: loss nan"),
])  # fmt: skip
def test_every_end_is_a_row(monkeypatch, capsys, phase, error, code, outcome):
    def fail(step, tokens, *_):
        if error:
            raise error
        return step.model(tokens).sum() * math.nan

    monkeypatch.setattr(mlp if phase == "build" else mlp.Step, phase, fail)
    row = row_of("", code)
    assert row["outcome"] == outcome and row["step_ms"] is None and row["n"] == 0 and row["peak_rss_mib"] > 0
    assert capsys.readouterr().err.startswith(f"error: rank 0: {outcome}")


@pytest.mark.parametrize("argv, said", [
    ("--width 0", "--width 0: must be at least 1"),
    ("--steps 3", "--steps 3: must be above 3, the number of warm-up steps"),
    ("--nproc -1", "--world, --nproc, --timeout: must not be negative"),
    ("--table mlp_1024 --compile step --autocast",
     "--autocast --compile: not with --table, which sets it for each row; leave"),
    ("--world 4 --no-data-parallel", "--world 4: simulates ranks of sharded training; leave out --no-data-parallel"),
    ("--no-data-parallel --param-dtype bf16", "with --no-data-parallel use --autocast"),
    ("--compile-options shape_padding=True", "--compile-options: needs --compile model, step or fwdbwd"),
    ("--compile model --compile-options triton.cudagraphs=True", "--compile-options triton.cudagraphs: needs CUDA"),
    ("--compile model --compile-options no_such=1", "--compile-options: Unexpected optimization option no_such"),
    ("--world 4 --link wet-string", "--link wet-string: must be"),
    ("--results /dev/null/rows.jsonl", "--results /dev/null/rows.jsonl: "),
    pytest.param("--device cuda", "--device cuda: ",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(capsys, argv, said):
    with pytest.raises(SystemExit) as stopped:
        mlp.main(mlp.parse([*TINY, *argv.split()]), 0, 0, 1)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1, error


@pytest.mark.parametrize("flag", ["--table meta_init", "--world 2", "--no-data-parallel"])
def test_what_is_for_one_process_is_refused_on_two_ranks(capsys, flag):
    with pytest.raises(SystemExit) as stopped:
        mlp.parse([*TINY, *flag.split()], 0, 2)
    said = f"{flag.split()[0]}: needs one process, but torchrun started 2"
    assert stopped.value.code == 2 and said in capsys.readouterr().err


# ---------------------------------------------------------------- a table


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


@pytest.mark.slow
def test_a_table_runs_its_rows_on_two_ranks_and_records_the_bad_one(monkeypatch, capsys):
    bad = "nproc=1 --no-data-parallel --compile model --compile-options triton.cudagraphs=True"
    Path("meta_init.txt").write_text(f"--init meta\n{bad}\n")
    monkeypatch.setattr(mlp, "SETTINGS", Path("."))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert mlp.table(mlp.parse([*TINY, "--table", "meta_init", "--nproc", "2", "--results", "rows.jsonl"])) == 1
    title, _, head, _, first, second = capsys.readouterr().out.splitlines()[-6:]
    assert "resident on a CPU" in title
    assert cells_of(head)[:5] == "init outcome world after_model_mib published".split()
    assert cells_of(first)[:3] == ["cuda", "ok", "2"] and cells_of(first)[-2:][1] == "559"
    assert cells_of(second)[1].startswith("failed: exit 2: error: --compile-options triton.cudagraphs: needs CUDA")
    assert cells_of(second)[3:5] == ["", "0"] and cells_of(second)[-1] == "496"
    rows = sweep.read_rows(Path("rows.jsonl"))
    ok, failed = sorted(rows.values(), key=lambda row: row["outcome"] != "ok")
    assert failed["flags"].keys() == ok["flags"].keys() and failed["flags"]["compile"] == "model"
    assert abs(ok["loss"] - row_of("")["loss"]) < 1e-6  # on two ranks and on one


def test_a_second_call_runs_only_what_has_no_result(monkeypatch, capsys):
    ends = {"--no-reshard": "ok", "--autocast": "OOM bwd"}
    started = []

    def run(setting, program, timeout, log, name):
        started.append(setting)
        outcome = next((end for flag, end in ends.items() if flag in setting.split()), None)
        if outcome:
            row = {"line": setting, "outcome": outcome, "world": 4, "step_ms": 1234.5, "init_mib": 3072.0}
            row |= {"peak_alloc_mib": 40977.25, "device": "a GPU", "torch": "2.13", "commit": "c" * 40}
            Path(program[program.index("--results") + 1]).open("a").write(json.dumps(row) + "\n")
        return None if outcome == "ok" else "exit 9: killed"

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(sweep, "current", lambda rows, any_commit: rows)  # as on that GPU
    argv = "--table mlp_4096 --nproc 4 --steps 30 --results rows.jsonl".split()
    assert mlp.table(mlp.parse(argv)) == 1 and len(started) == 10
    lines = capsys.readouterr().out.splitlines()[-14:]
    assert lines[0].startswith("mlp_4096, MiB allocated; ours: a GPU, torch 2.13, commit ccccc")
    named = {cells_of(line)[0]: cells_of(line) for line in lines[4:]}
    assert named["autocast(bf16)"][1:3] == ["OOM bwd", "4"]
    assert named["data_parallel"][3:] == ["3'072.0", "3072", "", "3200", "", "", "40'977.2", "36625", "1'234.5", "7169"]
    assert named["nothing"][1] == "failed: exit 9: killed"
    words = sweep.parse(started[4].split())
    assert words == (4, {**words[1], "--width": ("4096",), "--steps": ("30",), "--no-reshard": ()})
    assert sweep.parse(started[0].split())[0] == 1  # not sharded: one process
    started.clear()
    mlp.table(mlp.parse(argv))
    assert len(started) == 6 and not any(end in line for line in started for end in ("--no-reshard", "--autocast"))
    started.clear()
    mlp.table(mlp.parse([*argv, "--fresh", "--world", "8", "--small"]))
    assert len(started) == 10 and sum("--world 8" in setting for setting in started) == 6
    assert all(line.startswith("nproc=1 ") and "--width 64" in line and "--steps 30" in line for line in started)
