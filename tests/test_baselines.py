"""--wrapper fsdp2 and ddp train as ours does: two gloo ranks, fp32, the losses and norms of every step."""

import importlib.util
import itertools
import re
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fixtures import outcome
from harness import free_port, spawn
from running import ROOT, fails, module, ran, resolved, rows_of
from torch.distributed.tensor import DTensor

from lab.benchmarks import exposed, wrappers
from model import IGNORE
from trainer import config as flags
from trainer.data import Batches
from trainer.distributed import simulated_world as sim
from trainer.parallelize import build
from trainer.step import COMPILE_MODES

pytestmark = pytest.mark.long

SMALL = "--device cpu --depth 2 --width 64 --head-dim 16 --vocab 257 --seqlen 32 --batch 4 --compile none".split()
SETTINGS = ["simple", "fsdp2", "fsdp2 --no-reshard", "fsdp2 --compile blocks", "ddp",
            "ddp --loss chunked --loss-chunk 10", "ddp --compile blocks"]  # fmt: skip
ACCUMULATING = ["simple", *(f"{w} --accum-sync {s}" for w in ("fsdp2", "ddp") for s in ("every", "last"))]


COMPILE = torch.compile


def without_code(function, options=None, **how):
    """What is compiled and hooked where, without Inductor's slow code generation."""
    return COMPILE(function, backend="aot_eager", **how)


def train(argv, steps=4):
    torch._dynamo.reset()
    torch.compile = without_code
    rank = dist.get_rank()
    world = dist.get_world_size()
    c = resolved([*SMALL, "--wrapper", *argv.split()], world)
    step = build(c, torch.device("cpu"), world)
    step.optimizer.lr.fill_(3e-3)
    total = world * c.batch
    batches = Batches("stdlib", global_batch=total, seqlen=c.seqlen, vocab=256, seed=0, rank=rank, world=world)
    return [(step(*next(batches)).item(), step.grad_norm.item()) for _ in range(steps)]


def whole_batch(mesh):
    return {setting: train(setting) for setting in SETTINGS}


def micro_batches(mesh):
    return {setting: train(f"{setting} --grad-accum 2") for setting in ACCUMULATING}


def half_precision(mesh):
    settings = [f"{w} --reduce-dtype bf16" for w in ("simple", "fsdp2")] + ["ddp"]
    return {setting: train(f"{setting} --param-dtype bf16") for setting in settings}


LABELS = {
    "one batch": "--batch 6", "three": "--batch 2 --grad-accum 3", "last": "--batch 2 --grad-accum 3 --accum-sync last",
    "replicate": "--batch 2 --grad-accum 3 --mode replicate", "chunked": "--batch 6 --loss chunked --loss-chunk 5",
    "shards": "--batch 2 --grad-accum 3 --mode hybrid_shard --replicas 2 --accum-sync shards",
    "shards, fsdp2": "--batch 2 --grad-accum 3 --mode hybrid_shard --replicas 2 --accum-sync shards --wrapper fsdp2",
    "fsdp2": "--batch 2 --grad-accum 3 --wrapper fsdp2", "ddp": "--batch 2 --grad-accum 3 --wrapper ddp",
}  # fmt: skip


