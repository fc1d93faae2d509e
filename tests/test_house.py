"""The structure of the code: the direction of imports, docstrings, no work at import.

    pytest tests/test_house.py         # a second; reads the sources and imports none of them

DESIGN: reading order is the order of the floors, and a module imports only from floors below its own. What two
packages share therefore lies below both. Tests, examples and scripts are no part of the house.
"""

import ast
import sys
import textwrap
import tomllib

import pytest
from running import ROOT

FLOORS = [  # from the bottom; an entry is a module or a package. First the product, then the lab, then the programs
    ["simple_fsdp", "overlap", "gloo", "lean", "muon", "trainer.collective_time", "trainer.step_costs"],
    ["model"],
    ["trainer.terminal"],
    ["trainer.distributed"],
    ["trainer.config"],
    ["trainer.data", "trainer.attention_kernel", "trainer.optimizer"],
    ["trainer.step"],
    ["trainer.parallelize"],
    ["trainer.measuring"],
    ["trainer.checkpoint"],
    ["trainer.fault_tolerance"],
    ["trainer.trackers"],
    ["trainer.logging", "trainer.evaluation", "trainer.summary"],
    ["trainer.checks"],
    ["trainer.run"],
    ["trainer.finetuning"],
    ["main", "finetune"],
    ["lab.profiling"],
    ["lab.sweeps"],
    ["lab.report"],
    ["lab.planning"],
    ["lab.studies"],
    ["lab.benchmarks"],
    ["lab.fit"],
    ["plan", "speed_mem_tests_mlp"],
]
COPIED = FLOORS[0][:5]  # users copy these files: they stand alone
PROGRAMS = ["main", "finetune", "plan", "speed_mem_tests_mlp"]


UPWARD = {  # imports that are allowed, with the reason
    ("lab.report.__main__", "lab.studies.study"): "--study shows the table of a study, which knows its own rows",
}
REGISTRATIONS = {  # calls at import that are allowed, with the reason
    "lean_mlp.register_autograd": "torch must know the gradients of an op of our own before the first model is built",
    "register_flop_formula(getattr(torch.ops, _LIBRARY).lean_mlp)": "torch's FLOP counter must know an op of our own",
    "register_flop_formula(getattr(torch.ops, _LIBRARY).lean_mlp_backward)": "the same of its backward",
    "chunked_loss.register_autograd": "as above",
    "register_flop_formula(getattr(torch.ops, _LIBRARY).chunked_loss)": "as above",
}


def _name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = sorted([*ROOT.glob("*.py"), *ROOT.glob("trainer/**/*.py"), *ROOT.glob("lab/**/*.py")])
PATHS = [path for path in PATHS if "tests" not in path.relative_to(ROOT).parts]
SOURCES = {_name(path): path.read_text() for path in PATHS}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
PACKAGES = [_name(path) for path in PATHS if path.name == "__init__.py"]
MODULES = sorted(name for name in SOURCES if name not in PACKAGES or SOURCES[name])  # an empty __init__ is none


def imported(name):
    """All modules that a module imports, also inside functions: of `from a import b` a.b if that is one of ours."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: imports are absolute here"
            both = [(node.module, f"{node.module}.{alias.name}") for alias in node.names]
            found |= {inner if inner in SOURCES else module for module, inner in both}
        elif isinstance(node, ast.Call) and (called := getattr(node.func, "attr", getattr(node.func, "id", ""))):
            if called in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
    return found


def ours(name):
    tops = {each.split(".")[0] for each in SOURCES} | {"tests", "examples"}
    return {module for module in imported(name) if module.split(".")[0] in tops}


def place(name):
    """(number of the floor, entry of FLOORS) of a module."""
    for number, entries in enumerate(FLOORS):
        for entry in entries:
            if name == entry or name.startswith(entry + "."):
                return number, entry
    return None


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downwards(name):
    """So nothing outside of the lab imports it, but for the programs on the floor above."""
    assert place(name), f"{name} is on no floor: put it into FLOORS, or its code where it belongs"
    floor, entry = place(name)

    def below_or_beside(module):
        number, other = place(module) or (len(FLOORS), "")
        return number < floor or (other == entry and entry in PACKAGES)

    wrong = [module for module in ours(name) if not below_or_beside(module) and (name, module) not in UPWARD]
    assert not wrong, f"{name}, on floor {floor} ({entry}), imports {', '.join(sorted(wrong))}"


def test_the_distribution_holds_the_files_to_copy_alone():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert declared["packages"] == []
    assert sorted(declared["py-modules"]) == sorted(COPIED)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_cycle_of_imports_in_a_package(package):
    inside = [name for name in MODULES if name.startswith(package + ".")]
    left = {name: ours(name) & set(inside) for name in inside}
    while leaves := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left, f"import each other, directly or by others: {', '.join(left)}"


@pytest.mark.parametrize("name", [*COPIED, "model"])
def test_a_file_to_be_copied_imports_torch_and_the_standard_library_alone(name):
    """And model.py lean.py: it knows neither the wrapper nor the trainer."""
    known = {"torch", *sys.stdlib_module_names, *["lean"] * (name == "model")}
    others = {module for module in imported(name) if module.split(".")[0] not in known}
    assert not others, f"{name} imports {', '.join(sorted(others))}"


@pytest.mark.parametrize("name", MODULES)
def test_nothing_imports_a_program(name):
    assert not imported(name) & set(PROGRAMS)


def test_both_programs_and_the_class_of_steps_have_the_same_step():
    """main.py and finetune.py show the step that Step.__call__ is for all others. Step.update is the end of it."""

    def statements(body, title):
        (node,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == title)
        return "\n".join(map(ast.unparse, node.body[1:])).replace("self.", "step.")  # without the docstring

    (steps,) = (node for node in TREES["trainer.step"].body if getattr(node, "name", "") == "Step")
    expected = statements(steps.body, "__call__")
    assert "step.optimizer.step(" in expected
    for program in ("main", "finetune"):
        assert statements(TREES[program].body, "train_step") == expected, program
    update, _, returned = statements(steps.body, "update").rpartition("\n")
    shown = textwrap.dedent(expected.partition("else:\n")[2].rpartition("\n")[0].rpartition("\n")[0])
    assert update == shown.strip() and returned == "return (norm, skip)"


def _works(node):
    """Whether a statement of a module does more than import, assign, define or register."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.AugAssign):
        return False
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return False
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func) not in REGISTRATIONS
    if isinstance(node, ast.If):
        return ast.unparse(node.test) not in ("__name__ == '__main__'", "TYPE_CHECKING")
    if isinstance(node, ast.Try):  # an import that another torch does not have
        parts = [*node.body, *(each for handler in node.handlers for each in handler.body), *node.orelse]
        return not isinstance(node.body[0], ast.ImportFrom | ast.Import) or any(map(_works, parts))
    return True


@pytest.mark.parametrize("name", MODULES)
def test_a_module_does_no_work_at_import(name):
    found = [f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}" for node in TREES[name].body if _works(node)]
    assert not found, f"{name}, {'; '.join(found)}"
