"""python -m lab.profiling.collectives: prints what the graphs hold; bad input: one line, exit code 2."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import ONE_GRAPH
from torch import nn

from lab.benchmarks import collectives as rows
from lab.profiling import collectives as graph
from trainer import config as flags

ROOT = Path(__file__).parents[2]
SMALL = "--device cpu --depth 2 --width 64 --head-dim 16 --vocab 512 --seqlen 16 --batch 2"


@pytest.fixture(autouse=True)
def leaves_no_group():
    yield
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def printed(capsys, line="", world=8, target=None):
    assert graph.main(target, world, flags.parse(f"{SMALL} {line}".split())) == 0
    return capsys.readouterr().out


def test_a_step_in_words(capsys):
    out = printed(capsys)
    for line in (
        r"loss, forward: 5 all-gathers \(2 exposed\); 15 products",
        r"loss, backward: 4 all-gathers \(0 exposed\), 5 reduce-scatters \(2 exposed\); 28 products",
        r"  all-gather +7 +0.\d+ +0.\d+  blocks.1 \(12 parameters\)",
        r"  kept for backward, MiB: gathered 0.000, products (?!0.000).*",
        r"per step and rank: 9 all-gathers, 5 reduce-scatters, \d+\.\d+ MiB sent",
    ):
        assert re.search(f"^{line}$", out, re.M), (line, out)
    assert len(re.findall(r"^  gathered: \d+\.\d+ MiB alive at most, of ", out, re.M)) == 2


@pytest.mark.parametrize("mode", ["fwdbwd", pytest.param("step", marks=[ONE_GRAPH, pytest.mark.slow])])
def test_the_last_block_s_weights_can_be_kept(capsys, mode):
    per_step, kept = (printed(capsys, f"--compile {mode} {line}") for line in ("", "--keep-last"))
    count = lambda out: int(re.search(r"per step and rank: (\d+) all-gathers", out)[1])  # noqa: E731
    assert count(kept) == count(per_step) - 1
    assert mode == "step" or re.search(r"loss, backward: 3 all-gathers \(0 exposed\)", kept)


def test_the_same_step_as_a_row(capsys, tmp_path):
    line = f"{SMALL} --results {tmp_path / 'rows.jsonl'}"
    assert rows.main(SimpleNamespace(world=8), flags.parse(line.split())) == 0
    made = json.loads((tmp_path / "rows.jsonl").read_text())
    assert "per step and rank: 9 all-gathers, 5 reduce-scatters" in capsys.readouterr().out
    forward, backward = made["graphs"].values()
    assert (forward["products"], backward["products"]) == (15, 28)
    assert {kind for kind, *_ in forward["collectives"]} == {"all-gather"}
    assert [(start, gap) for _, start, gap, *_ in forward["collectives"]] == [(0, 0), (0, 0), (0, 7), (7, 7), (7, 7)]
    assert all(start + gap <= 28 for _, start, gap, *_ in backward["collectives"])
    assert (made["world"], made["flags"]["depth"], made["study"]) == (8, 2, "collectives")


@pytest.mark.slow
def test_plain_options_show_what_is_bought(capsys):
    out = printed(capsys, "--compile-options plain")
    assert re.search(r"^loss, forward: 5 all-gathers \(\d+ exposed\)", out, re.M), out  # one per unit


@pytest.mark.slow
def test_accumulating_counts_every_micro_batch(capsys):
    sent = [float(re.search(r"([\d.]+) MiB sent", printed(capsys, line))[1])
            for line in ("", "--grad-accum 4", "--grad-accum 4 --accum-sync last")]  # fmt: skip
    assert sent[1] == pytest.approx(4 * sent[0], rel=0.01) and sent[2] < sent[0]


def test_ahead_starts_gathers_later_and_ends_reductions_sooner(capsys):
    """And changes neither their number nor their buckets."""
    usual, late = (printed(capsys, f"--depth 3 {line}") for line in ("", "--ahead 0.05"))
    line = r"^  (all-gather|reduce-scatter) +(\d+) +(.*)$"
    found = [re.findall(line, out, re.M) for out in (usual, late)]
    before, after = ([(kind, int(gap), rest) for kind, gap, rest in lines] for lines in found)
    assert sorted((kind, rest) for kind, _, rest in before) == sorted((kind, rest) for kind, _, rest in after)
    for kind in ("all-gather", "reduce-scatter"):
        gaps = [[gap for k, gap, _ in lines if k == kind] for lines in (before, after)]
        assert sum(gaps[1]) < sum(gaps[0]) / 2 and gaps[1].count(0) == gaps[0].count(0), (kind, gaps)


def test_blocks_show_one_block(capsys):
    out = printed(capsys, "--compile blocks --mode replicate")
    assert "block, forward: no collectives" in out and "per block and rank: 1 all-reduce, " in out
    out = printed(capsys, "--compile blocks")
    assert "exposed)" not in out and "alive at most" not in out and out.count("around the compiled code") == 2
    assert "per block and rank: 2 all-gathers, 1 reduce-scatter, " in out


@pytest.mark.parametrize("inputs", ["dict(input=torch.randn(2, 16))", "(torch.randn(2, 16),)", "torch.randn(2, 16)"])
def test_your_own_model_by_module_and_function(capsys, tmp_path, monkeypatch, inputs):
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    with torch.device('meta'):\n"
        "        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))\n"
        f"    return model, {inputs}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    out = printed(capsys, world=4, target="own:build")
    assert out.startswith("own:build, 4 ranks") and "model, forward: 3 all-gathers (1 exposed); 3 products" in out
    assert re.findall(r"^  reduce-scatter .*  (\d) \(2 parameters\)$", out, re.M) == ["2", "1", "0"], out


@pytest.mark.parametrize("target, line, message", [
    (None, "--compile none", "--compile none: there is no graph"),
    (None, "--mode hybrid_shard --replicas 3", "--replicas 3: must divide the 8 ranks"),
    ("no_such_module:f", "", "--model no_such_module:f: No module named 'no_such_module'"),
    ("model:nothing", "", "--model model:nothing: module 'model' has no attribute 'nothing'"),
    ("model:sinusoids", "", "--model model:sinusoids: .*give MODULE:FUNCTION"),
    ("platform:architecture", "", "--model platform:architecture: str is no nn.Module; give MODULE:FUNCTION"),
    ("torch.nn:Sequential", "", "--model torch.nn:Sequential: not enough values to unpack .*give MODULE:FUNCTION"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(capsys, target, line, message):
    with pytest.raises(SystemExit) as exit:
        printed(capsys, line, target=target)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and err.count("\n") == 1 and re.search(rf"^error: {message}", err)


@pytest.mark.slow
def test_the_command_line(tmp_path):
    def run(*argv):
        argv = [sys.executable, "-m", "lab.profiling.collectives", *argv]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)

    done = run("--world", "4", *SMALL.split(), "--compile", "blocks")
    assert done.returncode == 0 and "depth=2 width=64" in done.stdout and "4 ranks" in done.stdout, done.stderr
    assert "dynamo_pgo" not in done.stderr, "a warning of caches that are left out"
    assert run("--help").returncode == 0
    bad = run("--world", "0")
    assert bad.returncode == 2 and "--world 0: must be at least 1" in bad.stderr


def test_saved_bytes_are_by_kind_and_counted_once():
    """A linear under a gelu: the product is kept, once; the input and the weight exist anyway."""
    layer = nn.Linear(8, 16)
    graphs = graph.capture(lambda x: nn.functional.gelu(layer(x)).sum(), (torch.randn(4, 8),))
    kinds = graph.saved(graphs["forward"])
    assert kinds["products"] == 4 * 16 * 4 and kinds["gathered"] == kinds["attention"] == kinds["other"] == 0
    assert kinds["inputs"] == 4 * 8 * 4