def masked():
    """[12, 8] tokens and targets of three steps: unequal labels and a micro-batch of two without any; the second half,
    that of rank 1, without any; none at all."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for k in range(3):
        tokens, targets = torch.randint(257, (2, 12, 8), generator=generator)
        if k == 0:
            targets[torch.rand(12, 8, generator=generator) < torch.linspace(0.1, 0.9, 12)[:, None]] = IGNORE
            targets[2:4] = IGNORE
        targets[[12, 6, 0][k] :] = IGNORE
        batches.append((tokens, targets))
    return batches


def whole(t, like=None):
    """The whole of a parameter, or of a local gradient of the parameter `like`."""
    if isinstance(like, DTensor):
        t = DTensor.from_local(t, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


def trained(argv, rank=0, world=1):
    """Loss, norm and whole gradients of each of the three steps, and the parameters after them.

    The eps of AdamW is far above the rounding of a gradient, about 1e-8. At its default, 1e-8, an entry whose gradient
    is that small moves by any part of the learning rate, depending on the order in which a CPU sums."""
    sizes = [*SMALL, "--depth", "1", "--width", "32", "--grouping", "2", "--seqlen", "8"]
    c = resolved([*sizes, *argv.split()], world)
    told = []
    step = build(c, torch.device("cpu"), world)
    step.optimizer.eps = 1e-4
    names = {id(p): name for name, p in step.model.named_parameters()}

    def note(params, grads):
        told[-1] |= {names[id(p)]: whole(g, p) for p, g in zip(params, grads, strict=True)}

    step.on_gradients = note if c.compile != "step" else None
    for tokens, targets in masked():
        rows = slice(12 // world * rank, 12 // world * (rank + 1))
        told.append({})
        told[-1] |= dict(loss=step(tokens[rows], targets[rows]), norm=step.grad_norm)
    return [*told, {name: whole(t) for name, t in step.model.state_dict().items()}]


def labels(mesh):
    told = {name: trained(argv, dist.get_rank(), 2) for name, argv in LABELS.items()}
    return {name: [{k: t.numpy() for k, t in each.items()} for each in steps] for name, steps in told.items()}


@pytest.fixture(scope="module")
def two_ranks():
    return spawn(2, [whole_batch, micro_batches, half_precision, labels])


@pytest.fixture(scope="module")
def one_shot():
    """The same steps in one pass over the whole batch, on one rank without a wrapper."""
    return trained("--batch 12 --wrapper none")


@pytest.mark.parametrize("setting", LABELS)
def test_unequal_labels_on_ranks_and_micro_batches_train_as_one_batch(setting, two_ranks, one_shot):
    """Also where a micro-batch or a whole rank has none; where nobody has any, loss and norm are 0, and nothing NaN."""
    for rank in two_ranks["labels"]:
        for k, (ours, theirs) in enumerate(zip(rank[setting], one_shot, strict=True)):
            assert len(ours) == len(theirs)
            for name, value in ours.items():
                value = torch.as_tensor(value)
                assert value.isfinite().all(), (k, name)
                torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=2e-6, msg=f"step {k + 1}: {name}")
        assert rank[setting][2]["loss"] == rank[setting][2]["norm"] == 0
    assert len(one_shot[0]) > 15 and one_shot[1]["norm"] > 0.1 and one_shot[0]["loss"] > 5


@pytest.mark.parametrize("mode", COMPILE_MODES)
def test_a_batch_without_labels_is_no_nan_in_any_mode(mode, one_shot, monkeypatch):
    """Unequal labels train as one batch, also in micro-batches, of which one has none, where the mode takes them."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)  # the arithmetic, not the compiler
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    monkeypatch.setattr("trainer.step.check_mode", lambda *_: None)
    cut = "--batch 12" if mode == "step" else "--batch 4 --grad-accum 3"
    steps = trained(f"--wrapper none {cut} --compile {mode}")
    for k, (ours, theirs) in enumerate(zip(steps, one_shot, strict=True)):
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=2e-6, msg=f"step {k + 1}: {name}")


@pytest.mark.parametrize(("check", "limit"), [("whole_batch", 2e-6), ("micro_batches", 2e-6), ("half_precision", 0.03)])
def test_every_wrapper_has_the_losses_and_norms_of_ours(two_ranks, check, limit):
    ours, others = two_ranks[check]
    assert ours == others  # on both ranks
    expected = next(values for setting, values in ours.items() if setting.startswith("simple"))
    assert expected[-1][0] < expected[0][0] - 0.1
    for setting, values in ours.items():
        for i, name in enumerate(("loss", "norm")):
            apart = max(abs(a[i] - b[i]) for a, b in zip(values, expected, strict=True))
            assert apart <= (limit, 5 * limit)[i], f"{setting}: {name} differs by {apart}"


