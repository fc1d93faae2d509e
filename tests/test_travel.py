"""The files to copy, alone in an empty folder, train a model that is not ours: two ranks, eager and compiled.

    pytest tests/test_travel.py        # some 20 seconds, two gloo ranks
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from harness import free_port
from running import ROOT

pytestmark = pytest.mark.long

FILES = "simple_fsdp", "overlap", "gloo", "lean", "muon"
TRAIN = '''
import json, os, sys
import torch, torch.nn.functional as F
import overlap
from gloo import one_worker_thread
from muon import Muon, groups_of
from simple_fsdp import data_parallel

def run(kind):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    model = data_parallel(torch.nn.Sequential(torch.nn.Embedding(32, 16), encoder, torch.nn.Linear(16, 32)), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "muon":
        optimizer = Muon(groups_of(model, lr=0.01), lr=0.01)
    loss_of = lambda x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    if kind == "overlap":
        loss_of = torch.compile(loss_of, fullgraph=True, options=overlap.compile_options(model))
    tokens, losses = torch.randint(32, (4, 9)), []
    for _ in range(8):
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

one_worker_thread()
mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
print(json.dumps({kind: run(kind) for kind in sys.argv[1:]}))
torch.distributed.destroy_process_group()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copied")
    for name in FILES:
        shutil.copy(ROOT / f"{name}.py", folder)
    (folder / "train.py").write_text(TRAIN)
    return folder


def trained(folder, *kinds, world=2):
    """{kind: losses} of each rank. Both see the same tokens, so they are those of one process."""
    port = free_port()
    keep = ("PATH", "HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_VEC_ISA_OK")
    ranks = []
    for rank in range(world):
        env = {name: os.environ[name] for name in keep if name in os.environ} | dict(OMP_NUM_THREADS="1")
        env |= dict(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        command = [sys.executable, "train.py", *kinds]
        ranks.append(subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    done = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, done[0][1].decode()[-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


@pytest.fixture(scope="module")
def alone(folder):
    [found] = trained(folder, "eager", world=1)
    return found["eager"]


@pytest.fixture(scope="module")
def two(folder):
    return trained(folder, "eager", "muon", "overlap")


@pytest.mark.parametrize("kind", ["eager", "overlap"])
def test_copied_files_train_in_eager_mode_and_compiled_as_one_process(two, alone, kind):
    for found in two:
        assert found[kind] == pytest.approx(alone, rel=1e-5)
        assert alone[-1] < alone[0] - 1


def test_copied_files_train_with_muon(two):
    first, second = (found["muon"] for found in two)
    assert first == second
    assert first[-1] < first[0] - 0.5


def test_each_file_says_in_its_head_which_others_it_needs():
    for name in FILES:
        source = (ROOT / f"{name}.py").read_text()
        head = source.split('"""')[1]
        for other in set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)) & {*FILES, "model"}:
            assert f"{other}.py" in head, f"{name}.py imports {other}, which its head does not name"
