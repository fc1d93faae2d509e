"""lab/report/plots.py: what is drawn of rows, of published ones and of runs that failed; no figure cuts a label,
clips a point or shows nothing. And lab/report/history.py: the logged steps of runs, across resuming.

    pytest lab/tests/test_plots.py         # about 15 s; one process
"""

import importlib.util
import json
import re
import sys
import tracemalloc
import warnings
from pathlib import Path

import pytest
from running import ROOT
from test_report import CPU, SIMULATED, line, row, save

from lab.report import __main__ as command
from lab.report import published as rows
from lab.report import runs, tables

needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("flag, name", [("--plots", "plots"), ("--html", "page.html")])
def test_without_matplotlib_figures_are_one_line_and_exit_2(folder, monkeypatch, ended, flag, name):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lab.report.plots", raising=False)
    code, out, err = ended(command.main, f"compile --results {ROOT / 'results/cpu_modes.jsonl'} {flag} {name}")
    assert (code, out, err.count("\n")) == (2, "", 1) and flag in err and "matplotlib" in err


@pytest.fixture
def whole(monkeypatch):
    """Every figure that is saved, checked: all text lies inside, no label on another, no legend on the axes or without
    entries, no point is cut off, and axes have labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plain = Figure.savefig
    seen = []

    def apart(boxes, what):
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i]), what

    def savefig(figure, path, **how):
        plain(figure, path, **how)
        renderer = FigureCanvasAgg(figure).get_renderer()
        inner = figure.get_tightbbox(renderer)
        outer = figure.bbox_inches
        assert min(inner.x0, inner.y0, outer.x1 - inner.x1, outer.y1 - inner.y1) >= -0.01, (path, inner)
        assert outer.width <= 7.5 and outer.height < 25, path
        legends = [legend.get_window_extent(renderer) for legend in figure.legends]
        assert all(legend.get_texts() for legend in figure.legends)
        titles = [figure._suptitle.get_window_extent(renderer)] if figure._suptitle else []
        apart([*legends, *titles, *(ax.bbox for ax in figure.axes)], (path, "a legend or the title lies on the axes"))
        for ax in figure.axes:
            assert ax.get_xlabel() or ax.get_shared_x_axes().joined(ax, figure.axes[-1])
            for side in (ax.xaxis, ax.yaxis):
                low, high = sorted(side.get_view_interval())
                ticks = [tick for tick in side.get_major_ticks() if low <= tick.get_loc() <= high]
                labels = [tick.label1 for tick in ticks if tick.label1.get_text() and tick.label1.get_visible()]
                apart([label.get_window_extent(renderer) for label in labels], (path, [*map(str, labels)]))
            for drawn in ax.lines:  # points inside of the axes
                if drawn.get_marker() not in ("None", None, "") and drawn.get_transform() == ax.transData:
                    for x, y in drawn.get_xydata():
                        assert ax.bbox.padded(1).contains(*ax.transData.transform((x, y))), (path, x, y)
        apart([ax.xaxis.label.get_window_extent(renderer) for ax in figure.axes if ax.get_xlabel()], path)
        seen.append(Path(path).name)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return seen


def texts(path):
    """The words of an SVG in one line; a legend's or a title's line breaks are elements of their own."""
    return " ".join(re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", path.read_text()))


@needs_matplotlib
def test_plots_show_published_figures_simulated_ranks_and_outcomes(folder, report, whole):
    made = [row(line("seqlen", seqlen=T), mib=T, ms=T / 4) for T in (512, 4096)]
    made += [row(line("seqlen", seqlen=8192), outcome="OOM fwd"), row(SIMULATED)]
    path = save(folder / "rows.jsonl", made)
    told = report(f"seqlen --results {path} --plots plots")
    assert "plots/seqlen-gpu.svg\nplots/seqlen-gpu.png" in told and whole == ["seqlen-gpu.svg", "seqlen-gpu.png"]
    assert "no figure of time against memory: no three runs share shape, device, torch and ranks" in told
    drawn = texts(folder / "plots/seqlen-gpu.svg")
    assert drawn.count("OOM fwd") == drawn.count("OOM bwd") == 2  # ours and the published, in either panel
    for text in ("peak allocated memory (MiB)", "time of a step (ms)", "sequence length (tokens)", "n=2(sim 20:370)",
                 "published A100SXM n=2", "NVIDIA H200"):  # fmt: skip
        assert text in drawn, text


@needs_matplotlib
def test_the_two_ways_to_scale_are_curves_of_their_own():
    from lab.report import plots

    made = [row(line("gpus", n=n, batch=b), mib=n * b) for n, b in ((1, 8), (4, 8), (4, 16), (8, 8))]
    made = [each | {"world": int(str(each["world"])[0])} for each in made]
    entries = rows.entries("gpus", made, False)
    theirs = {key: each for key, _, each in entries if each}
    drawn = plots.curves("gpus", [each for each in entries if each[1]], theirs, "peak_alloc_mib")
    found = {name: {x: y for x, y, *_ in points} for name, points in drawn.items()}
    ours = "NVIDIA H200, torch 2.13.0+cu126, batch "
    alike = "published A100SXM, batch "
    assert (found[ours + "8 a rank"], found[ours + "64 in all"]) == ({1: 8, 4: 32, 8: 64}, {4: 64, 8: 64})
    assert [sorted(found[alike + each]) for each in ("8 a rank", "64 in all")] == [[1, 2, 3, 4, 6, 8], [1, 2, 4, 8]]
    assert found[alike + "64 in all"][1] == "OOM bwd" and len(found) == 4


@needs_matplotlib
def test_published_figures_stand_beside_those_of_gpus_alone(folder, whole):
    from lab.report import plots

    made = [row(line("depth", True, depth=d), CPU, mib=100 * d, ms=d) for d in (1, 4)]
    made += [row(line("depth", True, depth=2))]
    cpu, _, gpu, _ = plots.axis("depth", rows.entries("depth", made, True), folder)
    assert (cpu.name, gpu.name) == ("depth-cpu.svg", "depth-gpu.svg")
    assert [(word in texts(cpu), word in texts(gpu)) for word in ("H200", "published", "resident", "allocated")] == [
        (False, True), (False, True), (True, False), (False, True)]  # fmt: skip


@needs_matplotlib
def test_a_flag_in_a_figure_is_not_parted_from_its_value():
    from lab.report.plots import wrapped

    text = "--mode fully_shard --no-reshard --compile none"
    assert wrapped(text, 40) == "--mode fully_shard --no-reshard\n--compile none"
    assert wrapped("a device, torch 2.13", 10) == "a device,\ntorch 2.13"
    assert max(map(len, wrapped("--compile-options " + "a" * 60, 36).splitlines())) <= 36


@needs_matplotlib
def test_variants_are_bars_with_a_range_beside_the_published_mark(folder, whole):
    from lab.report import plots

    flex = dict(attn="flex", compile="fwdbwd")
    made = [row(line("variants", remat=r, **flex), mib=mib, ms=ms) for r, mib, ms in (("both", 14_000, 900),)]
    made += [row(line("variants", remat="mlp", **flex), mib=17_000, ms=950, step_ms_min=940, step_ms_max=1500)]
    made += [row(line("variants", remat="attn", **flex), outcome="OOM bwd")]
    svg, png = plots.axis("variants", rows.entries("variants", made, False), folder)
    drawn = texts(svg)
    for text in ("--remat both", "peak allocated memory (MiB)", "time of a step (ms)", "NVIDIA H200", "published",
                 "bar: smallest,", "line: median", "OOM bwd"):  # fmt: skip
        assert text in drawn, text
    for text in ("flex", "--compile", "fwdbwd", "fully_shard", "4096", "_"):  # what all have in common
        assert text not in drawn, text
    assert png.read_bytes()[:4] == b"\x89PNG"


@needs_matplotlib
def test_a_bar_has_the_flags_that_differ_for_a_name_and_the_ranks_for_a_heading(folder, whole):
    from lab.report import plots

    made = [row(line("depth", depth=8)) | dict(simulated_mib=20_000), row(line("depth", depth=4))]
    drawn = texts(plots.of_rows("peaks", made, folder)[0])
    assert all(each in drawn for each in ("simulated peak memory (MiB)", "published", "--depth 8", "--depth 4"))
    made = [row(f"nproc={n} --depth 4 --lr {lr}", run=f"{n} {lr}") for n in (1, 2) for lr in (0.1, 0.01)]
    made += [made[0] | dict(run="again")]
    drawn = texts(plots.of_rows("runs", made, folder)[0])
    assert [drawn.count(each) for each in ("ranks: 1", "ranks: 2", "--lr 0.1", "--lr 0.01")] == [1, 1, 3, 2]
    assert "run again" in drawn and "run 1 0.1" in drawn and "run 2" not in drawn
    made = [row(f"nproc=2 --depth 4 --wrapper {wrapper}") for wrapper in ("simple", "fsdp2")]
    assert texts(plots.of_rows("runs", made, folder)[0]).count("--wrapper fsdp2") == 2  # the name and the colour


@needs_matplotlib
def test_what_would_show_nothing_says_why_in_one_line(folder, report):
    path = save(folder / "rows.jsonl", [row(line("mfu", n=4, remat="none", attn="auto"))])
    why = "no figure of mfu: on a GPU no run has MFU (%) (ok)"
    assert why in report(f"mfu --results {path} --plots plots").splitlines()
    path = save(folder / "rows.jsonl", [row(line("mfu", n=4, remat="none", attn="auto"), mfu=41.0)])
    assert "no figure of mfu" not in report(f"mfu --results {path} --plots plots")
    drawn = texts(folder / "plots/mfu-gpu.svg")
    assert "MFU (%)" in drawn and "time" not in drawn
    path = save(folder / "rows.jsonl", [row(line("depth", depth=8), outcome="OOM fwd")])
    told = report(f"depth --results {path} --plots plots").splitlines()
    assert "no figure of depth: on a GPU no run has time of a step (ms) (OOM fwd)" in told


@needs_matplotlib
def test_the_front_is_of_one_setting_and_names_its_points(folder, whole):
    from lab.report import plots

    assert runs.front([(3, 1), (1, 3), (2, 2), (2, 3), (3, 2)]) == [(1, 3), (2, 2), (3, 1)]
    points = (("none", "fwdbwd", 3, 1), ("mlp", "fwdbwd", 2, 2), ("both", "model", 3, 2))
    made = [row(line("variants", remat=r, compile=c, attn="flex"), mib=mib, ms=ms) for r, c, mib, ms in points]
    made += [row(line("depth", depth=8)), row(SIMULATED), row(line("variants", remat="block"), outcome="OOM bwd")]
    svg, png = plots.fronts(runs.shared(made), folder)
    drawn = texts(svg)
    for text in ("--compile model --remat both", "--compile fwdbwd --remat mlp", "ranks: 2", "depth 4,",
                 "peak allocated memory (MiB)", "time of the smallest step (ms)"):  # fmt: skip
        assert text in drawn, text
    assert "remat block" not in drawn and "sim" not in drawn and "flex" not in drawn
    ticks = re.findall(r">(\d+)</text>", svg.read_text().partition('id="matplotlib.axis_2"')[2])
    assert "2" in ticks and len(ticks) == len({*ticks}), "two ticks of one label"
    drawn = texts(plots.fronts(runs.shared(made), folder, most=2)[0])
    assert "1 others, none better in both" in drawn and "--compile model" not in drawn


@needs_matplotlib
@pytest.mark.parametrize("name", "h100 cpu_modes peaks".split())
def test_figures_of_our_rows_cut_nothing(folder, whole, report, name):
    layout = dict(h100="links", cpu_modes="compile", peaks="peaks")
    report(f"{layout[name]} --results {ROOT}/results/{name}.jsonl --plots plots")
    assert whole


def logged(folder, run, steps, **settings):
    """Files of a run as main.py leaves them: a step or, with a second number, an evaluation each."""
    folder.mkdir(exist_ok=True)
    lines = [dict(step=s, tokens=10 * s, loss=9 - s / 10) | (dict(eval_loss=e[0]) if e else {}) for s, *e in steps]
    (folder / f"{run}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (folder / f"{run}.settings.json").write_text(json.dumps(settings))


def test_a_history_has_every_step_once_across_kills_and_resuming(tmp_path):
    from lab.report.history import curves_of, history

    steps = tmp_path / "rows.steps"
    logged(steps, "a", [(1,), (5,), (5, 8.0), (9,)])  # killed after step 9, saved after step 6
    logged(steps, "b", [(8,), (10,), (12,), (12, 7.0)], continues="a", after_step=6)  # saved after step 10
    logged(steps, "c", [(11,), (15,), (15, 6.5)], continues="b", after_step=10)
    found = history(steps / "c.jsonl")
    assert [each["step"] for each in found] == [1, 5, 5, 8, 10, 11, 15, 15]
    path = save(tmp_path / "rows.jsonl", [dict(run=run, flags=dict(lr=1, seed=0), study="mlp") for run in "abc"])
    [(own, [*told])] = curves_of(rows.read([path]))
    assert own["run"] == "c" and told == found
    (steps / "c.settings.json").write_text("{cut off")
    assert [each["step"] for each in history(steps / "c.jsonl")] == [11, 15, 15]


@needs_matplotlib
def test_losses_of_several_runs_are_curves_over_tokens(folder, whole, report):
    from lab.report import plots

    made = [row(line("depth", depth=4)) | dict(run=run) for run in ("a", "b", "c")]
    for i, each in enumerate(made):
        each["flags"] = each["flags"] | dict(lr=10.0**-i)
    for run, last in (("a", 8.0), ("b", float("nan"))):
        logged(folder / "rows.steps", run, [(1,), (5,), (5, last), (9,), (9, 7.5)])
    path = save(folder / "rows.jsonl", made)
    assert "| a | 1.0 |" in report(f"loss --results {path} --plots plots")
    drawn = texts(folder / "plots/loss.svg")
    words = "--lr 1.0", "--lr 0.1", "loss (nats per token)", "tokens", "--lr 1.0, held out"
    assert all(each in drawn for each in words)
    assert "0.01" not in drawn  # has no steps
    logged(folder / "rows.steps", "a", [(1,), (5,)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.losses([made[0] | dict(history=str(folder / "rows.steps/a.jsonl"))], folder)  # without held-out data
    with pytest.raises(plots.NoFigure, match="no logged step of a run on real ranks lies beside"):
        plots.losses([made[0]], folder)


def test_a_resumed_run_of_the_trainer_has_one_history(train, tmp_path, monkeypatch):
    from lab.report.history import curves_of

    monkeypatch.chdir(tmp_path)
    saving = ["--save", tmp_path / "run", "--log-every", 1, "--eval-every", 2, "--results", tmp_path / "rows.jsonl"]
    assert train(*saving, "--steps", 2).code == 0 and train(*saving, "--steps", 4).code == 0
    [(own, steps)] = curves_of(rows.read([tmp_path / "rows.jsonl"]))
    assert [each["step"] for each in steps] == [1, 2, 2, 3, 4, 4] and own["resumed_after"] == 2
    assert all({"tokens", "loss"} <= each.keys() for each in steps)
    assert [each["step"] for each in steps if "eval_loss" in each] == [2, 4]
    elsewhere = ["--save", tmp_path / "b", "--resume", tmp_path / "run", "--eval-every", 2, "--results"]
    assert train(*elsewhere, tmp_path / "rows.jsonl", "--steps", 6).code == 0  # several runs may begin there
    assert len([*curves_of(rows.read([tmp_path / "rows.jsonl"]))]) == 2


def counted(monkeypatch, module, name):
    """The first argument of each call of a function from now on."""
    plain = getattr(module, name)
    seen = []
    monkeypatch.setattr(module, name, lambda first, *rest: seen.append(first) or plain(first, *rest))
    return seen


@needs_matplotlib
def test_of_many_rows_the_last_are_drawn_and_all_work_grows_as_the_rows_do(folder, monkeypatch, report):
    """Counts, not seconds: twice as many more rows take twice as many more calls, four times were their square. Each
    line is decoded and checked once, each setting parsed at most twice, the table made once, and the figures are as
    many as of few rows."""
    from matplotlib.figure import Figure

    from lab.report import plots
    from lab.sweeps import sweep
    from trainer import logging

    limits = dict(MOST=4, SETTINGS=2, NAMED=3)
    for name, most in limits.items():
        monkeypatch.setattr(plots, name, most)
    checked = counted(monkeypatch, logging, "_odd_entry")
    parsed = counted(monkeypatch, sweep, "parse")
    saved = []
    told_apart = counted(monkeypatch, runs, "flags_apart")
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: (saved.append(path.name), path.touch()))

    def calls(count, start):
        """Of functions, for the page of so many rows, each of a setting of its own: no cache knows its setting."""
        setting = line("depth", True, depth=1)
        sent = {"all_gather": dict(n=1, mib=1, ms=1)}
        made = [row(f"{setting} --lr {start + i}", CPU, mib=9999 - i, ms=1 + i, width=128 + i // 9,
                    remat_ratio=i % 9 / 10, run=f"{start + i}", collectives=sent) for i in range(count)]  # fmt: skip
        for each in made[::3]:
            each["line"] = None
        for each in made[-6:]:
            logged(folder / "rows.steps", each["run"], [(1,), (5,)])
        path = save(folder / "rows.jsonl", made)
        number = 0
        [each.clear() for each in (checked, parsed, saved, told_apart)]

        def count_it(frame, event, argument):
            nonlocal number
            number += event in ("call", "c_call")

        sys.setprofile(count_it)
        try:
            said = report(f"{path} --html page.html")
        finally:
            sys.setprofile(None)
        assert sum("flags" in each for each in checked) == count and len(parsed) <= 2 * count
        assert [len(each) for each in told_apart] == [count], "the table is made once"
        assert sorted(saved) == "loss.svg runs.svg time-memory-1.svg time-memory-2.svg".split()
        return number, said

    calls(30, 0)  # imports, fonts
    (few, _), (some, _), (many, said) = calls(30, 100), calls(60, 300), calls(120, 600)
    assert (many - some) / (some - few) < 2.2, (few, some, many)
    text = (folder / "page.html").read_text()
    for told in ("Drawn: the last 4 of 120 rows.", "Drawn: the last 4 of 6 rows.",
                 "Drawn: the last 2 of 14 settings."):  # fmt: skip
        assert told in said and told in text
    assert text.count("<tr>") == 1 + 120 + 1 + 6 + 1 + 120, "of tables nothing is left out"


@needs_matplotlib
def test_of_a_long_front_the_fastest_are_named_and_dots_of_many_are_an_image(folder, monkeypatch):
    from lab.report import plots

    monkeypatch.setattr(plots, "NAMED", 3)
    monkeypatch.setattr(plots, "MOST", 10)

    def made(count, front):
        found = [row(line("depth", depth=4), remat_ratio=i / 99, ms=10 + i) for i in range(count)]
        return [each | dict(peak_alloc_mib=9000 - i * (i < front)) for i, each in enumerate(found)]

    [few] = [path for path in plots.fronts(runs.shared(made(12, 3)), folder) if path.suffix == ".svg"]
    assert "9 others, none better in both" in texts(few) and "<image" not in few.read_text()
    [many] = [path for path in plots.fronts(runs.shared(made(40, 20)), folder) if path.suffix == ".svg"]
    assert "37 others" in texts(many) and "none better" not in texts(many) and "<image" in many.read_text()


def test_a_table_of_losses_holds_the_steps_of_one_run(folder):
    def peak(count):
        made = [row(line("depth", depth=4)) | dict(run=f"{i}") for i in range(count)]
        for each in made:
            logged(folder / "rows.steps", each["run"], [(i,) for i in range(300)])
        found = rows.read([save(folder / "rows.jsonl", made)])
        tracemalloc.start()
        tables.section("loss", found, False)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return held

    assert peak(40) < 2 * peak(4)


@needs_matplotlib
def test_the_pieces_of_a_rank_are_bars_of_each_way(folder):
    from lab.studies import zero1

    made = [dict(outcome="ok", setting=dict(way=way), moments=dict.fromkeys(("before the update", "after the update"),
            dict.fromkeys(zero1.PIECES, 2**20))) for way in zero1.WAYS]  # fmt: skip
    zero1.figure(made, folder)
    assert "DDP ZeRO-1 FSDP" in texts(folder / "study-zero1.svg")
