"""Pipeline stages: the best micro-batch, the bubble of two schedules, and how many layers to checkpoint together.

    python -m lab.studies.pipeline --small
    python -m lab.studies.pipeline --stages 8 --batch 128 --width 1600 --layers 6 --device cuda

p stages of `--layers` blocks each, a batch of B sequences over d replicas, so b' = B / d for each, in m = b' / b
micro-batches of b. A batch takes (b' / b + p - 1) (t_f(b) + t_b(b)), of which p - 1 slots are the bubble; t_f and t_b,
forward and backward of one stage, are measured for every b that divides b'; sending activations is left out. The
schedules, GPipe (all forwards, then all backwards) and 1F1B (a backward as soon as there is one), are simulated slot by
slot, and must come to the same time. GPipe keeps m micro-batches' activations on the first stage, 1F1B min(m, p).

A stage of l layers that keeps c checkpoints holds c A_in + (l / c) A_int bytes, least at c = sqrt(l A_int / A_in).
A_in, a block's input, is in A_int, too, so (c - 1) A_in + (l / c) A_int is what the counted bytes must be (where c does
not divide l, that of the segment which holds most): of all that autograd holds, each storage once.
"""

import math
import sys
from collections.abc import Iterator

import torch
from torch.utils.checkpoint import checkpoint

from lab.studies.study import Held, curves, main, milliseconds, section
from model import Block, ModelConfig
from trainer.measuring.timing import stats
from trainer.step_costs import kept_per_block
from trainer.terminal.text import grouped

SMALL = dict(stages=4, replicas=2, batch=16, width=128, head_dim=32, layers=6, seqlen=32)
# xl: 48 layers.
FULL = dict(stages=4, replicas=2, batch=64, width=1600, head_dim=64, layers=12, seqlen=128)

SAME = tuple(SMALL)


def flags(parser) -> None:
    for name in SMALL:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")


def setting(args) -> dict:
    base = SMALL if args.small else FULL
    return base | {name: getattr(args, name) for name in base if getattr(args, name) is not None}


def check(args) -> None:
    """What does not divide."""
    chosen = setting(args)
    for name, part in (("batch", "replicas"), ("width", "head_dim")):
        if chosen[name] % chosen[part]:
            raise ValueError(
                f"--{name} {chosen[name]}: must be a multiple of --{part.replace('_', '-')} {chosen[part]}"
            )


def settings(args) -> list[dict]:
    """A row for each micro-batch, and one for the checkpoints."""
    chosen = setting(args)
    per_replica = chosen["batch"] // chosen["replicas"]
    return [
        chosen | dict(micro_batch=b) for b in range(1, per_replica + 1) if per_replica % b == 0
    ] + [chosen | dict(checkpoints=True)]


def stage(setting: dict, device) -> tuple[torch.nn.Sequential, ModelConfig]:
    torch.manual_seed(0)
    config = ModelConfig(
        depth=setting["layers"], width=setting["width"], head_dim=setting["head_dim"], grouping=1
    )
    return torch.nn.Sequential(*(Block(config, "none") for _ in range(setting["layers"]))).to(
        device
    ), config


def measure(setting: dict, args) -> dict:
    """Seconds of a stage at one micro-batch, and of the batch by formula and by simulation; or bytes by checkpoints."""
    blocks, config = stage(setting, args.device)
    shape = setting.get("micro_batch", 1), setting["seqlen"], setting["width"]
    x = torch.randn(shape, device=args.device, requires_grad=True)
    if "checkpoints" in setting:
        return checkpoints(blocks, x) | dict(by_formula=kept_per_block(config))
    made = {}
    parts = {
        "forward": lambda: made.update(y=blocks(x)),
        "backward": lambda: made.pop("y").sum().backward(),
    }
    times = milliseconds(parts, args.device, args.repeat)
    row = stats(times["forward"], "forward") | stats(times["backward"], "backward")
    p = setting["stages"]
    m = setting["batch"] // setting["replicas"] // setting["micro_batch"]
    slot = row["forward_ms"] + row["backward_ms"]
    row |= dict(micro_batches=m, batch_ms=(m + p - 1) * slot, bubble=(p - 1) / (m + p - 1))
    for name in SCHEDULES:
        took, held_activations = simulate(name, p, m, row["forward_ms"], row["backward_ms"])
        row |= {f"{name}_ms": took, f"{name}_kept": held_activations}
    return row


