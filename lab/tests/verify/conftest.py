"""What the proof of several GPUs shares: flags of pytest, the machine, figures of tests, the file to send.

    ./launch.sh verify [--device cpu] [--world N] [PYTEST'S FLAGS]        # docs/measuring.md
"""

import os
import platform
import sys
from pathlib import Path

import pytest
from machine import ROOT, machine

SHOWN = "passed", "failed"
ABOUT = """
import json, torch
from trainer.measuring.timing import environment
about = environment(torch.device({device!r}))
if {device!r} == "cuda":
    about |= dict(nccl=torch.cuda.nccl.version(), gpus=torch.cuda.device_count())
print(json.dumps(about))
"""


def pytest_addoption(parser):
    group = parser.getgroup("verify", "the proof of several GPUs")
    devices = dict(choices=("cuda", "cpu"), default="cuda")
    group.addoption("--device", **devices, help="cpu: NPROC ranks on CPUs (default: 2)")
    simulated = "simulate N ranks in one process, as one GPU does anyway, with 8"
    group.addoption("--world", type=int, default=0, metavar="N", help=simulated)


def pytest_configure(config):
    """Finds the machine before anything runs."""
    out = Path(os.environ.get("OUT") or "runs").resolve()
    device = config.getoption("--device", "cuda")
    try:
        config.machine = machine(device, config.getoption("--world", 0), dict(os.environ), out)
    except ValueError as error:
        pytest.exit(f"error: {error}", 2)


def pytest_terminal_summary(terminalreporter):
    """Figures of tests, which the file has as properties."""
    for outcome in SHOWN:
        for report in terminalreporter.getreports(outcome):
            if report.user_properties:
                figures = " ".join(f"{name}={value}" for name, value in report.user_properties)
                terminalreporter.line(f"{outcome} {report.nodeid.partition('::')[2]}: {figures}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """The file that pytest wrote gets no names of this host and its folders."""
    path = Path(config.getoption("xmlpath") or os.devnull)
    if path.is_file():
        text = path.read_text()
        for name in (platform.node(), f"{ROOT}/", f"{sys.prefix}/", str(Path.home())):
            text = text.replace(name, "")
        path.write_text(text)


@pytest.fixture(scope="session", name="machine")
def the_machine(request, record_testsuite_property):
    found = request.config.machine
    if found is None:
        pytest.skip("torch sees no GPU: --device cpu, or TORCH=cuda ./launch.sh install")
    record_testsuite_property("ranks", found.ranks)
    record_testsuite_property("simulated", bool(found.simulated))
    about = found.run(sys.executable, "-c", ABOUT.format(device=found.device))
    record_testsuite_property("environment", about.strip().splitlines()[-1])
    return found
