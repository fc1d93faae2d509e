"""--optimizer muon in the training step: every compile mode and wrapper trains alike, another number of ranks resumes.

    pytest tests/test_muon_trainer.py      # no GPU; two spawns
"""

import os
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from running import resolved
from saved import made, start_of, whole

import plan as plan_program
from lab.benchmarks import wrappers
from lab.planning import step_time
from muon import groups_of, layout_of, muon, newton_schulz, plan
from trainer.checkpoint import load as checkpoint
from trainer.checkpoint.manifest import CheckpointError
from trainer.checkpoint.save import Saver
from trainer.distributed import simulated_world as sim
from trainer.optimizer import local
from trainer.parallelize import build, reference_model
from trainer.step_costs import newton_schulz_flops, reference

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("isolated")]
MUON = "--optimizer muon --muon-dtype fp32 --muon-lr 0.02 --lr 0.01".split()
SETTINGS = {
    "none": "--compile none",
    "bf16 momentum": "--compile none --adam-dtype bf16",
    "replicate": "--mode replicate",
    "hybrid": "--mode hybrid_shard",
    "small ones replicated": "--min-shard-mib 0.005",
    "last": "--accum-sync last --grad-accum 2",
    "fsdp2": "--wrapper fsdp2",
    "ddp": "--wrapper ddp",
}


def losses(ranks, setting, steps=4, compiled_update=None, how=MUON):
    """Of all ranks together, before each of some steps on the same global batch."""
    argv = setting.split()
    rows = 4 // ranks // (2 if "--grad-accum" in argv else 1)
    c, _, batches = made(ranks, "--batch", rows, *how, *argv, "--seed", 1)
    step = build(c, torch.device("cpu"), ranks, compiled_update=compiled_update)
    return [step(*next(batches)).item() for _ in range(steps)]


def every_setting(mesh):
    return {name: losses(2, argv) for name, argv in SETTINGS.items()}


def compiled(mesh):
    found = {"step": losses(2, "--compile step")} if torch.__version__ >= "2.13" else {}
    return found | {"fwdbwd": losses(2, "--compile fwdbwd", compiled_update=True)}


