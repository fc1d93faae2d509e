"""Runs the tests that a version of torch may break on other versions, each in an environment of its own. On a CPU.

    ./launch.sh test versions                   # those of TORCH in trainer/checks.py
    ./launch.sh test versions 2.11.0 2.14.1     # these
    ./launch.sh test versions newest            # the newest that pip finds beside the pinned one; skipped where none is

The environment of a version is .venv-VERSION, kept for the next call; that of the pinned one is .venv. A call that was
cut short goes on: a part whose tests have passed at this commit is not run again. One row per version in --results, and
a table of them. Exit codes: 0; 1 where a test failed or a version cannot be installed. Imports no torch.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))

from lab.report.tables import section  # noqa: E402
from lab.sweeps.processes import stop  # noqa: E402
from trainer.checks import TORCH  # noqa: E402

PARTS = {  # the test files of each part; parts run one after the other
    "wrapper": """
        test_simple_fsdp test_simple_fsdp_cost test_simple_fsdp_errors test_simple_fsdp_ranks
        test_structures test_habits test_eager_blocks test_hugging_face_outputs test_gloo test_other_models
        test_baselines
    """,
    "compiler": """
        test_generated test_equivalence test_overlap
        ../lab/tests/test_graph
        test_compile_cache test_remat test_attention test_simulated_world
    """,
    "programs": """
        test_main test_checkpoint test_checkpoint_ranks test_login_node
    """,
    "beside": "across_versions",
}
TWO_WORKERS = "-n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder"
EXTRAS = ".[dev,wandb,hf,plot,gpucode]"  # as launch.sh installs
NEEDED_GB = 9  # of disk, for the wheels of a CUDA build and what they unpack to
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"  # pip prefers its build to a CUDA build of the same version
PINNED_PYTHON = sys.executable


class Unavailable(Exception):
    """A version that cannot be had here; the message is the reason."""


def pip(python: Path | str, *words: str) -> str:
    """What pip prints. Unavailable: its first error."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--retries", "1"]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout
    for line in done.stderr.splitlines():
        if line.startswith("ERROR: "):
            raise Unavailable(line.removeprefix("ERROR: "))
    raise Unavailable(f"pip ended with {done.returncode}")


def pinned_version() -> str:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("torch=="):
            return line.removeprefix("torch==")
    raise ValueError("constraints.txt: no line torch==VERSION")


def newest(pinned: str) -> str:
    """The newest version that pip would install, the pinned one left out."""
    words = "install --quiet --dry-run --ignore-installed --no-deps --report -".split()
    report = json.loads(pip(sys.executable, *words, f"torch!={pinned}"))
    version = report["install"][0]["metadata"]["version"]
    return version.partition("+")[0]


def interpreter(version: str, pinned: str) -> Path:
    """The Python of a version's environment, which is made or brought up to date. Unavailable: it cannot be."""
    if version == pinned:
        return Path(PINNED_PYTHON)
    folder = ROOT / f".venv-{version}"
    python = folder / "bin/python"
    mark = folder / ".installed"
    pins = (ROOT / "constraints.txt").read_text()
    state = f"{zlib.crc32((pins + (ROOT / 'pyproject.toml').read_text()).encode())} {ROOT}"

    if mark.is_file() and mark.read_text() == state:
        return python
    if folder.exists() and not mark.is_file():
        raise Unavailable(f"{folder.name} was not made by this command: move it away")
    new = not folder.exists()
    if new and shutil.disk_usage(ROOT).free < NEEDED_GB * 1e9:
        raise Unavailable(f"less than {NEEDED_GB} GB of disk are free")

    print(f"installing torch {version} into {folder.name}: some minutes, once", flush=True)
    folder.mkdir(exist_ok=True)
    mark.write_text("begun")  # first: an install may be interrupted
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    others = [line for line in pins.splitlines() if not line.startswith(("torch==", "triton=="))]
    constraints.write_text("\n".join(others))
    where = ["--extra-index-url", CPU_WHEELS, "--constraint", str(constraints)]
    try:
        pip(python, "install", "--quiet", *where, f"torch=={version}", "-e", EXTRAS)
    except Unavailable:
        if new:
            shutil.rmtree(folder)
        raise
    mark.write_text(state)
    return python


