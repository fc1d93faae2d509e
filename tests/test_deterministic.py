"""--deterministic: the same bits every time, where compiled code on several threads has others each time.

    pytest tests/test_deterministic.py -m "slow or not slow"  # no GPU; minutes; on a GPU: tests/test_gpu_faults.py
"""

import shutil

import pytest
import torch
from harness import ONE_GRAPH
from saved import assert_bitwise, contents
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code

from trainer.distributed.launch import set_deterministic

pytestmark = pytest.mark.usefixtures("isolated")


@pytest.fixture(autouse=True)
def off():
    yield
    set_deterministic(False)


@pytest.mark.long
def test_each_run_has_its_own(train, monkeypatch):
    seen = []
    state = lambda: (torch.are_deterministic_algorithms_enabled(), inductor.deterministic)  # noqa: E731
    monkeypatch.setattr("trainer.run.header", lambda run, path: seen.append(state()) or [])
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    rows = [train("--compile", "none", *more).row for more in (["--deterministic"], [])]
    assert seen == [(True, True), (False, False)]
    assert rows[0]["loss"] == rows[1]["loss"]
    assert [row["flags"]["deterministic"] for row in rows] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["fwdbwd", "blocks", pytest.param("step", marks=ONE_GRAPH)])
def test_compiled_on_four_threads_ten_steps_are_five_and_five(compile, train, tmp_path):
    torch.set_num_threads(4)
    argv = "--compile", compile, "--batch", 8, "--steps", 10, "--log-every", 1, "--save"

    def run(folder, *more):
        with inductor.patch(force_disable_caches=True):
            return run_and_get_code(train, *argv, tmp_path / folder, *more)

    _, code = run("without", "--steps", 1)
    assert any("atomic_add" in each for each in code) == (compile != "blocks")  # the embedding's gradient
    whole, code = run("whole", "--deterministic", "--save-every", 5)
    assert code
    assert not any("atomic_add" in each for each in code)
    shutil.copytree(tmp_path / "whole/step-00000005", tmp_path / "run/step-00000005")
    resumed, _ = run("run", "--deterministic")  # compiled anew
    assert resumed.logged == [6, 7, 8, 9, 10]
    assert [s["loss"] for s in whole.steps[5:]] == [s["loss"] for s in resumed.steps]
    assert_bitwise(contents("run/step-00000010"), contents("whole/step-00000010"))
