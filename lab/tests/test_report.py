"""lab/report/: rows stand beside the right published figures, ratios only where they mean something,
simulated ranks are always visible, and the marked tables of README, NOTES, docs/ and lab/notes/ are what their rows
give."""

import importlib.util
import json
import random
import shlex
import shutil
import tracemalloc
from copy import deepcopy as copy_of
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.report import __main__ as command
from lab.report import history, runs, tables
from lab.report import published as rows
from lab.sweeps import sweep
from trainer import config
from trainer.step_costs import flops_per_token

ROOT = Path(__file__).resolve().parents[2]
PAGES = [path for folder in ("docs", "lab/notes") for path in sorted((ROOT / folder).glob("*.md"))]
DOCUMENTS = ("README.md", "NOTES.md", *(str(path.relative_to(ROOT)) for path in PAGES))
REFERENCE = dict(depth=4, width=4096, seqlen=4096, batch=8, grad_accum=1, param_dtype="bf16", mode="fully_shard",
                 compile="fwdbwd", attn="sdpa", remat="none", wrapper="simple", commit="0123456789", n=27)  # fmt: skip
DEFAULT = config.setting(config.filled(config.parse([]), "cuda"))
REFERENCE_FLAGS = {name: value for name, value in REFERENCE.items() if name in DEFAULT}
GPU = dict(device="NVIDIA H200", torch="2.13.0+cu126")
CPU = dict(device="CPU AMD EPYC, 2 threads", torch="2.13.0+cpu")
needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")


def line(axis, small=False, n=2, **flags):
    """The first setting of an axis that has these flags, on n ranks where its line names none."""
    wanted = {(f"--{name.replace('_', '-')}", (str(value),)) for name, value in flags.items()}
    for setting in sweep.read_settings(axis, small, n, ["--steps", "30"]):
        ranks, has = sweep.parse(shlex.split(setting))
        if wanted <= set(has.items()) and int(has.get("--world", [ranks])[0]) == n:
            return setting
    raise AssertionError(f"no such line: {axis} {flags} on {n} ranks")


def row(setting, on=GPU, outcome="ok", mib=10_000, ms=500, **more):
    """A row as main.py writes it."""
    n, flags = sweep.parse(shlex.split(setting))
    given = sweep.values_of(flags) | {key: value for key, value in more.items() if key in DEFAULT}
    found = REFERENCE | on | {k: v for k, v in given.items() if k in REFERENCE} | dict(line=setting)
    found["flags"] = DEFAULT | REFERENCE_FLAGS | given
    found |= dict(world=f"{given['world']}(sim {given['link']})" if "world" in given else n, outcome=outcome)
    found["peak_alloc_mib" if on is GPU else "peak_rss_mib"] = mib
    if outcome == "ok":
        found |= dict(step_ms=ms, step_ms_min=ms - 1, step_ms_max=ms + 1, loss=10.4)
    return found | more


def table(axis, made, small=False):
    """(text above, rows as dicts of column -> setting; a title that comes again has the one before it in front)."""
    above, text = tables.section(axis, made, small)
    head, _, *body = ([setting.strip() for setting in each.split("|")[1:-1]] for each in text.split("\n"))
    head = [f"{head[i - 1]} {title}" if head.count(title) > 1 else title for i, title in enumerate(head)]
    return above, [dict(zip(head, each, strict=True)) for each in body]


def save(path, made):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in made))
    return path


BESIDE = [
    ("seqlen", 2, dict(seqlen=8192), ("23'257", "2'722"), ("0.430", "0.184")),
    ("gpus", 8, dict(batch=8), ("10'373", "1'114"), ("0.964", "0.449")),
    ("variants", 2, dict(remat="attn", attn="flex", compile="fwdbwd"), ("23'765", "1'039"), ("0.421", "0.481")),
    ("small-params", 4, dict(depth=32, seqlen=128, min_shard_mib=1), ("22'884", "548-557"), ("0.437", "0.905")),
]


@pytest.mark.parametrize("axis, n, flags, published, ratios", BESIDE)
def test_a_row_stands_beside_the_published_one_of_its_key(axis, n, flags, published, ratios):
    above, found = table(axis, [row(line(axis, n=n, **flags))])
    [beside] = [each for each in found if each["allocated MiB"]]
    assert (beside["published allocated MiB"], beside["published ms"]) == published
    assert (beside["published allocated MiB ours/published"], beside["published ms ours/published"]) == ratios
    assert len([each for each in found if each["published allocated MiB"]]) == len(rows.published(axis))
    assert f"published/{axis}.csv" in above
    order = [int(each.get(axis, each.get("batch", 0))) for each in found]
    assert order == sorted(order)


