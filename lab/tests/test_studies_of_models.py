"""Studies of the llama-style models, phases and memory: their arithmetic and what they count. Never a speed."""

from argparse import Namespace

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._python_dispatch import TorchDispatchMode

from lab.studies import memory, phases, study
from model import ModelConfig, Transformer
from trainer import step_costs
from trainer.measuring import flops, timeline

CPU = torch.device("cpu")


@pytest.fixture
def args(tmp_path):
    return Namespace(device="cpu", repeat=2, plots=None, results=tmp_path / "rows.jsonl")


def config_of(size):
    width, depth, heads = study.SIZES[size]
    return ModelConfig(block="llama", width=width, depth=depth, head_dim=width // heads, grouping=1, vocab=study.VOCAB)


def test_the_sizes_are_the_published_ones():
    """An MLP of 4 times the width, three matrices: 3.4e9 parameters, which with gradients and moments are 54.5 GB."""
    assert round(step_costs.reference(config_of("2.7b")).parameters / 1e9, 3) == 3.407
    assert round(16 * step_costs.reference(config_of("2.7b")).parameters / 1e9, 1) == 54.5
    hidden = {name: 4 * width for name, (width, *_) in study.SIZES.items()}
    assert [hidden[name] for name in ("small", "medium", "large", "xl", "2.7b")] == [3072, 4096, 5120, 6400, 10240]
    model = study.transformer("tiny", CPU)
    assert sum(p.numel() for p in model.parameters()) == step_costs.reference(config_of("tiny")).parameters


def test_phases_count_the_flops_of_the_forward_and_time_what_counts(one_thread):
    c = dict(size="tiny", precision="bf16", compiled=False, warmup=1, batch=2, context=8, repeat=3)
    row = phases.work(0, CPU, c)
    with torch.device("meta"):
        counted = flops.count(Transformer(config_of("tiny")), 8)
    assert row["flops"]["forward"] * 3 == pytest.approx(counted.causal * 2 * 8)
    assert row["flops"]["backward"] == 2 * row["flops"]["forward"]
    assert all(row[f"{part}_ms"] > 0 and f"{part}_excess_ms" in row for part in phases.PARTS) and row["n"] == 3
    assert not {"first_allocation_excess_ms", "first_product_excess_ms"} & row.keys()  # are of a GPU
    assert row["peak_of"] == "bf16" and row["moved_bytes"]["optimizer"] == 28 * row["parameters"]


def test_compilation_finds_nothing_that_was_compiled_before(one_thread, monkeypatch):
    c = dict(size="tiny", precision="fp32", compiled=True, warmup=0, batch=1, context=8, repeat=1)
    seen = [cache_dir()]
    monkeypatch.setattr(torch, "compile", lambda model: seen.append(cache_dir()) or model)
    for _ in range(2):
        phases.work(0, CPU, c)
    assert len(set(seen)) == 3 and cache_dir() == seen[0]


def test_the_first_product_is_timed_on_a_gpu_alone_without_making_its_factors(monkeypatch):
    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran.append(function._opname)
            return function(*args, **kwargs or {})

    ran = []

    def run(parts, *_, **__):
        with Counts():
            return {name: [(work(), 3.0)[1], 1.0] for name, work in parts.items()}

    monkeypatch.setattr(phases, "milliseconds", run)
    assert phases.starts(CPU) == {}
    found = phases.starts(torch.device("meta"))
    assert found == dict(first_allocation_excess_ms=2.0, first_product_excess_ms=2.0)
    assert ran == ["empty", "fill_", "mm"]


def test_the_first_step_and_the_others_are_told_apart():
    row = phases.summary("forward", [12.0, 2.0, 4.0])
    assert row["forward_excess_ms"] == 9.0 and row["forward_mean_ms"] == 6.0 and row["forward_ms"] == 4.0
    assert row["forward_std_ms"] == pytest.approx(28**0.5, abs=1e-3)
    assert "forward_std_ms" not in phases.summary("forward", [1.0])


def test_phases_have_every_warm_up_and_stand_beside_the_published_rows():
    full = phases.settings(Namespace(sizes=None, small=False, batch=4, context=128, repeat=10))
    first = [c["warmup"] for c in full if (c["size"], c["precision"], c["compiled"]) == ("small", "fp32", False)]
    assert first == [0, 1, 2, 5] and len(full) == 2 * 3 + 5 * 2 * 2
    small = phases.settings(Namespace(sizes=None, small=True, batch=4, context=128, repeat=10))
    assert [(c["size"], c["warmup"]) for c in small if c["compiled"]] == [("tiny", 0)] and len(small) == 6
    theirs = {key: line["published"] for key, line in phases.published_times().items()}
    assert theirs["xl", "fp32", True] == "51.2 + 287.2 (no GPU named)"
    assert theirs["2.7b", "bf16", False] == "81.0 + 223.0 (A100)"
    assert theirs["medium", "fp32", False].count("(") == 3


@pytest.mark.parametrize("context, moment", [(8, "bwd, aten::embedding_backward"), (64, "bwd, aten::_log_softmax")])
def test_memory_names_the_moment_of_the_peak(context, moment, isolated, one_thread, tmp_path):
    """Of few tokens that of the last gradient: with states 16 bytes a parameter. Of many that of the logits."""
    c = dict(size="tiny", batch=4, context=context, precision="fp32", part="step")
    row = memory.work(0, CPU, c, str(tmp_path / "memory"))
    assert row["moment"].startswith(moment) and row["residual_bytes"] == 4 * 4 * context * 64
    if context == 8:
        assert row["state_bytes"] == 16 * row["parameters"]
        assert row["peak_mib"] * 2**20 < 1.05 * row["state_bytes"]
    else:
        assert row["largest"][0][:2] == [1, round(4 * 4 * context * study.VOCAB / 2**20, 3)]
        assert row["largest"][0][2].startswith(f"[{4 * context},{study.VOCAB}] fp32; logits; ")
    assert row["largest_weight"] == ["emb.weight", round(4 * 64 * study.VOCAB / 2**20, 3)]


def test_a_forward_for_inference_keeps_nothing_and_none_of_them_holds_moments(isolated, one_thread, tmp_path):
    found = {}
    for part in memory.PARTS[:3]:
        c = dict(size="tiny", batch=4, context=16, precision="fp32", part=part)
        found[part] = memory.work(0, CPU, c, str(tmp_path / "memory"))
        assert timeline.MOMENTS not in found[part]["pieces_mib"]
    assert timeline.SAVED not in found["inference"]["pieces_mib"]
    peaks = [row["peak_mib"] for row in found.values()]
    assert peaks == sorted(peaks) and peaks[0] < peaks[1]


@pytest.mark.slow
def test_mixed_precision_halves_the_residual_stream(isolated, args):
    c = dict(size="tiny", batch=2, context=8, precision="mixed", part="forward")
    row = memory.measure(c, args)
    assert row["residual_bytes"] == 2 * 2 * 8 * 64


def test_tables_stand_beside_what_is_not_measured_here(args):
    row = dict(study="memory", commit="a" * 40, torch="t", device="d", outcome="OOM no", dirty=False)
    row |= dict(setting=dict(size="2.7b", batch=4, context=128, precision="fp32", part="step"))
    lines = memory.table([row])[1].splitlines()
    assert "| OOM no |" in lines[2] and lines[2].endswith("| 55.246 |") and len(lines) == 2 + 6
    lines = phases.table([row | dict(setting=dict(size="xl", precision="fp32", compiled=True, warmup=5, batch=4,
                                                  context=128, repeat=3))])[1].splitlines()  # fmt: skip
    assert "287.2 (no GPU named)" in lines[2] and len(lines) == 2 + 5 * 3
    assert "allocation" in lines[0]


def test_on_a_cpu_phases_leave_out_what_is_noise_there(args):
    row = dict(study="phases", commit="a" * 40, torch="t", device="CPU of rows that have it", outcome="ok", dirty=False)
    row |= {f"{part}_{what}": 1.0 for part in phases.PARTS for what in ("ms", "mean_ms", "std_ms", "excess_ms")}
    row |= dict(first_allocation_excess_ms=9.0, first_product_excess_ms=9.0)
    row |= dict(setting=dict(size="tiny", precision="fp32", compiled=False, warmup=0, batch=4, context=8, repeat=3))
    for device, shown in (("CPU 2 threads", False), ("NVIDIA H100", True)):
        about, text = phases.table([row | dict(device=device)])
        assert ("allocation" in about, "allocation" in text, "9.0, 9.0" in text) == (shown,) * 3
        assert len({line.count("|") for line in text.splitlines()}) == 1