def saved_by_two(mesh):
    c, step, batches = made(2, "--batch", 2, *MUON, "--adam-dtype", "bf16", "--save", os.environ["MUON_RUN"])
    os.makedirs(c.save, exist_ok=True)
    for _ in range(2):
        step(*next(batches))
    Saver(c, step, batches).save(2)
    return whole(step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon") / "run"
    with mock.patch.dict(os.environ, MUON_RUN=str(folder)):
        yield folder


@pytest.fixture(scope="module")
def two(folder):
    return spawn(2, [every_setting, saved_by_two])


def assert_as_one_process(found):
    """found: losses of every setting."""
    adamw = losses(1, "--compile none", how=["--lr", "0.01"])
    for name, values in found.items():
        one = losses(1, "--compile none" + " --adam-dtype bf16" * (name == "bf16 momentum"))
        assert max(abs(a - b) for a, b in zip(one, adamw, strict=True)) > 0.005  # it is another optimizer
        assert values == pytest.approx(one, abs=2e-4), name


def test_two_ranks_train_as_one_process_does(two, alone):
    first, second = two["every_setting"]
    assert first == second
    assert first.keys() == SETTINGS.keys()
    assert_as_one_process(first)


@pytest.mark.slow
def test_two_compiled_ranks_train_as_one_process_does(alone):
    first, second = spawn(2, [compiled])["compiled"]
    assert first == second
    assert_as_one_process(first)


def test_one_rank_resumes_to_the_bit_what_two_saved(two, alone, folder):
    argv = ["--batch", 4, *MUON, "--adam-dtype", "bf16", "--resume", folder, "--steps", 3]
    c, step, batches = made(1, *argv, seed=5)
    found = start_of(c, step, batches)
    checkpoint.load(found, step)
    state = whole(step)
    assert state == two["saved_by_two"][0] == two["saved_by_two"][1]
    assert "m.blocks.0.attn.q.weight" in state and "v.blocks.0.attn.q.weight" not in state and "v.emb.weight" in state
    assert state["m.blocks.0.attn.q.weight"][0] == "torch.bfloat16"
    c, step, batches = made(1, "--batch", 4, "--adam-dtype", "bf16", "--resume", folder, "--steps", 3)
    with pytest.raises(CheckpointError, match="was saved with --optimizer muon .now adamw., which a resumed run must"):
        start_of(c, step, batches)


# ---------------------------------------------------------------------------------------------------- simulated ranks


@pytest.mark.parametrize("mode", ["fully_shard", "replicate", "hybrid_shard"])
def test_eight_simulated_ranks_each_update_what_they_own_as_torch_does(mode):
    """Each rank in turn, in a world whose ranks hold equal shards: of what it owns it knows the result."""
    shapes = [(32, 16)] * 5 + [(16, 48)] * 3 + [(8, 8)]
    done = set()
    lr = 0.1
    shards = {"fully_shard": 8, "replicate": 1, "hybrid_shard": 4}[mode]
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape[0] // shards, shape[1], generator=generator)  # noqa: E731
    values = [draw(shape) for shape in shapes]
    gradients = [draw(shape) for shape in shapes]
    expected = [torch.nn.Parameter(p.repeat(shards, 1)) for p in values]
    theirs = torch.optim.Muon(expected, lr=lr)
    for p, g in zip(expected, gradients, strict=True):
        p.grad = g.repeat(shards, 1)
    theirs.step()
    for rank in range(8):
        sim.start(8, sim.link("none"), rank=rank)
        layouts = [layout_of(torch.empty(shape, device="meta")) for shape in shapes]
        group = dist.group.WORLD.group_name
        layouts = [each._replace(shards=shards, group=group, ranks=8, me=rank) for each in layouts]
        sets = list(plan(layouts))
        params = [p.clone() for p in values]
        hyper = dict(lr=lr, weight_decay=0.1, momentum=0.95, nesterov=True, ns_coefficients=(3.4445, -4.7750, 2.0315))
        hyper |= dict(eps=1e-7, ns_steps=5, adjust_lr_fn=None, ns_dtype=torch.bfloat16)
        muon(sets, params, gradients, [torch.zeros_like(p) for p in params], **hyper)
        kinds = {each.op for each in sim.log()}
        sim.stop()
        assert kinds == {"all_to_all"}
        for _, counts, members in sets:
            owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
            for owner, i in zip(owners, members, strict=True):
                if owner == rank:
                    done.add(i)
                    part = rank % shards if shards > 1 else 0
                    own = expected[i].detach().chunk(shards)[part]
                    torch.testing.assert_close(params[i], own, rtol=0, atol=2e-3 * lr)
    assert done == set(range(len(shapes)))


# ------------------------------------------------------------------------------------------------------- command lines


def test_a_run_says_what_goes_where_and_its_row_holds_the_setting(trains):
    done = trains("--optimizer", "muon", "--muon-lr", "0.01", "--steps", "3")
    assert done.row["outcome"] == "ok"
    assert done.row["flags"]["optimizer"] == "muon"
    assert done.row["flags"]["muon_lr"] == 0.01
    assert "muon for 6 matrices (blocks.*.attn.q.weight, blocks.*.attn.k.weight" in done.out
    assert "adamw for 2 matrices (emb.weight, head.weight) and 8 vectors" in done.out


def test_a_simulated_world_runs_it(trains):
    done = trains("--optimizer", "muon", "--world", "8", "--steps", "3")
    assert done.row["collectives"]["all_to_all"]["n"] == 8, done.row["collectives"]


def test_a_language_model_is_fine_tuned(tune):
    done = tune("--optimizer", "muon", "--steps", "4")
    assert done.code == 0 and done.row["flags"]["optimizer"] == "muon" and "muon for" in done.out


def test_the_benchmark_puts_torchs_muon_beside_ours(alone):
    """In bf16 iterations: the same updates, so the same losses."""
    argv = "--compile none --lr 0.01 --optimizer muon --param-dtype fp32 --seed 1 --batch 4".split()
    c, step, batches = made(1, *argv)
    other = build(c, torch.device("cpu"), 1)
    other.optimizer = wrappers.TorchMuon(other.optimizer)
    for _ in range(3):
        batch = next(batches)
        assert step(*batch).item() == pytest.approx(other(*batch).item(), abs=1e-4)
    for p, q in zip(step.optimizer.matrices, other.optimizer.matrices, strict=True):
        torch.testing.assert_close(local(p), local(q), rtol=0, atol=1e-3)
    assert wrappers.parts("simple:none") == ("simple", "none", "adamw")
    with pytest.raises(SystemExit):
        wrappers.check_settings(["simple:none:sgd"], 1)


def test_the_flops_of_an_iteration_are_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    for m, n in ((8, 24), (24, 8), (16, 16)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(3, m, n), (3.4, -4.8, 2.0), 5, 1e-7)
        assert counter.get_total_flops() == 3 * newton_schulz_flops(m, n, 5)


# -------------------------------------------------------------------------------------------------------- the planner


def planned(*argv, gpus=8):
    own = plan_program.Plan(gpus=gpus)
    return plan_program.question(own, [*argv, "--remat", "none"]).answer()


@pytest.mark.parametrize("block", ["gelu", "llama"])
def test_the_planner_knows_which_matrices_are_muons(block):
    c = resolved(["--block", block])
    model = reference_model(c, torch.device("cpu"))
    matrices = [tuple(p.shape) for _, p in groups_of(model)[0]["params"]]
    assert Counter(matrices) == reference(c).hidden_matrices


def test_a_planned_step_of_eight_h100s_is_at_most_a_tenth_longer_than_adamws():
    adamw = planned()
    muon_ = planned("--optimizer", "muon")
    assert 1 < muon_.time.seconds / adamw.time.seconds < 1.1
    one = planned("--optimizer", "muon", gpus=1).time.parts[step_time.ITERATION]
    D = 4096
    rate = 0.83 * 831e12  # of products: that of one H100, as far as others reach it (lab/planning/field.toml)
    assert one == pytest.approx(5 * 194.25 * D**3 / rate, rel=0.2)
    assert muon_.time.parts[step_time.ITERATION] == pytest.approx(one / 8, rel=0.15)
    fewer = planned("--optimizer", "muon", gpus=1).peak.pieces["Adam's moments"]
    assert fewer / planned(gpus=1).peak.pieces["Adam's moments"] == pytest.approx(0.638, abs=0.01)


def test_the_update_can_be_the_peak():
    small = planned("--optimizer", "muon", "--batch", "1", "--seqlen", "256", gpus=1)
    assert small.peak.moment == "Muon's update"