def environment(python: Path) -> dict:
    """What every row says of code and machine; the size of the interpreter's environment in GB."""
    code = """
import json
from trainer.measuring.timing import environment
print(json.dumps(environment("cpu")))
"""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    size = 0
    for path in python.parents[1].resolve().rglob("*"):
        if not path.is_symlink():
            size += path.stat().st_blocks * 512
    return json.loads(done.stdout.splitlines()[-1]) | {"environment_gb": round(size / 1e9, 1)}


def run(python: Path, part: str, xml: Path, limit: float) -> None:
    """Runs the tests of a part. Their results go to the file `xml`, which is absent where they took over `limit` s."""
    xml.unlink(missing_ok=True)
    files = [f"tests/{name}.py" for name in PARTS[part].split()]
    workers = TWO_WORKERS.split() if len(files) > 1 else []
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow and not gpu"]
    command += ["--junitxml", str(xml), *workers, *files]
    token = secrets.token_hex(8)
    variables = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PINNED_PYTHON": PINNED_PYTHON,
        "VERSIONS_RUN": token,  # by which `stop` finds processes that have left the group
    }
    child = subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True)
    try:
        child.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"{part}: ended after {limit:.0f} s", flush=True)
        xml.unlink(missing_ok=True)
    finally:
        stop(child, token)


def results(xml: Path) -> dict:
    """The tests that passed, the names of those that failed, how often each reason to skip was given, and seconds."""
    if not xml.is_file():
        return dict(passed=0, failures=[f"{xml.stem}: crashed, or out of time"], reasons=Counter(), seconds=0)
    tree = ElementTree.parse(xml)
    passed = 0
    failures = []
    reasons = Counter()
    for case in tree.iter("testcase"):
        outcome = {child.tag: child for child in case}
        if "failure" in outcome or "error" in outcome:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in outcome:
            reasons[outcome["skipped"].get("message")] += 1
        else:
            passed += 1
    seconds = sum(float(suite.get("time")) for suite in tree.iter("testsuite"))
    return dict(passed=passed, failures=failures, reasons=reasons, seconds=seconds)


def row_of(version: str, pinned: str, limit: float) -> dict:
    """Runs the parts that have not passed at this commit. Returns the row of a version."""
    files = {part: names.split() for part, names in PARTS.items()}
    row = dict(study="versions", setting=dict(version=version, pinned=pinned, files=files))
    row |= dict(passed=0, failed=0, skipped=0, failures=[], reasons={}, seconds=None)
    try:
        python = interpreter(version, pinned)
    except Unavailable as reason:
        about = environment(Path(PINNED_PYTHON)) | dict(torch=version, environment_gb=None)
        return about | row | dict(outcome=f"failed: not installed: {reason}")

    about = environment(python)
    parts = []
    for part in PARTS:
        print(f"== torch {about['torch']}, {part}", flush=True)
        xml = ROOT / f"runs/versions/{version}-{about['commit'][:12]}-{part}.xml"
        xml.parent.mkdir(parents=True, exist_ok=True)
        if about["dirty"] is not False or not xml.is_file() or results(xml)["failures"]:
            run(python, part, xml, limit)
        parts.append(results(xml))

    reasons = sum((part["reasons"] for part in parts), Counter())
    row["passed"] = sum(part["passed"] for part in parts)
    row["failures"] = [name for part in parts for name in part["failures"]]
    row["failed"] = len(row["failures"])
    row["reasons"] = dict(reasons)
    row["skipped"] = reasons.total()
    row["seconds"] = round(sum(part["seconds"] for part in parts))
    good = row["passed"] and not row["failed"]
    return about | row | dict(outcome="ok" if good else f"failed: {row['failed']} tests")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch.sh test versions", description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=TORCH, metavar="VERSION", help="as 2.14.1; or: newest")
    parser.add_argument("--results", type=Path, default=ROOT / "runs/versions.jsonl", help="rows are appended to it")
    parser.add_argument("--limit", type=float, default=1200, help="seconds that each part of a version may take")
    return parser.parse_args()


def main() -> int:
    """The command line. Returns the exit code."""
    args = arguments()
    pinned = pinned_version()
    versions = list(args.versions)
    if versions == ["newest"]:
        try:
            versions = [newest(pinned)]
            interpreter(versions[0], pinned)
        except Unavailable as reason:
            print(f"SKIPPED: the newest torch beside {pinned} was not run: {reason}")
            return 0

    rows = []
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for version in versions:
        row = row_of(version, pinned, args.limit)
        rows.append(row)
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(section("versions", rows, False)[1])
    return any(row["outcome"] != "ok" for row in rows)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends its processes
    sys.exit(main())