def gpipe(stage: int, p: int, m: int) -> list[tuple[str, int]]:
    """The order of a stage: all forwards, then all backwards."""
    return [(phase, i) for phase in "FB" for i in range(m)]


def one_forward_one_backward(stage: int, p: int, m: int) -> list[tuple[str, int]]:
    """The order of a stage: as many forwards as stages follow, then backward and forward in turn."""
    ahead = min(m, p - stage)
    order = [("F", i) for i in range(ahead)]
    for i in range(m):
        order += [("B", i)] + [("F", i + ahead)] * (i + ahead < m)
    return order


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def simulate(
    schedule: str, p: int, m: int, forward: float, backward: float
) -> tuple[float, list[int]]:
    """(time of m micro-batches on p stages, most micro-batches that each stage keeps at once). A slot begins when its
    stage is free and the micro-batch has arrived: from the stage before, or in backward from the stage after."""
    orders = [SCHEDULES[schedule](s, p, m) for s in range(p)]
    done = {}
    free = [0.0] * p
    at = [0] * p
    while any(at[s] < len(orders[s]) for s in range(p)):
        before = list(at)
        for s in range(p):
            while at[s] < len(orders[s]):
                phase, i = orders[s][at[s]]
                other = s - 1 if phase == "F" else s + 1
                needs = (
                    (phase, other, i) if 0 <= other < p else ("F", s, i) if phase == "B" else None
                )
                if needs and needs not in done:
                    break
                start = max(free[s], done[needs] if needs else 0.0)
                done[phase, s, i] = free[s] = start + (forward if phase == "F" else backward)
                at[s] += 1
        if at == before:
            raise RuntimeError(f"{schedule}: the stages wait for each other")
    held_activations = []
    for order in orders:
        held = most = 0
        for phase, _ in order:
            held += 1 if phase == "F" else -1
            most = max(most, held)
        held_activations.append(most)
    return max(free), held_activations


def held(blocks: torch.nn.Sequential, x: torch.Tensor, c: int) -> int:
    """Most bytes that autograd holds in a step with c checkpoints, 0: with none."""
    counter = Held(blocks.parameters())
    layers = list(blocks)
    size = math.ceil(len(layers) / c) if c else len(layers)

    def segment(first: int):
        def run(x):
            # Of what is computed again in backward; in forward nothing is saved here.
            with counter.hooks():
                return torch.nn.Sequential(*layers[first : first + size])(x)

        return run

    with counter.hooks():
        y = x
        for first in range(0, len(layers), size):
            y = checkpoint(segment(first), y, use_reentrant=True) if c else segment(first)(y)
    y.sum().backward()
    return counter.most


def checkpoints(blocks: torch.nn.Sequential, x: torch.Tensor) -> dict:
    """Bytes counted for every number of checkpoints that is some ceil(l / n), and by formula."""
    layers = len(blocks)
    inside = held(blocks[:1], x, 0)
    outside = x.untyped_storage().nbytes()
    numbers = sorted({math.ceil(layers / math.ceil(layers / c)) for c in range(1, layers + 1)})
    return dict(
        a_in=outside,
        a_int=inside,
        counted={c: held(blocks, x, c) for c in numbers},
        none=held(blocks, x, 0),
        best=math.sqrt(layers * inside / outside),
    )


