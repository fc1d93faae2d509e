"""System flags do not change the loss: one table, 4 steps of AdamW on real text in fp32, from the same seed.

Reference: one process, eager, unwrapped. Every other setting has the same global batch of 8 sequences and differs
in a few of: number of ranks, --mode, --compile, --attn, --remat, --mlp, --loss, --reshard, --grad-accum, --accum-sync.
Compiled settings have all of overlap.py's options; a graph break or recompile is an error. Those of backend="inductor",
all of them slow tests, are compiled as the trainer does; the others run the graphs that Inductor's passes, ours
included, leave, without its slow code generation. What compiles slowly is one block deep, the rest has two blocks.
`pytest -s` prints the table. The slow test has more combinations, deeper compiled settings, and takes 10 steps.
Tolerance: 2e-6 nats on the loss of any step (losses are about 5, an ulp is 5e-7), 1e-5 on the norm.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from torch.nn.attention.flex_attention import flex_attention
from without_code import WithoutCode

import model as model_file
from model import ModelConfig, Transformer
from simple_fsdp import data_parallel, disable_data_parallel
from trainer.data import Batches
from trainer.step import AdamW, check_mode, make_step

GLOBAL_BATCH = 8
SEQLEN = 32
TOLERANCE = 2e-6
NORM_TOLERANCE = 1e-5
FEW, MANY = 4, 10  # steps
SHAPE = dict(depth=2, width=64, head_dim=16, grouping=2, vocab=256)
EAGER = dict(compile="none")
SHALLOW = dict(depth=1)
SETTINGS = {
    1: [EAGER, dict(EAGER, loss="chunked"), dict(EAGER, attn="flex", remat="block"),
        *(dict(EAGER, remat=r) for r in ("mlp", "attn", "both", "block", "pointwise")),
        dict(EAGER, remat="both", remat_norm=False, remat_core=True),
        dict(EAGER, remat="block", mlp="lean", mlp_chunk=99),
        dict(EAGER, accum=4), dict(EAGER, accum=4, sync="last")],
    2: [EAGER, dict(EAGER, mode="replicate"), dict(EAGER, reshard=False), dict(EAGER, min_bytes=2048),
        dict(EAGER, remat="both", ratio=0.5, loss="chunked"), dict(EAGER, accum=2, sync="last"),
        dict(compile="fwdbwd", **SHALLOW), dict(compile="step", remat="both", **SHALLOW)],
    4: [dict(EAGER, mode="hybrid_shard"), dict(EAGER, mode="hybrid_shard", accum=2, sync="shards"),
        dict(EAGER, block="llama", remat="both", loss="chunked")],
}  # fmt: skip
QUICK = [dict(EAGER, accum=2)]  # what each commit runs
MORE = {  # other combinations, and the modes above that run as graphs with the code that Inductor generates
    1: [dict(EAGER, attn="flex", remat="both"), dict(compile="fwdbwd")],
    2: [dict(compile="fwdbwd", remat="block", reshard=False, mlp="lean"),
        dict(compile="blocks", remat="both", backend="inductor"),
        dict(compile="fwdbwd", accum=2, sync="last", remat="mlp"),
        dict(EAGER, accum=2, sync="last", mode="replicate"),
        dict(compile="fwdbwd", accum=2, mode="replicate"),
        dict(compile="fwdbwd", depth=4, ahead=2),
        dict(compile="fwdbwd", accum=2, remat="pointwise", loss="chunked"), dict(compile="fwdbwd", backend="inductor"),
        dict(compile="model", backend="inductor"), dict(compile="fwdbwd", block="llama", backend="inductor"),
        dict(compile="step", remat="both", backend="inductor")],
    4: [dict(EAGER, mode="hybrid_shard", accum=2, sync="last"),
        dict(compile="fwdbwd", mode="hybrid_shard", accum=2, sync="shards", remat="both"),
        dict(compile="step", mode="hybrid_shard"),
        dict(compile="blocks", depth=3, mode="hybrid_shard", loss="chunked"),
        dict(compile="fwdbwd", depth=4, mode="hybrid_shard", ahead=3),
        dict(compile="fwdbwd", mode="hybrid_shard", backend="inductor")],
}  # fmt: skip


if torch.__version__ < (2, 13):  # see trainer.step.check_mode
    NEW = ("step",)
    SETTINGS, MORE = (
        {n: [setting for setting in settings[n] if setting.get("compile") not in NEW] for n in settings}
        for settings in (SETTINGS, MORE)
    )


def name(world, setting):
    return f"{world} ranks " + " ".join(f"{k}={v}" for k, v in setting.items())


def losses(step, rank, world, steps):
    batches = Batches("stdlib", global_batch=GLOBAL_BATCH, seqlen=SEQLEN, vocab=256, seed=0, rank=rank, world=world)
    return [(step(*next(batches)).item(), step.grad_norm.item()) for _ in range(steps)]


def run(mesh, steps, *, compile="none", attn="sdpa", remat="none", mode="fully_shard", loss="full", reshard=True,
        accum=1, sync="every", ratio=1.0, min_bytes=0, backend="graphs", ahead=1.0, **config):  # fmt: skip
    torch._dynamo.reset()
    torch.compile = COMPILE if backend == "inductor" else without_code
    torch.manual_seed(0)
    world = mesh.size()
    if mode == "hybrid_shard":
        mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = Transformer(ModelConfig(**SHAPE | config, attn=attn, remat=remat, remat_ratio=ratio))
    over, mode = (mesh["shard"], "fully_shard") if sync == "shards" else (mesh, mode)
    data_parallel(model, over, mode, reshard_after_forward=reshard, min_bytes=min_bytes).to_empty(device="cpu")
    with disable_data_parallel():
        model.init_weights()
    model.prepare(SEQLEN, "cpu")
    kwargs = dict(mesh=mesh, grad_accum=accum, accum_sync=sync, clip=1.0, chunk=10 if loss == "chunked" else 0)
    step = make_step(compile, model, AdamW(model.parameters(), 3e-3), ahead=ahead, **kwargs)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        values = losses(step, dist.get_rank(), world, steps)
    assert not torch._dynamo.utils.counters["graph_break"]
    return values


COMPILE = torch.compile


def without_code(function, *, options=None, backend=None, **how):
    return COMPILE(function, backend=backend or WithoutCode(options), **how)


def flex_on_a_cpu():
    """Torch refuses to train FlexAttention on a CPU; without that one check, and without Inductor, it can."""
    torch.nn.attention.flex_attention._validate_device = lambda *_: None
    model_file.compiled_flex_attention = torch.compile(flex_attention, backend="aot_eager")


def quick(mesh):
    return [run(mesh, FEW, **setting) for setting in QUICK]


def everyday(mesh):
    flex_on_a_cpu()
    return [run(mesh, FEW, **setting) for setting in SETTINGS[mesh.size()]]


def more(mesh):
    flex_on_a_cpu()
    return [run(mesh, MANY, **setting) for setting in MORE[mesh.size()]]


@functools.cache
def reference(depth, block="gelu"):
    """One process, no wrapper, no compiler, torch's own clipping and AdamW."""
    model = Transformer(ModelConfig(**SHAPE | dict(depth=depth, block=block)))
    torch.manual_seed(0)
    model.init_weights()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    batches = Batches("stdlib", global_batch=GLOBAL_BATCH, seqlen=SEQLEN, vocab=256, seed=0)
    out = []
    for _ in range(MANY):
        loss = model(*next(batches)) / (GLOBAL_BATCH * SEQLEN)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        out.append((loss.item(), norm.item()))
    return out


