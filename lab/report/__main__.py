"""Result rows as tables beside the published figures of published/, as figures, and both as one page.

    python -m lab.report seqlen depth      rows of runs/sweep-AXIS.jsonl and runs/sweep-all.jsonl
    python -m lab.report --plots plots     every axis that has rows; figures as well, PNG and SVG (plots.py)
    python -m lab.report --html page.html  tables and figures in one file that needs no other (html.py)
    python -m lab.report FILE.jsonl        the runs of a file side by side, with ratios to the first, and curves
    python -m lab.report loss --last 3     losses of the last three runs of runs/results.jsonl
    python -m lab.report a.jsonl b.jsonl   equal settings of two files, or of two commits in --results
    python -m lab.report --study NAME      the table of a study (studies/), with --plots DIR its plot
    python -m lab.report --check           the marked tables of README, NOTES, docs, lab/notes; --write rewrites them

`<!-- report: LAYOUT FILE... [--small] -->` marks the table below it. LAYOUT: an axis, one of LAYOUTS in
tables.py, or `study NAME`.
Exit codes: 0, 1 a marked table differs, 2 bad input. Imports no torch, but for studies.
"""

import argparse
import functools
import importlib
import itertools
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from lab.report import published
from lab.report.html import page
from lab.report.runs import busy_machine, shared
from lab.report.tables import LAYOUTS, check_name, compared, layout, section
from lab.sweeps import sweep
from trainer.logging import check_writable
from trainer.terminal.output import Parser, answering, put, shown
from trainer.terminal.text import grouped, one_line

# Of pages whose marked tables are checked, beside README.md and NOTES.md.
FOLDERS = ("docs", "lab/notes")
MARK = re.compile(r"^<!-- report: (.+) -->\n(?P<table>(?:\|.*\n?)*)", re.MULTILINE)


def difference(old: list[str], new: list[str]) -> tuple[int, str] | None:
    """Index of the first line that differs, and how its first differing cell does."""
    for i, (a, b) in enumerate(itertools.zip_longest(old, new)):
        if a is None or b is None:
            return i, f"{len(old)} lines where the rows give {len(new)}"
        for title, x, y in itertools.zip_longest(new[0].split("|"), a.split("|"), b.split("|")):
            if x != y:
                title, x, y = (str(text or "").strip() for text in (title, x, y))
                return i, f"column '{title}' has '{x}' where the rows give '{y}'"
    return None


def documents() -> list[Path]:
    """The files of the current folder whose marked tables are checked."""
    pages = [page for folder in FOLDERS for page in sorted(Path(folder).glob("*.md"))]
    return [path for path in (Path("README.md"), Path("NOTES.md"), *pages) if path.is_file()]


def root_of(document: Path) -> Path:
    """The project's folder, which the files of a mark are relative to."""
    depths = [len(Path(folder).parts) for folder in FOLDERS if document.parent.match(folder)]
    return document.parents[max(depths, default=0)]


def check(documents: list[Path], write: bool = False) -> tuple[int, list[str]]:
    """(number of marked tables, a line for each that its rows contradict). `write` corrects. ValueError: a bad mark."""
    count = 0
    differing = []
    for document in documents:
        old = document.read_text()
        new = ""
        end = 0
        for mark in MARK.finditer(old):
            line = old.count("\n", 0, mark.start()) + 1
            words = mark[1].split()
            name, *files = [word for word in words if word != "--small"]
            root = root_of(document)
            try:
                if name == "study":
                    name, *files = files
                    table = studied(name, [root / file for file in files])[0]
                else:
                    check_name(name)
                    table = section(
                        name, published.read([root / file for file in files]), "--small" in words
                    )[1]
            except ValueError as error:
                raise ValueError(f"{document}:{line}: {error}") from None
            if change := difference(mark["table"].splitlines(), table.splitlines()):
                differing.append(f"{document}:{line + 1 + change[0]}: {name}: {change[1]}")
            new += f"{old[end : mark.start('table')]}{table}\n"
            count = count + 1
            end = mark.end()
        if write and new + old[end:] != old:
            document.write_text(new + old[end:])
    return count, differing


def studied(
    name: str, files: list[Path], folder: Path | None = None
) -> tuple[str, str, list[Path]]:
    """The table of a study, the text above it, and, where there is a folder, its plot. ValueError: no such study."""
    # Imports torch; of a floor above this one.
    shared = importlib.import_module("lab.studies.study")
    study = shared.study(name)
    rows = shared.newest(name, published.read(files))
    about, table = study.table(rows)
    return table, about, shared.figure(study, rows, folder) if folder else []


