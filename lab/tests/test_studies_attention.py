"""The study of attention: its rows, what is held beside the formula, times that cannot be.

    pytest lab/tests/test_studies_attention.py       # under a minute, no GPU: kernels of a GPU run in tests/test_gpu.py
"""

from argparse import Namespace

import pytest
import torch
from test_attention import CPU, SHAPE

from lab.report import published
from lab.studies import attention, study
from model import sdpa_kernel
from trainer.attention_kernel import Shape

pytestmark = pytest.mark.usefixtures("isolated")


def one_row(backend, shape=SHAPE, causal=True):
    args = Namespace(device="cpu", repeat=1)
    return study.outcome(attention.measure, shape._asdict() | dict(backend=backend, causal=causal), args)


def test_every_backend_has_a_row_and_both_tables_hold_them(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    words = "--small --device cpu --seqlen 64 --head-dim 16 --backend flex cudnn math flash --repeat 20".split()
    assert study.main(attention, [*words, "--results", str(path)]) == 0
    rows = [row for row in published.read([path]) if row["setting"]["causal"]]
    outcomes = {row["backend"]: row["outcome"] for row in rows}
    missing = dict(flex="n/a: FlexAttention needs CUDA to train", cudnn="n/a: it needs CUDA")
    assert outcomes == missing | dict(math="ok", flash="ok")
    for row in rows[2:]:
        assert row["study"] == "attention" and row["n"] == 20 and row["peak_rss_mib"] > 0 and row["commit"]
        for name in ("forward", "backward"):
            assert 0 < row[f"{name}_ms_min"] <= row[f"{name}_ms"] <= row[f"{name}_ms_max"]
    assert "| 16 | 64 | fp32 | yes | math |" in capsys.readouterr().out


def test_a_backend_that_fails_is_a_row_and_the_next_one_runs(monkeypatch):
    def fail(*_):
        raise RuntimeError("misaligned\naddress")

    monkeypatch.setattr(attention, "function", fail)
    assert one_row("flash")["outcome"].startswith("failed: RuntimeError: misaligned")
    monkeypatch.setattr(attention, "function", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("x")))
    assert one_row("flash")["outcome"].startswith("OOM")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend, backward", [("math", 2), ("flash", 2.5)])
def test_flops_are_those_of_the_pairs_that_attention_sees(backend, backward, causal, monkeypatch):
    monkeypatch.setattr(attention, "milliseconds", lambda *_: {"forward": [2.0], "backward": [10.0]})
    B = 2
    H = 4
    T = 96
    d = 8
    row = one_row(backend, Shape(B, H, 2, T, d, "fp32"), causal)
    pairs = (torch.ones(T, T).tril() if causal else torch.ones(T, T)).sum().item()
    once = B * H * pairs * 4 * d  # each 2 d FLOPs for its score and 2 d for its value
    assert row["flops"] == {"forward": once, "backward": backward * once}
    assert row["forward_tflops"] == pytest.approx(once / 2e-3 / 1e12, abs=1e-6)
    assert row["backward_tflops"] == pytest.approx(backward * once / 10e-3 / 1e12, abs=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["plain", "math", "flash"])
def test_bytes_held_between_forward_and_backward_are_those_of_the_formula(backend, dtype, causal):
    shape = Shape(3, 1, 1, 40, 16, dtype)
    *qkv, _ = attention.inputs(shape, CPU)
    run = attention.function(backend, shape, CPU, causal)
    assert attention.held(run, qkv) == attention.formula(backend, shape, causal)
    size, casts = (4, 0) if dtype == "fp32" else (2, 1)
    told = dict(plain=size * 3 * 40 * 40 + 1600 * causal, math=4 * 3 * 40 * (40 + (2 + casts) * 16),
                flash=3 * 40 * (size * 16 + 4))  # fmt: skip
    assert attention.formula(backend, shape, causal) == told[backend]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_plain_attention_is_that_of_the_kernels(backend, causal):
    *qkv, _ = attention.inputs(SHAPE, CPU)
    found = attention.plain(*qkv, causal)
    torch.testing.assert_close(found, sdpa_kernel(backend, *qkv, causal=causal), rtol=1e-5, atol=1e-5)


def test_published_forwards_that_beat_the_device_are_marked():
    """T = 16384, d = 16: 137 GFLOP and 17 GB in 0.231 ms."""
    lines = {(int(line["head_dim"]), int(line["seq"])): line for line in study.published("attention_h100")}
    assert attention.suspicious(lines[16, 16384]) == "impossible: 595 TFLOP/s of at most 67, 75 TB/s of at most 3.35"
    assert attention.suspicious(lines[128, 16384]) == "impossible: 4953 TFLOP/s of at most 67, 79 TB/s of at most 3.35"
    assert not attention.suspicious(lines[128, 1024])
    assert sum(bool(attention.suspicious(line)) for line in lines.values()) == 12


def test_a_row_of_ours_that_is_as_fast_as_those_is_refused(monkeypatch):
    """On an H100: by the fp32 peak, or by what is held, which must go to memory."""
    monkeypatch.setattr(study.torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    for line in study.published("attention_h100"):
        flops = 32 * int(line["seq"]) ** 2 * int(line["head_dim"])
        held = 1e9 * float(line["mem_gb"])
        row = dict(forward_ms=1e3 * float(line["forward_s"]), peak_of="fp32")
        row |= dict(flops=dict(forward=flops), moved_bytes=dict(forward=held))
        outcome = study.outcome(lambda found, _: found, row, Namespace(device="cuda"))["outcome"]
        assert outcome.startswith("refused: forward in" if attention.suspicious(line) else "ok")


@pytest.mark.parametrize("backend, peak_of", [("plain", "fp32"), ("flash", "fp32"), ("efficient", "bf16")])
def test_a_row_names_the_dtype_of_its_products_and_the_bytes_that_it_moves(backend, peak_of, monkeypatch):
    monkeypatch.setattr(attention, "refusal", lambda *_: None)
    if backend == "efficient":  # is of a GPU
        monkeypatch.setattr(attention, "function", lambda *_: lambda q, k, v: attention.plain(q, k, v, True))
    row = one_row(backend)
    assert row["peak_of"] == peak_of
    assert row["moved_bytes"] == dict(forward=row["held_bytes"], backward=row["held_bytes"])
