"""Checkpoints and faults on a GPU, through main.py: `./launch.sh gpu`. One process, NCCL; skipped without CUDA."""

import pytest
import torch
from running import GPU
from saved import assert_bitwise, contents, steps_in

pytestmark = [*GPU, pytest.mark.usefixtures("isolated")]
SMALL = "--device cuda --depth 2 --width 256 --head-dim 64 --seqlen 256 --vocab 256 --warmup 2 --steps 10".split()


@pytest.mark.parametrize("compile", ["none", "blocks", "fwdbwd"])
@pytest.mark.parametrize("how", [[], ["--save-async"]])
def test_ten_steps_are_five_and_five_bit_for_bit(compile, how, train):
    argv = [*SMALL, "--compile", compile, "--deterministic", "--log-every", 1, *how, "--save"]
    stopped = train(*argv, "run", fault="0:5:update:term")
    assert stopped.code == 143
    assert steps_in("run") == [5]
    resumed = train(*argv, "run")
    assert train(*argv, "whole").losses == stopped.losses + resumed.losses
    assert_bitwise(contents("run/step-00000010"), contents("whole/step-00000010"))


def test_a_setting_that_does_not_fit_says_where_how_much_and_what_to_do(train, tmp_path):
    free = torch.cuda.mem_get_info()[0]
    rows = free // (256 * 65536 * 4) + 1  # so many logits fill what is free; attention takes 65'535 rows at most
    done = train(*SMALL, "--compile", "none", "--vocab", 65536, "--batch", rows)
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == 6 and done.row["outcome"].startswith("OOM ") and " GiB more, peak " in line
    assert "--batch" in line and "memory_viz" in line and [*tmp_path.glob("*.hang/memory-0.pickle")]


def test_a_step_that_is_not_finite_changes_nothing(trains, tmp_path):
    for mode in ("none", "fwdbwd"):
        argv = "--compile", mode, "--nonfinite", "skip", "--log-every", 1, "--save", tmp_path / mode
        done = trains(*SMALL, *argv, fault="0:4:forward:nan")
        assert done.row["skipped"] == 1 and done.steps[3]["loss"] == "nan"
        assert all(t.isfinite().all() for t in contents(tmp_path / mode / "step-00000010").values())
        assert contents(tmp_path / mode / "step-00000010")["t"] == 9
