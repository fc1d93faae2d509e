"""The README is true: its file list is the tree, its tests exist, the budgets are kept."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FAULTS = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", README, re.MULTILINE)
PROMISED = {*range(1, 35), *range(36, 40), *range(41, 44), *range(47, 51)}


def test_readme_names_every_source_file_in_the_row_of_its_place():
    table = README.partition("## Files")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (`[^|]+`) \| (.+) \|$", table, re.MULTILINE))
    tracked = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "*.py", "*.sh"], text=True).split()
    sources = {Path(path) for path in tracked if not path.startswith("tests/") and not path.endswith("__init__.py")}
    own = {path for path in sources if f"`{path}`" in rows}
    assert not [path for path in sources - own if f"`{path.stem}`" not in rows.get(f"`{path.parent}/`", "")]
    assert all((ROOT / name).exists() for names in rows for name in re.findall(r"`([^`]+)`", names))


@pytest.mark.parametrize(("path", "budget"), [("main.py", 250), ("launch.sh", 170)])
def test_files_keep_their_budget(path, budget):
    assert (ROOT / path).read_text().count("\n") <= budget


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