@pytest.mark.parametrize("small", [False, True])
def test_every_line_of_every_axis_finds_its_row(small):
    for axis in sweep.axes():
        settings = sweep.read_settings(axis, small, 2, "--steps 7 --seed 3".split())
        made = [row(setting, CPU if small else GPU, mib=1000 + i) for i, setting in enumerate(settings)]
        found = [ours for _, ours, _ in rows.entries(axis, made, small) if ours]
        assert sorted(ours["line"] for ours in found) == sorted(settings), axis
        other = [row(f"{setting} --clip 2", CPU if small else GPU) for setting in settings]
        with pytest.raises(ValueError, match=f"^{axis}: none of the {len(other)} rows belong to it"):
            rows.entries(axis, other, small)


def test_a_line_that_names_its_ranks_takes_no_other():
    setting = line("gpus", n=4, batch=8)
    with pytest.raises(ValueError, match="gpus: none of the 1 rows belong to it"):
        rows.entries("gpus", [row(setting, world=5)], False)


def test_the_flops_of_the_recomputed_mfu_are_the_models():
    for depth, seqlen, grouping in ((4, 4096, 4), (8, 4096, 4), (4, 512, 4), (4, 4096, 1)):
        c = SimpleNamespace(depth=depth, width=4096, grow=4, vocab=32768, head_dim=128, grouping=grouping)
        theirs = 6 * (depth * (4 * 4096**2 + 2 * 4 * 4096) + 4096 * 32768) + 12 * depth * 4096 * (seqlen + 1) / 2
        expected = flops_per_token(c, seqlen) / theirs
        assert rows.flops_ratio(depth, seqlen, grouping) == pytest.approx(expected, rel=1e-12)


def test_mfu_stands_beside_the_recomputed_one():
    _, found = table("mfu", [row(line("mfu", n=4, attn="flex", remat="both"), mfu=51.2, mfu_palm=55.0, hfu=60.0)])
    [beside] = [each for each in found if each["MFU %"]]
    assert beside["published MFU %: as counted, recomputed"] == "26.0, 50.1"
    assert (beside["ours/published"], beside["MFU % PaLM"], beside["HFU %"]) == ("1.021", "55.0", "60.0")


def test_uncompiled_flex_is_nobodys_neighbour():
    above, found = table("variants", [row(line("variants", remat="none", attn="auto", compile="fwdbwd"))])
    assert "flex, not compiled: not by itself" in above
    assert [each["published allocated MiB"] for each in found if each["allocated MiB"]] == [""]
    assert [each["allocated MiB"] for each in found if each["attn"] == "flex, not compiled"] == [""] * 9


def test_a_doubtful_published_figure_enters_no_ratio():
    _, found = table("variants", [row(line("variants", remat="both", attn="flex", compile="model"))])
    [beside] = [each for each in found if each["allocated MiB"]]
    assert "likely 1135 mistyped" in beside["published ms"]
    assert beside["ours/published"] == "0.603"  # of MiB: there is no other such column


V = {"vocab": 512}


@pytest.mark.parametrize("made, small", [
    ([row(line("depth", True, depth=4), CPU), row(line("depth", True, depth=2), CPU, mib=2000, ms=100)], True),
    ([row(line("depth", depth=4, n=1)), row(line("depth", depth=2, n=1), mib=2000, ms=100)], False),
    ([row(line("depth", depth=4), CPU, vocab=32768), row(line("depth", depth=2), CPU, mib=2000, ms=100)], False),
    ([row(line("depth", True, depth=4), **V), row(line("depth", True, depth=2), **V, mib=2000, ms=100)], True),
])
def test_no_ratio_on_a_cpu_at_small_sizes_or_on_other_ranks(made, small):
    above, found = table("depth", made, small)
    assert "No ratios" in above and not any("ours/published" in title for title in found[0])
    memory = "resident MiB" if made[0]["device"].startswith("CPU") else "allocated MiB"
    by_depth = {each["depth"]: each for each in found}
    assert (by_depth["2"][f"{memory} x"], by_depth["4"][f"{memory} x"]) == ("1.00", "5.00")
    assert (by_depth["2"]["published allocated MiB x"], by_depth["8"]["published allocated MiB x"]) == ("1.00", "2.16")
    assert by_depth["8"][memory] == ""


