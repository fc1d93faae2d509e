"""The README and docs/ are true: links, files, commands and flags exist, the list of files is the tree.

    pytest tests/test_readme.py        # some seconds; runs `main.py --help` once
"""

import ast
import re
import shutil
import sys
import tomllib

import pytest
from documented import commands
from running import ROOT, ran, rows_of

README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
}
FAULTS = re.findall(r"^\| (\d+) \| .+ \| .+ \|$", PAGES["docs/checkpoints_and_faults.md"], re.MULTILINE)
SHOWN_BY = tomllib.loads((ROOT / "tests/faults.toml").read_text())
PROMISED = range(1, 100)
NOT_OURS = {"my_file.py", "out.pt", "front.png", "chat.jsonl", "config.json", "tokenizer.json",  # of the reader
            "adapter_config.json", "generation_config.json", "state.json", "a.jsonl", "b.jsonl"}  # fmt: skip
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
FILE = re.compile(r"(?<![\w/.*-])[\w.-][\w./-]*\.(?:py|md|sh|jsonl|txt|csv|toml|json|png|svg)\b(?!\w)")
def sections(page):
    """The text of a page, cut before each heading."""
    apart = re.split(r"^(?=##? )", re.sub(r"```.*?```", lambda m: m[0].replace("\n#", "\n #"), PAGES[page], flags=re.S),
                     flags=re.MULTILINE)  # fmt: skip
    return [part for part in apart if part.strip()]


def anchors(page):
    """What GitHub makes of the headings."""
    titles = [part.partition("\n")[0].lstrip("# ") for part in sections(page)]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def source(module):
    """The file that `python -m MODULE` runs."""
    path = module.replace(".", "/")
    return f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if not target.startswith("https://"):
            file, _, heading = target.partition("#")
            path = (ROOT / page).parent / file if file else ROOT / page
            assert path.is_file(), (page, target)
            assert not heading or heading in anchors(str(path.resolve().relative_to(ROOT))), (page, target)


def test_every_page_is_linked_from_the_readme():
    assert not [page for page in PAGES if page != "README.md" and f"]({page}" not in README]


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_that_are_named_exist(page):
    for code in CODE.findall(PAGES[page]):
        for file in set(FILE.findall(code)) - NOT_OURS:
            places = (ROOT / folder / file for folder in ("", "tests", "lab/tests", "docs"))
            assert file.startswith("runs/") or any(path.exists() for path in places), (page, file)
        for name in re.findall(r"-m ((?:trainer|benchmarks|studies)(?:\.\w+)+)", code):
            assert (ROOT / source(name)).is_file(), (page, name)


def refused(*commands):
    """What programs say of these commands, by default of all that docs name, without running them."""
    done = ran(sys.executable, "tests/documented.py", *commands, timeout=600)
    assert done.code == 0, done.err
    return done.out.splitlines()


@pytest.mark.long
def test_every_command_of_readme_and_docs_is_one_that_its_program_reads():
    """But for files that an earlier command writes, and what needs a GPU."""
    elsewhere = re.compile("; python -m lab.studies.coll|--attn flex: needs CUDA to train")
    assert not [line for line in refused() if not elsewhere.search(line)]


def test_commands_behind_a_block_of_another_language_are_among_them():
    found = {command for page, command in commands() if page in ("README.md", "lab/README.md", "docs/commands.md")}
    assert {"./launch.sh run --compile none --depth 1", "python plan.py --best --gpus 8",
            "./launch.sh sweep depth --slurm --gpus-per-node 8"} <= found  # fmt: skip


@pytest.mark.long
def test_the_picture_is_of_the_committed_rows(tmp_path):
    plots = pytest.importorskip("lab.report.plots", exc_type=ImportError)
    rows = rows_of(ROOT / "results/collectives.jsonl")
    svg, png = plots.collectives(rows, tmp_path)
    texts = [re.findall(r"<text[^>]*>([^<]+)<", path.read_text()) for path in (svg, ROOT / "docs" / svg.name)]
    assert texts[0] == texts[1]
    assert "torch.compile alone: 20 collectives, 20 of them exposed" in texts[0]
    assert "with overlap.py: 20 collectives, 4 of them exposed" in texts[0]
    assert "20 that all wait, or, with" in README
    with pytest.raises(plots.NoFigure):
        plots.collectives(rows[:1], tmp_path)
    assert max((ROOT / "docs" / path.name).stat().st_size for path in (svg, png)) < 100_000


@pytest.mark.long
@pytest.mark.parametrize(("name", "rows", "figure"), [("loss", "loss_small", "loss"), ("links", "h100", "links"),
                                                      ("links", "h100", "time-memory-1")])  # fmt: skip
