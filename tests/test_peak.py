"""python -m trainer.profiling.peak: its peaks are those of a real step on a CPU, and none of ours has grown.

    pytest tests/test_peak.py                       # half a minute, no GPU
    pytest tests/test_peak.py -m "slow or not slow"   # every setting, and the reference setting: twelve minutes
"""

import re

import pytest
import torch
import torch.distributed as dist
from running import module, one_line
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer import config as flags
from trainer.parallelize import build
from trainer.profiling import gpu_code, peak
from trainer.profiling.timeline import watch

WORLD = 4
needs_triton = pytest.mark.skipif(bool(gpu_code.no_triton()), reason=str(gpu_code.no_triton()))
EAGER = [f"--compile none {line}" for line in (
    "", "--no-reshard", "--remat both --param-dtype bf16", "--remat block --remat-ratio 0.5", "--remat pointwise",
    "--mode hybrid_shard --loss chunked --chunk 100", "--mode replicate --remat mlp", "--mlp lean --mlp-chunk 512",
    "--optim in-backward --clip 0", "--wrapper fsdp2", "--wrapper fsdp2 --param-dtype bf16 --batch 4 --grad-accum 2",
    "--grad-accum 2 --batch 4 --accum-sync last", "--adam-dtype bf16", "--min-shard-mib 0.1", "--depth 2 --vocab 4096",
)]  # fmt: skip
COMPILED = [f"--depth 2 {line}" for line in (
    "--compile fwdbwd", "--compile fwdbwd --remat both", "--compile fwdbwd --loss chunked --chunk 256",
    "--compile fwdbwd --remat block --mlp lean --mlp-chunk 512 --ahead 0.05", "--compile blocks", "--compile model",
    "--compile step", "--compile blocks --wrapper fsdp2", "--compile fwdbwd --param-dtype bf16 --compile-options plain",
)]  # fmt: skip
SMALL = "--depth 1 --width 512 --seqlen 512 --batch 4 --vocab 4096"
LEAN = "--loss chunked --remat block --mlp lean --ahead 0.05 --compile-options allow_buffer_reuse=False"


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


def slow(settings, quick=0):
    return [line if i < quick else pytest.param(line, marks=pytest.mark.slow) for i, line in enumerate(settings)]


@pytest.mark.parametrize("line", slow(EAGER, quick=6) + slow(COMPILED))
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


def simulated(line: str) -> tuple[float, float, str]:
    """(MiB, TFLOP, output) of the command."""
    done = module("trainer.profiling.peak", *line.split())
    assert done.code == 0, done.err
    mib = re.search(r"simulated, not measured: ([\d'.]+) MiB", done.out)[1]
    flops = re.search(r"products and attention: ([\d.]+) TFLOP", done.out)[1]
    return float(mib.replace("'", "")), float(flops), done.out


# setting -> MiB, TFLOP; recorded with torch 2.13.0, triton 3.7.1
RECORDED = {
    f"--world 4 {SMALL}": (0, 0),
    f"--world 4 {SMALL} {LEAN}": (0, 0),
}


@needs_triton
@pytest.mark.parametrize("line", RECORDED)
def test_no_peak_has_grown_by_2_percent(line):
    mib, flops, out = simulated(line)
    assert (mib, flops) == pytest.approx(RECORDED[line], rel=0.02), out


def test_ddp_is_refused():
    done = module("trainer.profiling.peak", "--device", "cpu", "--wrapper", "ddp", "--compile", "none")
    assert done.code == 2 and "--wrapper ddp: its reducer needs memory" in one_line(done.err)