def test_resident_and_allocated_memory_never_share_a_column():
    _, found = table("depth", [row(line("depth", depth=4)), row(line("depth", depth=2), CPU, mib=300)])
    assert [(each["allocated MiB"], each["resident MiB"]) for each in found[:2]] == [("", "300"), ("10'000", "")]
    assert [each["published allocated MiB ours/published"] for each in found[:2]] == ["", "0.687"]


SIMULATED = line("seqlen", n=1, seqlen=4096) + " --world 2 --link 20:370"


def test_simulated_ranks_are_told_in_the_table_and_above_it():
    real = row(line("seqlen", n=2, seqlen=4096), ms=700)
    above, found = table("seqlen", [row(SIMULATED, ms=600), real])
    assert "n = 2, 2(sim 20:370) ranks" in above and "N(sim LINK): one process in place of N" in above
    ours = [(each["n"], each[tables.MS][:3]) for each in found if each["seqlen"] == "4096"]
    assert sorted(ours) == [("2", "700"), ("2(sim 20:370)", "600")]
    [eight] = [each for each in table("gpus", [row(line("gpus", n=8), world="8(sim ndr-ib)")])[1]
               if each["allocated MiB"]]
    assert (eight["n"], eight["published allocated MiB"]) == ("8(sim ndr-ib)", "10'373")
    died = {**sweep.failed_row(SIMULATED, "timeout"), "torch": "2.13.0+cu126"}
    assert rows.label(died) == "2(sim 20:370)"
    assert [each["n"] for each in table("seqlen", [died])[1] if each["outcome"]] == ["2(sim 20:370)"]


def test_outcomes_stand_on_both_sides():
    made = [row(line("seqlen", seqlen=T), outcome=end) for T, end in ((32768, "OOM bwd"), (512, "failed: a|b"))]
    by_key = {each["seqlen"]: each for each in table("seqlen", made)[1]}
    assert (by_key["32768"]["outcome"], by_key["32768"]["published allocated MiB"]) == ("OOM bwd", "OOM bwd")
    assert (by_key["512"]["outcome"], by_key["512"]["published ms"]) == ("failed: a/b", "142")
    assert "10'000" not in str(by_key)  # the memory of a run that did not end is no figure
    [bad] = [each for each in table("width", [row(line("width", width=768), outcome="badshape")])[1] if each["outcome"]]
    assert (bad["width"], bad["outcome"], bad["published allocated MiB"]) == ("768", "badshape", "badshape")


def test_the_last_row_that_is_ok_counts_for_each_device():
    setting = line("depth", depth=4)
    old = {"date": "2026-11-01"}
    made = [row(setting, mib=1), row(setting, mib=2), row(setting, outcome="OOM fwd"),
            row(setting, torch="2.14.0+cu126", mib=4), row(setting, mib=5, **old),
            sweep.failed_row(setting, "timeout") | {"torch": GPU["torch"]}]  # fmt: skip
    for each in made[:4]:
        each["date"] = "2026-11-02"
    found = [each for each in table("depth", made)[1] if each["n"]]
    assert [(each["torch"], each["allocated MiB"]) for each in found] == [("2.13.0+cu126", "2"), ("2.14.0+cu126", "4")]


def test_lines_cut_short_are_passed_over(tmp_path):
    path = save(tmp_path / "rows.jsonl", [row(line("depth", depth=4))])
    path.write_text('{"line": "--de\n[1]\n' + path.read_text() + '{"setting"')
    assert [each["file"] for each in rows.read([path])] == ["rows.jsonl"]


def test_rows_with_odd_entries_are_a_report_or_one_line(tmp_path, ended):
    """Every entry of a row and of its flags without it and with each odd value, and lines nested deeply, by turns."""
    odd = "missing", None, True, -5, 0, 10**30, 0.5, float("nan"), float("inf"), "x", "", [], [1], {}, {"a": 1}
    good = row(line("seqlen"))
    file = tmp_path / "rows.jsonl"
    codes = []
    cases = [(within, name) for within in (None, "flags") for name in (good[within] if within else good)]
    for within, name in cases:
        for value in random.Random(name).sample(odd, 2):
            changed = copy_of(good)
            (changed[within] if within else changed)[name] = value
            if value == "missing":
                del (changed[within] if within else changed)[name]
            file.write_text("".join(json.dumps(each) + "\n" for each in (changed, good)) + "[" * 10**5 + "\n")
            code, _, err = ended(command.main, f"seqlen --results {file}")
            assert code in (0, 2) and len(err.splitlines()) == (code == 2), (name, value, err)
            assert code == 0 or str(file) in err, (name, value, err)
            codes.append(code)
    assert codes.count(0) > codes.count(2) > 5