def test_the_figures_of_docs_are_of_the_committed_rows(tmp_path, name, rows, figure):
    plots = pytest.importorskip("lab.report.plots", exc_type=ImportError)
    from lab.report import published, runs, tables

    found = published.read([ROOT / f"results/{rows}.jsonl"])
    if figure == "links":
        plots.of_rows(name, tables.links(found)[0], tmp_path)
    else:
        plots.losses(found, tmp_path) if figure == "loss" else plots.fronts(runs.shared(found), tmp_path)
    texts = [re.findall(r"<text[^>]*>([^<]+)<", (folder / f"{figure}.svg").read_text()) for folder in
             (tmp_path, ROOT / "docs")]  # fmt: skip
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10
    assert max((ROOT / "docs" / f"{figure}.{end}").stat().st_size for end in ("svg", "png")) < 200_000


def test_the_plan_that_the_readme_shows_is_what_plan_py_prints():
    command, *shown = re.search(r"^\$ python (plan\.py .*?)\n```", README, re.DOTALL | re.MULTILINE)[1].splitlines()
    printed = ran(sys.executable, *command.split()).out.splitlines()
    assert shown and [line for line in printed if line in shown] == [line for line in shown if line != ".."]
    other = ran(sys.executable, *command.replace("h100", "h200").split()).out
    assert f"\nstep {re.search(r'on an H200, for which the plan is (.+ ms)', README)[1]}," in other


def table_rows(page):
    """The columns of each row that begins with flags."""
    lines = PAGES[page].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith(("| `", "| (", "| .. "))]


def mib(number):
    return f"{round(number):,}".replace(",", "'")


def simulated(flags):
    """(TFLOP, peak MiB) of one rank of 8 by a committed row, as a page has them."""
    parts = sorted(re.split(r" (?=--)", flags))
    (row,) = [row for row in rows_of(ROOT / "results/peaks.jsonl") if row["line"].startswith("nproc=1 ")
              and sorted(re.split(r" (?=--)", row["line"])[1:]) == sorted([*parts, "--world 8"])]  # fmt: skip
    return f"{row['tflop']:.1f}", mib(row["simulated_mib"])


def test_the_table_of_the_readme_is_of_the_committed_rows():
    rows = [row for row in rows_of(ROOT / "results/h200_order.jsonl") if row["remat"] == "both"]
    measured = {(row["compile"], row["wrapper"], row["world"]): row for row in rows}
    seen = [row for row in table_rows("README.md") if len(row) == 5 and row[0].startswith(("(default", "`--compile"))]
    assert len(seen) == 3
    for flags, *shown in seen:
        mode = "blocks" if "blocks" in flags else "fwdbwd", "fsdp2" if "fsdp2" in flags else "simple"
        rows = [measured[*mode, f"8(sim {link})"] for link in ("h100-nvlink", "ndr-ib")]
        times = [f"{row['step_ms_min']:.1f} [{row['step_ms']:.1f}]" for row in rows]
        peak = ", ".join(mib(max(row[f"peak_{kind}_mib"] for row in rows)) for kind in ("alloc", "reserved"))
        words = "--remat both" + (f" {flags.strip('`')}" if "`" in flags else "")
        assert shown == [*times, peak, simulated(words)[0]], flags


def test_the_peaks_of_how_it_works_are_of_the_committed_rows():
    seen = [row for row in table_rows("docs/how_it_works.md") if len(row) == 4]
    assert len(seen) == 10
    before = ""
    for flags, _, *shown in seen:
        before = f"{before} {flags[4:-1]}" if flags.startswith("..") else flags.strip("`")
        assert tuple(shown) == simulated(before), flags


def test_every_promised_fault_has_one_row_and_tests():
    assert sorted(map(int, FAULTS)) == sorted(map(int, SHOWN_BY)) == sorted(PROMISED)


@pytest.mark.parametrize("number", SHOWN_BY)
def test_a_fault_names_tests_that_exist_or_a_line_of_the_notes(number):
    entries = SHOWN_BY[number]
    assert entries
    for file, name in (entry.split("::") for entry in entries if entry != "NOTES"):
        tree = ast.parse(next(ROOT.glob(f"**/tests/{file}")).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)
    if "NOTES" in entries:
        assert re.search(rf"^- Fault {number}: ", (ROOT / "NOTES.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_an_environment_that_launch_did_not_make_is_left_alone(tmp_path, kind):
    for name in ("launch.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/work.txt").write_text("mine")
    (tmp_path / ".venv").symlink_to("mine") if kind == "link" else (tmp_path / "mine").rename(tmp_path / ".venv")
    done = ran("bash", "launch.sh", "install", cwd=tmp_path, PYTHON=sys.executable)
    assert (done.code, (tmp_path / ".venv/work.txt").read_text()) == (1, "mine")
    assert done.err.splitlines()[-1].startswith("launch.sh: .venv was not made by launch.sh, which would delete it")
