"""Settings drawn at random over the planner's options, to hold its closed-form peak against the simulated one.

    python -m benchmarks.plans --seed 18 --settings 36 > cells/plan_peaks.txt
    python -m trainer.experiments.sweep cells/plan_peaks.txt --program "-m benchmarks.peaks" --results results/plan_peaks.jsonl

Sizes are those of real training: by the floor of `trainer.costs.step_bytes`, between 4 and 80 GiB on a rank.
"""

import argparse
import random
import shlex
from collections.abc import Iterator

from trainer import config as flags
from trainer.costs import step_bytes
from trainer.distributed.command_line import flag

# How often each value comes: as often as it stands here.
CHOICES = {
    "depth": (2, 2, 3, 4), "width": (1024, 2048, 4096, 4096), "head_dim": (64, 128), "grouping": (1, 2, 4, 8),
    "grow": (3, 4), "vocab": (8192, 32768, 65536), "seqlen": (1024, 2048, 4096, 8192), "batch": (1, 2, 4, 8),
    "grad_accum": (1, 1, 1, 2, 4), "accum_sync": ("every", "every", "last"),
    "mode": ("fully_shard", "fully_shard", "hybrid_shard", "replicate"), "replicas": (2,),
    "reshard": (True, True, True, False), "reduce_dtype": ("fp32", "bf16"), "adam_dtype": ("fp32", "fp32", "bf16"),
    "attn": ("sdpa", "sdpa", "flex"), "ahead": (1.0, 1.0, 0.5, 0.05),
    "remat": ("none", "mlp", "attn", "both", "block", "pointwise"), "remat_ratio": (1.0, 1.0, 0.5),
    "remat_norm": (True, True, False), "remat_core": (False, False, True), "mlp": ("plain", "lean"),
    "mlp_chunk": (0, 4096), "loss": ("full", "chunked"), "chunk": (2048,),
}  # fmt: skip
WORLDS = (1, 2, 4, 8, 16, 64)
SIZES = 4 * 2**30, 80 * 2**30


def draw(seed: int, settings: int) -> Iterator[list[str]]:
    """As many command lines of `benchmarks.peaks`, each with values that fit together. The same for the same seed."""
    rng, usual = random.Random(seed), flags.resolve(flags.parse([], world=1), "cuda", 64)
    while settings:
        world, drawn = rng.choice(WORLDS), {name: rng.choice(values) for name, values in CHOICES.items()}
        words = []
        for name, value in drawn.items():
            if value != getattr(usual, name):
                words += [flag(name if value else f"no_{name}")] + [str(value)] * (not isinstance(value, bool))
        try:
            c = flags.resolve(flags.parse(words), "cuda", world)
        except ValueError:  # they do not fit together
            continue
        if c.accum_sync == "last" and c.grad_accum == 1:
            continue
        if SIZES[0] <= step_bytes(c, world, c.batch) <= SIZES[1]:
            settings -= 1
            yield ["--world", str(world), *words]


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--settings", type=int, default=36)
    own = parser.parse_args()
    print(f"# python -m benchmarks.plans --seed {own.seed} --settings {own.settings}")
    for words in draw(own.seed, own.settings):
        print(shlex.join(words))