def rows_for(
    name: str, args: argparse.Namespace, named: bool, read: Callable[[Path], list]
) -> list[dict]:
    """The rows that a table is made of, by `read` of each file. ValueError where there is none."""
    defaults = [Path(f"runs/sweep-{stem}{'-small' * args.small}.jsonl") for stem in ("all", name)]
    if name in ("loss", "runs", "sent"):
        defaults = [Path("runs/results.jsonl")]
    there = [path for path in defaults if path.is_file()]
    rows = [row for path in args.results or there or defaults[-1:] * named for row in read(path)]
    if args.run:
        rows = [row for row in rows if row.get("run") == args.run]
        if not rows:
            raise ValueError(
                f"--run {args.run}: no rows of this run in {' '.join(map(str, args.results or there))}"
            )
    return rows[-args.last :] if args.last else rows


def figures(
    name: str, ours: list, rows: list[dict], args: argparse.Namespace, folder: Path
) -> tuple[list[Path], str]:
    """Draws what there is to draw of a table, of many of its rows, `ours`, the last ones; says in a line what it leaves
    out."""
    plots = importlib.import_module("lab.report.plots")
    fronts = name == "time against memory"
    if name == "sent":
        return [], ""
    most = plots.SETTINGS if fronts else plots.MOST
    left = f"Drawn: the last {most} of {grouped(len(ours))} {'settings' if fronts else 'rows'}."
    left *= len(ours) > most and name != "collectives"  # it draws two of all
    shown_alone = args.html and not args.plots  # a page holds no PNG
    try:
        with plots.matplotlib.rc_context({"savefig.format": "svg"} if shown_alone else {}):
            return draw(name, ours[-most:], rows, args, folder), left
    except plots.NoFigure as e:
        return [], f"no figure of {name}: {e}"


def draw(
    name: str, ours: list, rows: list[dict], args: argparse.Namespace, folder: Path
) -> list[Path]:
    """The figures of `ours`: rows of a table, or settings. Of `rows`: what takes no more of them than it needs."""
    plots = importlib.import_module("lab.report.plots")
    plotters = {"loss": plots.losses, "time against memory": plots.fronts}
    if name in plotters:
        return plotters[name](ours, folder)
    if name == "collectives":
        return plots.collectives(rows, folder)
    if ours:
        return plots.of_rows(name, ours, folder)
    return plots.axis(name, published.entries(name, rows, args.small), folder)


def whole(args: argparse.Namespace, read: Callable[[Path], list]) -> dict[str, tuple]:
    """The tables of files that are named without a table's name, their rows and columns: those of runs, as far as their
    rows fill them. ValueError where they have no run."""
    rows = rows_for("runs", args, True, read)
    made = {name: layout(name, rows) for name in ("runs", "loss", "sent")}
    filled = {name: each for name, each in made.items() if each[0]}
    if "runs" not in filled:
        files = " ".join(map(str, args.results))
        studies = sorted({str(row.get("study")) for row in rows})
        reason = f"its rows are of the study {', '.join(studies)}" if rows else "it has no row"
        raise ValueError(
            f"{files}: no run of a training program is in it, {reason}; name their table, if there is one: "
            f"{', '.join(LAYOUTS)} or --study NAME, with --results {files}"
        )
    return filled


def report(args: argparse.Namespace, folder: Path | None, files: bool = False) -> None:
    """Prints tables, draws figures into `folder`, if any, gives both to --html. files: the tables are those
    that the rows of --results fill. Raises ValueError where an axis that was named, or every axis, has no row."""
    if folder:
        importlib.import_module("lab.report.plots")  # before anything is printed
    named = [name for name in args.axis if name != "all"]
    sections = []
    printed = {}
    read = functools.cache(lambda path: published.read([path]))  # each file once, for all tables
    for name in named:
        check_name(name)
    filled = whole(args, read) if files else {}
    named += filled
    for name in named or [*sweep.axes(), "loss"]:
        rows = rows_for(name, args, bool(named), read)
        try:
            made = filled.get(name) or layout(name, rows)
            about, table = section(name, rows, args.small, made)
        except ValueError:
            if named:
                raise
            continue
        if busy := busy_machine(made[0] or rows):
            about += f"\n{busy}"
        put(about, table, sep="\n\n", end="\n\n")
        paths, left = figures(name, made[0], rows, args, folder) if folder else ([], "")
        put(left, end="\n\n" * bool(left))
        about += f"\n{left}" * bool(left)
        printed |= {id(row): row for row in rows}
        sections.append((name, about, table, paths))
    if not printed:
        where = " ".join(map(str, args.results)) or f"runs/sweep-*{'-small' * args.small}.jsonl"
        raise ValueError(
            f"no row of any axis in {where}{'' if args.small else '; for small sizes add --small'}"
        )
    # As finetune.py's models are not.
    shaped = [row for row in printed.values() if "grow" in (row.get("flags") or {})]
    if folder:
        name = "time against memory"
        about = "A grey line: nothing is better in both."
        paths, left = figures(name, shared(shaped), shaped, args, folder)
        put(left, end="\n\n" * bool(left))
        sections += [(name, f"{about}\n{left}", "", paths)] * bool(paths)
    plots = [path for *_, paths in sections for path in paths]
    put(*plots, sep="\n", end="\n" * bool(plots and args.plots)) if args.plots else None
    if args.html:
        # The name of a file may hold bytes that are no UTF-8.
        args.html.write_text(page(sections), encoding="utf-8", errors="backslashreplace")
        put(args.html)


