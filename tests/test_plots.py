"""trainer/report/plots.py: curves of our rows and of published ones, and what is drawn of runs that failed."""

import importlib.util
import sys

import pytest
from running import ROOT
from test_report import CPU, SIMULATED, line, row, save

from trainer.report import __main__ as command
from trainer.report import published as rows

needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plots_without_matplotlib_are_one_line_and_exit_2(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "trainer.report.plots", raising=False)
    with pytest.raises(SystemExit) as stopped:
        command.main(["compile", "--results", str(ROOT / "results/cpu_modes.jsonl"), "--plots", "plots"])
    told = capsys.readouterr()
    assert (stopped.value.code, told.out, told.err.count("\n")) == (2, "", 1) and "matplotlib" in told.err


@needs_matplotlib
def test_plots_show_published_figures_simulated_ranks_and_outcomes(folder, capsys):
    made = [row(line("seqlen", seqlen=T), mib=T, ms=T / 4) for T in (512, 4096)]
    made += [row(line("seqlen", seqlen=8192), outcome="OOM fwd"), row(SIMULATED)]
    path = save(folder / "rows.jsonl", made)
    assert command.main(["seqlen", "--results", str(path), "--plots", "plots"]) == 0
    assert "plots/seqlen-gpu.svg" in capsys.readouterr().out
    drawn = (folder / "plots/seqlen-gpu.svg").read_text()
    assert drawn.count("OOM fwd") == drawn.count("OOM bwd") == 2  # ours and the published, in either panel
    for text in ("peak allocated MiB", "median ms per step", "n=2(sim 20:370)", "published A100SXM n=2", "NVIDIA H200"):
        assert text in drawn


@needs_matplotlib
def test_the_two_ways_to_scale_are_curves_of_their_own():
    from trainer.report import plots

    made = [row(line("gpus", n=n, batch=b), mib=n * b) for n, b in ((1, 8), (4, 8), (4, 16), (8, 8))]
    made = [each | {"world": int(str(each["world"])[0])} for each in made]
    found = plots.curves("gpus", rows.entries("gpus", made, False), True)
    ours, alike = "NVIDIA H200, torch 2.13.0+cu126, batch ", "published A100SXM, batch "
    assert {x: mib for x, (mib, *_) in found[ours + "8 a rank"].items()} == {1: 8, 4: 32, 8: 64}
    assert {x: mib for x, (mib, *_) in found[ours + "64 in all"].items()} == {4: 64, 8: 64}
    assert [sorted(found[alike + each]) for each in ("8 a rank", "64 in all")] == [[1, 2, 3, 4, 6, 8], [1, 2, 4, 8]]
    assert found[alike + "64 in all"][1] == (None, None, "OOM bwd") and len(found) == 4


@needs_matplotlib
def test_a_cpus_memory_is_drawn_apart_from_the_published(folder):
    from trainer.report import plots

    made = [row(line("depth", True, depth=d), CPU, mib=100 * d, ms=d) for d in (1, 4)]
    made += [row(line("depth", True, depth=2))]
    path, other = plots.axis("depth", rows.entries("depth", made, True), folder)
    drawn = path.read_text()
    assert ("H200" in drawn, "H200" in other.read_text(), other.name) == (False, True, "depth-gpu.svg")
    assert path.name == "depth-cpu.svg" and "each relative to its first point" in drawn
    assert "peak resident MiB (published: allocated), relative" in drawn


@needs_matplotlib
def test_the_front_is_of_one_setting_and_names_its_points(folder):
    from trainer.report import plots

    assert plots.front([(3, 1), (1, 3), (2, 2), (2, 3), (3, 2)]) == [(1, 3), (2, 2), (3, 1)]
    points = (("none", "fwdbwd", 3, 1), ("mlp", "fwdbwd", 2, 2), ("both", "model", 3, 2))
    made = [row(line("variants", remat=r, compile=c, attn="flex"), mib=mib, ms=ms) for r, c, mib, ms in points]
    made += [row(line("depth", depth=8)), row(SIMULATED), row(line("variants", remat="block"), outcome="OOM bwd")]
    [path] = plots.fronts(made, folder)
    drawn = path.read_text()
    assert all(text in drawn for text in ("compile=model remat=both", "compile=fwdbwd remat=mlp", "n=2: depth 4"))
    assert "block" not in drawn and "sim" not in drawn