@pytest.mark.slow
def test_one_command_compares_them_in_one_process_group(tmp_path):
    settings = ["simple:none", "fsdp2:none", "ddp:none"]
    rows = tmp_path / "rows.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    small = [*SMALL, "--steps", "6", "--results", str(rows)]
    argv = [*torchrun, "-m", "lab.benchmarks.wrappers", *settings, "--", *small]
    done = ran(*argv, cwd=tmp_path, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    assert done.code == 0, done.err
    written = rows_of(rows)
    assert [row["line"] for row in written] == settings
    assert {row["world"] for row in written} == {2}
    assert written[0]["ratio"] == 1
    assert all(row["n"] == 3 and row["ratio"] > 0 for row in written)
    assert all(setting in done.out for setting in settings)


@pytest.mark.slow
def test_links_of_any_speed_and_what_is_exposed_of_their_time(tmp_path):
    def call(*argv):
        return module("lab.benchmarks.exposed", "--results", "rows.jsonl", *argv, cwd=tmp_path)

    done = call("simple:none", "fsdp2:none", "--", *SMALL, "--steps", "3", "--device", "cpu")
    assert done.code == 0 and "ratio without the ends" in done.out, done.err
    rows = rows_of(tmp_path / "rows.jsonl")
    assert [(row["line"], row["factor"]) for row in rows] == list(itertools.product(
        ["simple:none", "fsdp2:none"], [0.5, 1, 2, 4]))  # fmt: skip
    for row in rows:
        assert row["world"].startswith("8(sim") and row["n"] == 3 and row["step_ms"] >= 0.99 * row["link_ms"]
        assert 0 < row["ends_ms"] < row["link_ms"], row
        begin, end = next((a, b) for what, a, b in row.get("lanes", [("computation", 0, 0)]) if what == "computation")
        carried = [(a, b) for what, a, b in row.get("lanes", ()) if what in ("all_gather", "reduce_scatter")]
        assert all(a[1] <= b[0] + 0.02 for a, b in itertools.pairwise(carried))  # the link brings one at a time
    assert [bool(row.get("lanes")) for row in rows] == 2 * [False, True, False, False]
    rest = [(row["step_ms"] - row["ends_ms"]) / max(row["compute_ms"], row["link_ms"]) for row in rows]
    lines = exposed.table(rows).splitlines()[2:]
    assert [line.split(" | ")[-1] for line in lines] == [f"{each:.3f} |" for each in rest]
    fails(call("--plot", "none/a.png"), 2, "error: --plot none/a.png: ")
    fails(call("simple:blocks_", "--", *SMALL), 2, "settings simple:blocks_: give WRAPPER:COMPILE")
    row = dict(line="simple:fwdbwd", flags=dict(ahead=2.0, keep_last=True))
    assert exposed.label(row) == "simple:fwdbwd --keep-last --ahead 2"
    if importlib.util.find_spec("matplotlib"):
        assert call("--plot", "a.png").code == 0
        assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.parametrize(("settings", "argv", "message"), [
    ("simple:none fsdp2:step", "", "settings fsdp2:step"), ("simple:none", "--device cuda", "--device cuda: .*no GPU"),
])  # fmt: skip
def test_what_cannot_be_compared_is_one_line(settings, argv, message, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = outcome(capfd, lambda: wrappers.main(settings.split(), flags.parse(argv.split()), 0, 0, 1))
    assert re.search(message, fails(done, 2))


def test_fsdp2_at_one_rank_and_its_name_in_the_configuration():
    c = resolved([*SMALL, "--wrapper", "fsdp2"])
    assert c.wrapper == "fsdp2"
    assert flags.setting(c)["wrapper"] == "fsdp2"
    assert flags.resolve(replace(c, system=replace(c.system, wrapper="ddp")), "cpu", 1).mode == "replicate"


def test_the_loss_is_compiled_in_all_that_compile_their_blocks(monkeypatch):
    """What is compared differs in its wrapper alone: a loss outside of compiled code costs 5 % of a step."""
    names = {}
    sim.start(2, sim.link("none"), "cpu")
    for wrapper in ("simple", "fsdp2", "ddp"):
        seen = names[wrapper] = []
        monkeypatch.setattr(torch, "compile", lambda f, seen=seen, **how: seen.append(f.__name__) or f)
        c = resolved([*SMALL, "--compile", "blocks", "--wrapper", wrapper], 2)
        build(c, torch.device("cpu"), 2)
    sim.stop()
    assert all("cross_entropy" in seen for seen in names.values()), names