@pytest.mark.parametrize("about", [[], 3, {"continues": 1, "after_step": 2}, {"continues": "b"},
                                   {"continues": "b", "after_step": "x"}])  # fmt: skip
def test_settings_of_a_run_that_no_run_has_written_are_named(about, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.settings.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="a.settings.json: no run writes such settings"):
        history.parts(tmp_path / "a.jsonl")


def test_what_rows_say_controls_no_terminal(tmp_path, report, refused):
    """An escape sequence writes into a clipboard or over what was printed."""
    file = tmp_path / "rows.jsonl"
    odd = "\x1b]52;c;eA==\x07\x9b2J\u202e"
    made = [row(line("seqlen"), run=f"{i}{odd}", outcome=f"failed: {odd}", torch=f"{i}{odd}") for i in range(2)]
    file.write_text("".join(json.dumps(each) + "\n" for each in made))
    told = report(f"{file}") + report(f"{file} {file}") + refused(command.main, f"{file} --run '{odd}'")
    assert "]52;c;eA==" in told and not {*told} & {*odd} - {*"]52;c;eA==2J"}


def test_memory_is_that_of_the_rows_that_tables_show_and_what_rows_share_is_held_once(tmp_path):
    def peak(*made):
        """Most bytes that Python held while it read these rows, and the file's."""
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in made))
        tracemalloc.start()
        found = rows.read([file])
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return len(found), held, file.stat().st_size

    def run(number):
        return row(line("depth"), run=f"{number}", **{f"entry {i}": "of each row" for i in range(99)})

    others = [dict(step=i, text=f"{i} " * 99) for i in range(4000)]
    (one, held, size), (still, more, larger) = peak(run(0), *others[:99]), peak(run(0), *others)
    assert one == still == 1 and larger > 30 * size and more < held + size / 2, (held, more)
    count, held, size = peak(*map(run, range(500)))
    assert count == 500 and held < 4 * size, held / size


