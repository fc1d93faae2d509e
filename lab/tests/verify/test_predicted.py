"""Predicted: a row of main.py at the reference setting beside plan.py's peak and time, over links that are measured.

    ./launch.sh verify -k predicted
"""

import re
import sys

import pytest
from machine import REFERENCE

from lab.planning import hardware
from trainer.logging import read_jsonl

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SIZES = "--mb 0.1 1 10 100 --repeat 20"
# The root mean square of relative errors, above which latency and bandwidth do not describe the link.
MOST_RESIDUAL = 0.35
# The planner's worst of 114 settings is 2.2 % off the peak of generated code, which is 2.3 % off the allocated one at
# most on an H100.
MOST_PEAK = 0.045
MOST_TIME = 0.15  # the median error on other people's compiled runs is 6 %, four of five are within this
MOST_OF_FSDP2 = 1.02  # above 1 the program is no better than FSDP2; 2 % is noise


def card(device: str) -> str | None:
    """The name by which plan.py knows a GPU."""
    words = re.split("[^a-z0-9]+", device.lower())
    for name in sorted(hardware.names(), key=len, reverse=True):
        if all(any(word.startswith(part) for word in words) for part in name.split("-")):
            return name
    return None


def figures(said: str) -> tuple[float, float]:
    """MiB of the peak and ms of the step that plan.py prints."""
    peak = re.search(r"(?m)^peak ([\d'.]+) MiB", said)[1]
    step = re.search(r"(?m)^step ([\d'.]+) ms", said)[1]
    return float(peak.replace("'", "")), float(step.replace("'", ""))


def planned(machine, *link: object) -> tuple[float, float]:
    device = machine.row(REFERENCE)["device"]
    name = card(device)
    if name is None:
        pytest.skip(f"plan.py knows no {device}")
    words = ["--gpu", name, "--gpus", machine.ranks, *link, *REFERENCE.split()]
    return figures(machine.run(sys.executable, "plan.py", *words))


@pytest.fixture(scope="session")
def links(machine, tmp_path_factory):
    """A file with latency and bandwidth among all ranks, fitted to collectives of several sizes."""
    machine.needs_gpus()
    folder = tmp_path_factory.mktemp("links")
    words = f"-m lab.studies.collectives --ranks {machine.processes} --device cuda {SIZES} --plots {folder}"
    machine.run(sys.executable, *words.split(), "--results", folder / "links.jsonl")
    return folder / "links.jsonl"


def test_links_have_a_latency_and_a_bandwidth(links, record_property):
    link = read_jsonl(links)[-1]["link"]
    for name, value in link.items():
        record_property(name, value)
    assert link["gb_per_s"] is not None
    assert link["residual"] <= MOST_RESIDUAL


def test_the_peak_is_the_planned_one(machine, record_property):
    machine.needs_gpus(real=False)
    peak, _ = planned(machine)
    allocated = machine.row(REFERENCE)["peak_alloc_mib"]
    record_property("planned_mib", peak)
    record_property("allocated_mib", allocated)
    assert abs(allocated / peak - 1) <= MOST_PEAK


def test_a_step_takes_the_planned_time(machine, links, record_property):
    _, step = planned(machine, "--link", f"measured:{links}")
    least = machine.row(REFERENCE)["step_ms_min"]
    record_property("planned_ms", step)
    record_property("least_measured_ms", least)
    assert abs(step / least - 1) <= MOST_TIME


def test_a_step_is_no_slower_than_that_of_fsdp2(machine, record_property):
    machine.needs_gpus()
    ours = machine.row(REFERENCE)
    theirs = machine.row(f"{REFERENCE} --wrapper fsdp2 --compile blocks")
    for name in ("step_ms", "step_ms_min", "tok_s", "mfu", "peak_alloc_mib", "peak_reserved_mib"):
        record_property(name, f"{ours[name]}, fsdp2 {theirs[name]}")
    assert ours["step_ms_min"] <= MOST_OF_FSDP2 * theirs["step_ms_min"]