def compare(check, world, settings, steps):
    """`check` gives the values of `settings`, in order, on every rank; the reference's first values are the same."""
    table = {}
    ranks = spawn(world, [check], timeout=600)[check.__name__]
    for setting, values, *others in zip(settings, *ranks, strict=True):
        assert all(v == values for v in others), f"{name(world, setting)}: ranks disagree"
        expected = reference(setting.get("depth", SHAPE["depth"]), setting.get("block", "gelu"))[:steps]
        pairs = list(zip(values, expected, strict=True))
        table[name(world, setting)] = [max(abs(a[i] - b[i]) for a, b in pairs) for i in (0, 1)]
    first, *_, last = [loss for loss, _ in reference(SHAPE["depth"])[:steps]]
    print(f"\nreference: loss {first:.6f} -> {last:.6f} in {steps} steps; largest difference of any step")
    print("\n".join(f"{setting:<70} loss {loss:.1e}  norm {norm:.1e}" for setting, (loss, norm) in table.items()))
    assert last < first - 0.5, "nothing was learnt: the table proves nothing"
    bad = {setting: d for setting, d in table.items() if not (d[0] <= TOLERANCE and d[1] <= NORM_TOLERANCE)}
    assert not bad


def test_two_ranks_train_as_one_process():
    compare(quick, 2, QUICK, FEW)


@pytest.mark.long
@pytest.mark.parametrize("world", SETTINGS)
def test_system_flags_change_neither_loss_nor_gradient_norm(world):
    compare(everyday, world, SETTINGS[world], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("world", MORE)
def test_more_combinations_and_generated_code_change_neither(world):
    compare(more, world, MORE[world], MANY)


def test_one_graph_is_refused_in_one_line_on_a_torch_that_cannot(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    check_mode("fwdbwd")
    with pytest.raises(ValueError, match=r"^--compile step needs torch >= 2.13 .this is 2.11.0.*use --compile fwdbwd$"):
        check_mode("step")


@pytest.mark.long
def test_compiled_frames_do_not_grow_with_depth(monkeypatch):
    """3 and 12 blocks: the same number of frames, no graph break (fullgraph), no recompile."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **kw: real(f, backend="eager", **kw))
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    frames = []
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for depth in (3, 12):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            with torch._dynamo.config.patch(error_on_recompile=True):
                model = Transformer(ModelConfig(depth=depth, width=16, head_dim=8, grouping=1, vocab=256))
                data_parallel(model, mesh)
                step = make_step("blocks", model, AdamW(model.parameters(), 1e-3), mesh=mesh)
                for _ in range(3):
                    step(torch.randint(256, (2, 8)), torch.randint(256, (2, 8)))
            counters = torch._dynamo.utils.counters
            assert not counters["graph_break"]
            frames.append((counters["frames"]["total"], counters["stats"]["unique_graphs"]))
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
    assert frames[0][1] == 2 and len(set(frames)) == 1, frames  # a block, and the loss
