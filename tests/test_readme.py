"""The README is true: its file list is the tree, its line counts are current, its tests exist, the budgets are kept."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"^\| `([\w./]+)` \| ([\d']+) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
FAULTS = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
PROMISED = {*range(1, 35), *range(36, 40), *range(41, 44), *range(47, 51)}
BUDGETS = {"simple_fsdp.py": 300, "main.py": 250, "launch.sh": 150}


def lines(path: str) -> int:
    return (ROOT / path).read_text().count("\n")


@pytest.mark.parametrize(("path", "count"), [row[:2] for row in ROWS])
def test_readme_line_counts_are_current(path, count):
    assert int(count.replace("'", "")) == lines(path)


def test_readme_lists_every_source_file_once():
    tracked = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "*.py", "*.sh"], text=True).split()
    sources = {path for path in tracked if not path.startswith("tests/") and lines(path)}
    assert sorted(row[0] for row in ROWS) == sorted(sources)


@pytest.mark.parametrize("path", BUDGETS)
def test_files_keep_their_budget(path):
    assert lines(path) <= BUDGETS[path]


def test_every_promised_fault_has_one_row():
    assert sorted(int(number) for number, _ in FAULTS) == sorted(PROMISED)


@pytest.mark.parametrize(("number", "shown"), FAULTS, ids=[number for number, _ in FAULTS])
def test_a_fault_names_tests_that_exist_or_a_line_of_the_notes(number, shown):
    entries = shown.split(", ")
    for file, name in (entry.strip("`").split("::") for entry in entries if entry != "NOTES"):
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)
    if "NOTES" in entries:
        assert re.search(rf"^- Fault {number}: ", (ROOT / "NOTES.md").read_text(), re.MULTILINE)