def with_files(text: str, files: list[Path]) -> str:
    """A line about rows, behind it the files that they were read from if it names none of them."""
    named = any(str(file) in text for file in files)
    return text + f" (rows of {' '.join(map(str, files))})" * (bool(files) and not named)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code, or ends the process with 2 for bad input."""
    parser = Parser(prog="report", allow_abbrev=False, description=__doc__.split("\n")[0])
    names = f"all, an axis, {', '.join(LAYOUTS)}; a file of rows; two files or commits are compared"
    parser.add_argument("axis", nargs="*", metavar="AXIS", help=names)
    parser.add_argument(
        "--results", nargs="+", type=Path, default=[], metavar="FILE", help="JSONL files of rows"
    )
    parser.add_argument("--run", metavar="NAME", help="only rows of this run")
    parser.add_argument("--last", type=int, metavar="N", help="only the last N rows")
    parser.add_argument(
        "--small", action="store_true", help="the axes at the sizes that a CPU can run"
    )
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="write figures there, PNG and SVG; needs matplotlib",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="one page with tables and figures; needs matplotlib",
    )
    parser.add_argument(
        "--study",
        metavar="NAME",
        help="the table of this study; takes --results, --small and --plots",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the marked tables of README, NOTES, docs and lab/notes with their rows",
    )
    parser.add_argument(
        "--write", action="store_true", help="rewrite the marked tables from their rows"
    )
    args = parser.parse_args(argv)
    try:
        others = args.axis or args.results or args.small or args.plots or args.html
        if (args.check or args.write) and (others or args.study):
            raise ValueError(
                "--check and --write take no other flags: the marks in the documents name the tables and rows"
            )
        if args.study:
            if args.axis or args.html:
                raise ValueError(
                    "--study: takes only --results, --small and --plots; leave out axes and --html"
                )
            files = args.results or [Path(f"runs/study-{args.study}{'-small' * args.small}.jsonl")]
            table, about, paths = studied(args.study, files, args.plots)
            put(about, "", table, *[""] * bool(paths), *paths, sep="\n")
            return 0
        if len(args.axis) == 2 and all(
            Path(a).is_file() or re.fullmatch("[0-9a-f]{7,40}", a) for a in args.axis
        ):
            put(compared(args.axis, args.results or sorted(Path("runs").glob("*.jsonl"))))
            return 0
        if args.last is not None and args.last < 1:
            raise ValueError(f"--last {args.last}: must be at least 1")
        files = bool(args.axis) and all(name.endswith(".jsonl") for name in args.axis)
        if files:
            args.results = [*map(Path, args.axis), *args.results]
            args.axis = []
        if not args.check and not args.write:
            if args.html:
                check_writable(args.html, "--html")
            with tempfile.TemporaryDirectory() as folder:
                report(args, args.plots or (Path(folder) if args.html else None), files)
            return 0
        count, differing = check(documents(), args.write)
        if not count:
            raise ValueError(
                "no marked table in README.md, NOTES.md, docs/*.md or lab/notes/*.md; run it in the project's folder"
            )
        done = "rewritten" if args.write else "differ"
        put(*differing, f"{count} marked tables, {len(differing)} {done}", sep="\n")
        return 1 if differing and not args.write else 0
    except ValueError as error:
        parser.exit(2, f"report: {shown(with_files(str(error), args.results))}\n")
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        message = f"{one_line(error, 200)}; take it out, or name other files"
        message = f"a row has an entry of another kind than a run writes: {message}"
        parser.exit(2, f"report: {shown(with_files(message, args.results))}\n")
    except OSError as error:
        parser.exit(
            2,
            f"report: {error.filename or 'standard output'}: {error.strerror}; name a place that can be written\n",
        )
    except ImportError as error:  # matplotlib
        flag = "--plots" if args.plots else "--html"
        parser.exit(2, f"report: {flag}: {error}: pip install matplotlib, or the extra plot\n")


if __name__ == "__main__":
    with answering():
        sys.exit(main())
