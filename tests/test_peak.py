"""python -m trainer.profiling.peak: its peaks are those of a real step on a CPU, and none of ours has grown.

    pytest tests/test_peak.py                       # half a minute, no GPU
    pytest tests/test_peak.py -m "slow or not slow"   # every setting, and the reference setting: twelve minutes
"""

import re

import pytest
import torch
import torch.distributed as dist
from running import module, needs_triton, one_line
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer import config as flags
from trainer.parallelize import build
from trainer.profiling import peak
from trainer.profiling.timeline import watch

WORLD = 4
EAGER = [f"--compile none {line}" for line in (
    "", "--no-reshard", "--remat both --param-dtype bf16", "--remat block --remat-ratio 0.5", "--remat pointwise",
    "--mode hybrid_shard --loss chunked --chunk 100", "--mode replicate --remat mlp", "--mlp lean --mlp-chunk 512",
    "--optim in-backward --clip 0", "--wrapper fsdp2", "--wrapper fsdp2 --param-dtype bf16 --batch 4 --grad-accum 2",
    "--grad-accum 2 --batch 4 --accum-sync last", "--adam-dtype bf16", "--min-shard-mib 0.1", "--depth 2 --vocab 4096",
)]  # fmt: skip
COMPILED = [f"--depth 2 {line}" for line in (
    "--compile fwdbwd --remat both --param-dtype bf16", "--compile blocks", "--compile model --compile-options plain",
    "--compile fwdbwd --loss chunked --remat block --mlp lean --mlp-chunk 512 --ahead 0.05", "--compile step",
)]  # fmt: skip
SMALL = "--world 4 --depth 1 --width 512 --seqlen 512 --batch 16 --vocab 8192"
LEAN = "--remat block --mlp lean --ahead 0.05 --compile-options allow_buffer_reuse=False --loss chunked"


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


def slow(settings, quick=0):
    return [line if i < quick else pytest.param(line, marks=pytest.mark.slow) for i, line in enumerate(settings)]


@pytest.mark.parametrize("line", slow(EAGER, quick=4) + slow(COMPILED))
def test_the_simulated_peak_is_that_of_a_real_step_within_1_percent(line, one_thread):
    """Of a rank whose collectives move nothing: their buffers are there, their contents are not."""
    c = flags.resolve(flags.parse(["--device", "cpu", *line.split()]), "cpu", WORLD)
    simulated = peak.simulate(c, WORLD, None)[0].peaks(1)[0]
    torch._dynamo.reset()
    step = build(c, torch.device("cpu"), WORLD)
    tokens = torch.randint(c.vocab, (c.batch * c.grad_accum, c.seqlen))
    for _ in range(2):
        step(tokens, tokens)
    real = watch(c, step, tokens, tokens)[1].peaks(1)[0]
    assert simulated.nbytes == pytest.approx(real.nbytes, rel=0.01), (simulated.moment, real.moment)


def simulated(line: str, command: str = "trainer.profiling.peak") -> tuple[float, float, str]:
    """(MiB, TFLOP, output) of the command."""
    done = module(command, *line.split())
    assert done.code == 0, done.err
    mib = re.search(r"simulated, not measured: ([\d'.]+) MiB", done.out)[1]
    flops = re.search(r"products and attention: ([\d.]+) TFLOP", done.out)[1]
    return float(mib.replace("'", "")), float(flops), done.out


# setting -> MiB, TFLOP; recorded with torch 2.13.0, triton 3.7.1
RECORDED = {
    SMALL: (315.2, 0.372),
    f"{SMALL} {LEAN} --chunk 1024 --mlp-chunk 1024": (144.1, 0.399),
}


@needs_triton
@pytest.mark.parametrize("line", slow(reversed(RECORDED), quick=1))
def test_no_peak_has_grown_by_2_percent(line):
    mib, flops, out = simulated(line)
    assert (mib, flops) == pytest.approx(RECORDED[line], rel=0.02), out


PLANTED = """
import argparse, sys, torch, lean, model
from trainer import config
from trainer.profiling import peak

class Loop(torch.autograd.Function):  # as it was before it became one operation
    @staticmethod
    def forward(ctx, x, w, y, chunk):
        loss, gx, gw = torch.zeros((), device=x.device), [], None
        for xc, yc in zip(x.split(chunk), y.split(chunk)):
            z, t = (xc @ w.t()).float(), yc.unsqueeze(1)
            m = z.amax(-1, keepdim=True)
            p = (z - m).exp()
            s = p.sum(-1, keepdim=True)
            loss = loss + (s.log() + m - z.gather(1, t)).sum()
            g = (p / s - (torch.arange(len(w), device=x.device) == t).to(p.dtype)).to(x.dtype)
            gx.append(g @ w)
            gw = (g.t() @ xc).float() if gw is None else gw + g.t() @ xc
        ctx.save_for_backward(torch.cat(gx), gw.to(w.dtype))
        return loss

    @staticmethod
    def backward(ctx, go):
        gx, gw = ctx.saved_tensors
        return (gx * go).to(gx.dtype), (gw * go).to(gw.dtype), None, None

model.chunked_cross_entropy = lambda x, w, y, chunk: Loop.apply(x.flatten(0, 1), w, y.flatten(), chunk)
own = argparse.Namespace(arch="sm_90", world=4, kernels=0, plot=None)
sys.exit(peak.main(own, config.parse(sys.argv[3:])))
"""


@pytest.mark.slow
@needs_triton
def test_a_chunked_loss_that_the_compiler_takes_apart_is_noticed():
    line = list(RECORDED)[1]
    mib, *_, out = simulated(line, PLANTED)
    assert mib > 1.02 * RECORDED[line][0], out
    assert "[C,V]" in out.partition("largest buffers")[2], out  # it says which buffer


def test_ddp_is_refused():
    done = module("trainer.profiling.peak", "--device", "cpu", "--wrapper", "ddp", "--compile", "none")
    assert done.code == 2 and "--wrapper ddp: its reducer needs memory" in one_line(done.err)