def test_runs_over_several_links_stand_in_one_line():
    labels = ((1, ""), (8, " --link h100-nvlink"), (8, " --link ndr-ib"))
    made = [row(f"nproc=1 --device cuda --remat none{more}{f' --world {n}{link}' * (n > 1)}", ms=100 * i, mib=9000 // n)
            for i, more in enumerate(("", " --compile-options plain"), 1) for n, link in labels]  # fmt: skip
    found = table("links", [*made, row("nproc=1 --device cuda --remat both", ms=7)])[1]
    assert [each["flags"] for each in found] == ["`--remat none`", "`--compile-options plain --remat none`"]
    assert [each["n = 8(sim ndr-ib), ms"] for each in found] == ["99.0", "199.0"]  # the smallest steps
    assert [each["n = 8, peak MiB"] for each in found] == ["1'125", "1'125"]


def test_rows_of_a_study_with_the_name_of_a_layout_are_none_of_its_rows():
    made = dict(study="collectives", setting=dict(ranks=2), ops={}, outcome="ok")
    with pytest.raises(ValueError, match="collectives: none of the 1 rows belong to it"):
        tables.section("collectives", [made], False)


def test_rows_of_other_programs_are_not_runs_whose_collectives_are_shown():
    """Those of lab.benchmarks.nodes stand in the same file, have collectives and no run."""
    own = dict(run="a", world="2(sim none)", flags={}, collectives=dict(all_gather=dict(n=1, mib=2.0, ms=3.0)))
    other = {name: value for name, value in own.items() if name != "run"} | dict(study="nodes")
    found, columns = runs.sent([other, own])
    assert found == [own] and ("run", ["a"]) in columns
    assert runs.sent([other])[0] == []


def test_collectives_are_counted_by_kind_and_those_without_a_product_meanwhile():
    graph = {"products": 3, "gathered_mib": 6.0, "collectives": [
        ["all-gather", 0, 0, 4, 2], ["all-gather", 0, 2, 4, 2], ["reduce-scatter", 3, 0, 8, 4]]}  # fmt: skip
    flags = {"seed": 0, "compile": "fwdbwd", "compile_options": ["plain"]}
    row = dict(study="collectives", world=8, flags=flags, graphs={"loss, forward": graph})
    about, found = table("collectives", [row])
    assert "timed" not in about
    assert found == [{"Inductor options": "plain", "`--compile`": "fwdbwd", "all-gathers": "2",
                      "all-gathers of them exposed": "1", "reduce-scatters": "1",
                      "reduce-scatters of them exposed": "1", "MiB sent": "8",
                      "most gathered MiB at once": "6"}]  # fmt: skip


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The documents and their rows in a folder of their own, which is the current one."""
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=lambda *_: ["runs"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_tables_of_readme_notes_and_docs_are_what_their_rows_give():
    count, differing = command.check([ROOT / name for name in DOCUMENTS])
    assert (differing, count >= 3) == ([], True)


@pytest.mark.parametrize("name", ["docs/measuring.md", "lab/notes/2026-11.md"])
def test_a_changed_digit_is_found_and_written_back(copy, ended, name):
    page = copy / name
    text = (copy / name).read_text()
    assert text.count("| 91.4 [75.3-219.9] |") == 1
    page.write_text(text.replace("| 91.4 [75.3-219.9] |", "| 91.5 [75.3-219.9] |"))
    number = page.read_text().split("\n").index("| blocks | 2.5289 | 91.5 [75.3-219.9] | 6.3 | 486 |") + 1
    said = f"{name}:{number}: compile: column 'step ms, median [min-max]' has '91.5 [75.3-219.9]'"
    said += " where the rows give '91.4 [75.3-219.9]'"
    for words, code in (("--check", 1), ("--write", 0)):
        status, out, _ = ended(command.main, words)
        assert (status, out.splitlines()[:-1]) == (code, [said])
    assert page.read_text() == text and ended(command.main, "--check")[0] == 0


def test_a_new_mark_is_filled_and_a_line_too_few_or_too_many_found(copy, report):
    save(copy / "results/new.jsonl", [row(line("depth", depth=4))])
    (copy / "NOTES.md").write_text("a\n<!-- report: depth results/new.jsonl -->\n\nb\n")
    report("--write")
    text = (copy / "NOTES.md").read_text().split("\n")
    assert text[2].startswith("| depth | n | allocated MiB |") and text[-3:] == ["", "b", ""]
    (copy / "NOTES.md").write_text("\n".join(text[:-4] + text[-3:]))
    assert command.check([Path("NOTES.md")])[1] == [f"NOTES.md:{len(text) - 3}: depth: 9 lines where the rows give 10"]
    (copy / "NOTES.md").write_text("\n".join(text[:-3] + ["| 1 |", *text[-3:]]))
    count, [said] = command.check([copy / "NOTES.md"])
    assert (count, said.split(": ", 1)[1]) == (1, "depth: 11 lines where the rows give 10")


@pytest.mark.parametrize("words, said", [
    ("colour", "unknown axis 'colour': expected all or one of "),
    ("depth", "no file runs/sweep-depth.jsonl: "),
    ("", "no row of any axis in runs/sweep-*.jsonl; for small sizes add --small"),
    ("--results none.jsonl", "no file none.jsonl: "),
    ("seqlen --results results/cpu_modes.jsonl",
     "seqlen: none of the 5 rows belong to it; for small sizes add --small"),
    ("links --results results/cpu_modes.jsonl", "links: none of the 5 rows belong to it"),
    ("loss --results results/cpu_modes.jsonl",
     "loss: none of the 5 rows belong to it; it takes runs on real ranks whose steps are in FILE.steps/"),
    ("compile --results results/cpu_modes.jsonl results/h100.jsonl", "compile: the rows differ in shape, --steps"),
    ("depth --check", "--check and --write take no other flags"),
    ("--results results/cpu_modes.jsonl", "no row of any axis in results/cpu_modes.jsonl"),
    ("results/collectives.jsonl", "results/collectives.jsonl: no run of a training program is in it, its rows are of "
     "the study collectives; name their table, if there is one: "),
    ("results/cpu_modes.jsonl --last 0", "--last 0: must be at least 1"),
    ("results/cpu_modes.jsonl --run mine", "--run mine: no rows of this run in results/cpu_modes.jsonl"),
    ("compile --results results/cpu_modes.jsonl --html /proc/page.html", "--html /proc/page.html: "),
    pytest.param("compile --results results/cpu_modes.jsonl --plots /proc/plots", "/proc/plots: ",
                 marks=needs_matplotlib),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(copy, refused, words, said):
    assert refused(command.main, words).startswith(f"report: {said}")


@pytest.mark.parametrize("mark, said", [
    ("colour results/cpu_modes.jsonl", "unknown axis 'colour'"), ("compile gone.jsonl", "no file gone.jsonl"),
])
def test_a_bad_mark_is_named_with_its_line(copy, refused, mark, said):
    (copy / "README.md").write_text(f"\n<!-- report: {mark} -->\n")
    assert refused(command.main, "--check").startswith(f"report: README.md:2: {said}")
    (copy / "README.md").write_text("")
    (copy / "NOTES.md").unlink()
    shutil.rmtree(copy / "docs")
    shutil.rmtree(copy / "lab")
    none = ("report: no marked table in README.md, NOTES.md, docs/*.md or lab/notes/*.md; "
            "run it in the project's folder\n")  # fmt: skip
    assert refused(command.main, "--check") == none


def test_two_files_or_two_commits_are_compared_setting_by_setting(copy, report, refused):
    def made(commit, ms, **flags):
        measured = dict(step_ms=ms, step_ms_min=ms - 1, step_ms_max=ms + 1)
        return row(line("depth", **flags)) | dict(commit=commit * 10, line=None) | measured

    old = [made("aaaa", 9.0, depth=2), made("aaaa", 10.0, depth=4)]
    new = [made("bbbb", 5.0, depth=4), made("bbbb", 7.0, depth=8)]
    save(copy / "old.jsonl", old), save(copy / "new.jsonl", new), save(copy / "runs/all.jsonl", old + new)
    for sides in ("old.jsonl new.jsonl", "aaaaaaa bbbbbbb"):
        title, _, *lines = report(sides).strip().splitlines()
        assert len(lines) == 1 and f"{tables.MS}, {sides.split()[0]}" in title
        assert "| 10.0 [9.0-11.0] | 5.0 [4.0-6.0] | 0.500 [0.364-0.667] |" in lines[0]
    save(copy / "seven.jsonl", [made("cccc", 1.0, depth=16)])
    for sides, said in (("aaaaaaa ccccccc", "ccccccc: no row of this commit"), ("old.jsonl 7.jsonl", "no file 7.jsonl"),
                        ("old.jsonl seven.jsonl", "no setting has a row in both")):  # fmt: skip
        assert said in refused(command.main, sides)


def test_a_row_of_a_commit_counts_before_a_later_one_of_uncommitted_changes_which_is_marked(copy, report):
    def made(ms, dirty):
        return row(line("depth", depth=4), ms=ms) | dict(line=None, dirty=dirty, world=1)

    save(copy / "clean.jsonl", [made(10, False), made(20, True)]), save(copy / "dirty.jsonl", [made(5, True)])
    title, _, only = report("clean.jsonl dirty.jsonl").strip().splitlines()
    assert "10.0 [9.0-11.0]" in only and "20.0" not in only
    assert "with uncommitted changes" in title and "| dirty.jsonl |" in only


def told_runs(*settings):
    """Rows of runs of main.py without a setting, each with its name."""
    rows = [row("nproc=1 --depth 1", CPU, **more) for more in settings]
    return [each | dict(line=None, run=f"run-{i}") for i, each in enumerate(rows)]


def test_a_file_is_a_table_of_its_runs_over_the_first_with_the_range_of_the_ratio(copy, report):
    made = told_runs(dict(remat="none", ms=100, eval_loss=2.5), dict(remat="block", ms=120, mib=5_000),
                     dict(remat="block"))  # fmt: skip
    made[2] |= dict(world="8(sim h100-nvlink)", collectives=dict(all_gather=dict(n=3, mib=12.0, ms=0.5)))
    save(copy / "rows.jsonl", made)
    out = report("rows.jsonl")
    assert "| --remat none | 1 | 10'000 | 1.000 | 100.0 [99.0-101.0] | 1.000 [0.980-1.020] | 10.4000 | 2.5000 |" in out
    assert "| --remat block | 1 | 5'000 | 0.500 | 120.0 [119.0-121.0] | 1.200 [1.178-1.222] | 10.4000 |  |" in out
    simulated = next(each for each in out.splitlines() if "8(sim h100-nvlink) | 10'000 |" in each)
    assert "10.4" not in simulated, "the loss of simulated ranks"
    assert "| run-2 | 8(sim h100-nvlink) | all-gather | 3 | 12.0 | 0.50 |" in out
    assert "100.0 [" not in report("rows.jsonl --last 1") + report("rows.jsonl --run run-2")


@pytest.mark.parametrize("lr, width, ms, ratio", [
    ([1e-3, 3e-3], [64, 64], [100, 160], "1.6"),  # equal work
    ([1e-3, 3e-3], [64, 64], [100, 145], None),
    ([1e-3, 3e-3], [64, 128], [100, 160], None),  # other work
])
def test_equal_work_that_takes_more_than_1_5_times_as_long_says_that_the_machine_was_busy(
    copy, report, lr, width, ms, ratio
):
    save(copy / "a.jsonl", told_runs(*(dict(lr=lr[i], width=width[i], ms=ms[i]) for i in (0, 1))))
    told = [text for text in report("a.jsonl").splitlines() if text.startswith("Busy: ")]
    assert [f"up to {ratio} times" in text for text in told] == [True] * (ratio is not None)


def test_a_loss_of_simulated_ranks_stands_in_no_table(copy, report):
    def made(ms):
        return [row(line("depth", depth=4), ms=ms) | dict(line=None, world=world, loss=loss, eval_loss=loss)
                for world, loss in ((1, 2.5), ("8(sim ndr-ib)", 7.75))]  # fmt: skip

    save(copy / "a.jsonl", made(10)), save(copy / "b.jsonl", made(20))
    for argv in ("a.jsonl b.jsonl", "a.jsonl"):
        out = report(argv)
        assert "8(sim ndr-ib)" in out and "2.5000" in out and "7.75" not in out, argv


def test_runs_are_told_apart_by_flags_that_the_first_has_not_and_by_none_where_there_is_no_value(copy, report):
    """Rows of main.py and of finetune.py stand in one file."""
    made = told_runs(dict(seed=0), dict(seed=1), dict(init="a.pt"), dict(init=None))
    made[0]["flags"].pop("init", None), made[1]["flags"].pop("init", None)
    save(copy / "rows.jsonl", made), save(copy / "two.jsonl", made[2:])
    for each in made:
        save(copy / f"two.steps/{each['run']}.jsonl", [dict(step=1, loss=3.0)])
    assert report("rows.jsonl").count("--init a.pt |") == 1
    out = report("loss --results two.jsonl")
    assert "| run-2 | a.pt |" in out and "| run-3 |  |" in out, out


def test_losses_are_compared_that_can_be_and_a_line_says_what_is_left_out(copy, report):
    tuned = {"model": "tiny", "data": "chat.jsonl", "vocab": None, "rank": 8}
    made = told_runs(dict(seed=0), dict(seed=1), dict(seed=2), dict(seed=3))
    made[0]["flags"], made[3]["world"] = tuned, "8(sim h100-nvlink)"
    save(copy / "rows.jsonl", made)
    for each in made:
        save(copy / f"rows.steps/{each['run']}.jsonl", [dict(step=1, loss=3.0)])
    out = report("loss --results rows.jsonl")
    assert "| run-1 | 1 |" in out and "| run-2 | 2 |" in out and "run-0" not in out and "run-3" not in out
    assert "None" not in out
    assert "Left out: 1 of other data, model or vocabulary than the last run's." in out
    assert "Left out: 1 of simulated ranks, whose loss means nothing." in out
    assert "run-1" not in report("loss --results rows.jsonl --last 2")


def test_without_an_axis_all_that_have_rows_are_printed(copy, report):
    save(copy / "runs/sweep-depth.jsonl", [row(line("depth", depth=4))])
    save(copy / "runs/sweep-all.jsonl", [row(line("width", width=2048))])
    assert [each for each in report("").split() if each.startswith("**")] == ["**depth**:", "**width**:"]


def test_a_simulated_peak_s_setting_names_its_ranks():
    rows = [json.loads(line) for line in (ROOT / "results/peaks.jsonl").read_text().splitlines()]
    assert len(rows) == 42 and [row["line"] for row in rows if f"--world {row['world']}" not in row["line"]] == []