def formula(row: dict, c: int) -> tuple[float, float]:
    """Bytes with c checkpoints: as published; and without counting the input of the segment in work twice."""
    layers = row["setting"]["layers"]
    inside = row["a_int"]
    outside = row["a_in"]
    size = math.ceil(layers / c)
    segments = [min(size, layers - first) for first in range(0, layers, size)]
    return c * outside + layers / c * inside, max(
        n * outside + length * inside for n, length in enumerate(segments)
    )


def fastest(rows: list[dict]) -> dict | None:
    """The row of the best micro-batch."""
    return min(
        (row for row in rows if "batch_ms" in row), key=lambda row: row["batch_ms"], default=None
    )


COLUMNS = {
    "setting": "{name}",
    "t_f + t_b, ms": "{forward_ms:,.2f} + {backward_ms:,.2f}",
    "by formula": "{formula}",
    "simulated, or counted": "{found}",
    "note": "{note}",
}


def table(rows: list[dict]) -> tuple[str, str]:
    first = rows[0]["setting"]
    text = (
        f"{first['stages']} stages of {first['layers']} layers, width {first['width']}, {first['seqlen']} tokens, "
        f"a batch of {first['batch']} over {first['replicas']} replicas. t_f and t_b are medians of one stage."
    )
    return section(rows, text, COLUMNS, entries(rows))


def entries(rows: list[dict]) -> Iterator[dict]:
    """A line per micro-batch and per number of checkpoints: what the formula says beside what was found."""
    for row in rows:
        shape = row["setting"]
        if row["outcome"] != "ok":
            yield row | dict(name=f"b = {shape.get('micro_batch', '')}")
        elif "micro_batch" in shape:
            activations = f"the first stage keeps {row['gpipe_kept'][0]} micro-batches, by 1F1B {row['1f1b_kept'][0]}"
            simulated = (grouped(row[f"{name}_ms"], 1) for name in SCHEDULES)
            yield row | dict(
                name=f"b = {shape['micro_batch']}, m = {row['micro_batches']}",
                formula=f"{grouped(row['batch_ms'], 1)} ms, bubble {100 * row['bubble']:.0f} %",
                found="{} GPipe, {} 1F1B, simulated".format(*simulated),
                note=activations + "; least time" * (row is fastest(rows)),
            )
        else:
            yield from checkpoint_entries(row)


def checkpoint_entries(row: dict) -> Iterator[dict]:
    """The lines of the table of one row: kept bytes for each number of checkpoints, in KiB."""
    layers = row["setting"]["layers"]

    def kib(nbytes: float) -> str:
        return f"{nbytes / 2**10:.0f}"

    yield dict(
        name=f"l = {layers}, none",
        formula=f"{kib(layers * row['a_int'])} KiB",
        found=f"{kib(row['none'])} KiB",
        note=f"A_int / A_in = {row['a_int'] / row['a_in']:.2f}",
    )
    least = min(row["counted"].values())
    for n, size in row["counted"].items():
        published, exact = map(kib, formula(row, int(n)))
        yield dict(
            name=f"l = {layers}, c = {n}",
            formula=f"{published} KiB, input once: {exact}",
            found=f"{kib(size)} KiB",
            note=f"least; sqrt(l A_int / A_in) = {row['best']:.1f}" * (size == least),
        )


def figure(rows: list[dict], folder) -> list:
    """Time of the batch over the micro-batch, the bubble in it, and its best."""
    timed = [row for row in rows if "micro_batch" in row["setting"]]
    made = {"batch": [(row["setting"]["micro_batch"], row["batch_ms"]) for row in timed]}
    made["of it bubble"] = [
        (row["setting"]["micro_batch"], row["batch_ms"] * row["bubble"]) for row in timed
    ]
    best = fastest(rows)
    marks = {"best": best["setting"]["micro_batch"]} if best else {}
    return curves(folder, "pipeline", made, "sequences of a micro-batch", "ms", marks)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
