"""What `pip install .` gives: the files to copy and nothing else. They train where the checkout is not."""

import shutil
import subprocess
import sys
import zipfile

import pytest
from running import ROOT

FILES = {"simple_fsdp.py", "overlap.py", "gloo.py", "lean.py", "muon.py"}
TRAINING = """
import sys
import torch
import torch.distributed as dist
import simple_fsdp, overlap, muon, gloo, lean
from torch import nn

assert all(each.__file__.startswith(sys.argv[1]) for each in (simple_fsdp, overlap, muon, gloo, lean))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
torch.manual_seed(0)
model = simple_fsdp.data_parallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), mesh)
loss_fn = torch.compile(lambda x: model(x).square().mean(), fullgraph=True, options=overlap.compile_options(model))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for _ in range(5):
    loss = loss_fn(torch.ones(4, 8))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0], losses
print("trained")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since setuptools writes beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for path in [
        *ROOT.glob("*.py"),
        *map(ROOT.joinpath, ("pyproject.toml", "README.md", "LICENSE")),
    ]:
        shutil.copy(path, source)
    for package in ("trainer", "lab", "tests"):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    how = "--no-deps --no-build-isolation --disable-pip-version-check -q -w".split()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *how, folder, source], check=True, timeout=200
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.long
def test_the_wheel_holds_the_files_to_copy_alone(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == FILES


@pytest.mark.slow
def test_what_is_installed_trains_without_the_checkout(wheel, tmp_path, monkeypatch):
    target = tmp_path / "installed"
    how = "--no-deps --disable-pip-version-check -q --target".split()
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *how, target, wheel], check=True, timeout=200
    )
    monkeypatch.setenv("PYTHONPATH", str(target))
    command = [sys.executable, "-W", "ignore", "-c", TRAINING, str(target)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "trained\n", done.stderr
