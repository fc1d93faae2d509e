"""What a model needs on a mesh, by formula: states, activations, devices, and the batch whose compute hides the links.

    python -m lab.studies.accounting                                              # the published case, and a 2.7b model
    python -m lab.studies.accounting --width 4096 --mlp-width 14336 --blocks 32 --matrices 3 --attention --fsdp 32

Everything is counted, nothing is run. D: width, F: width of the MLP, m: its matrices, X and Y: devices of the sharded
(FSDP) and of the tensor-parallel dimension of the mesh, C: FLOP/s of a device, W: bytes/s of one axis of its links,
M_X and M_Y: how many axes a dimension has, B: tokens of the whole batch.

Weights of a block w = m D F (+ 4 D^2 with attention). States: 16 bytes a parameter (fp32 weight, gradient, two
moments). Kept for backward, bf16: the inputs of the linear layers, D + F values a token (two more F where a third
matrix makes a product; 5 D more with attention). A GELU that keeps its own input adds F: the published case does not
count it. Forward of a block: 2 w B / (X Y C) seconds on its device; gathering its weights 2 w / (Y W M_X); a gather
and a reduction of activations 4 B D / (X W M_Y), twice with attention.
"""

import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace

from lab.studies.study import curves, main, published, section
from trainer.terminal.text import grouped

XXL = dict(
    width=16384,
    mlp_width=53248,
    blocks=126,
    matrices=2,
    attention=False,
    vocab=0,
    fsdp=16,
    tp=4,
    tflops=460.0,
    gb_per_s=180.0,
    fsdp_axes=2,
    tp_axes=1,
    device_gb=95.0,
)
LLAMA = dict(width=2560, mlp_width=10240, blocks=32, matrices=3, attention=True, vocab=10000)
SIZES = {"xxl": XXL, "2.7b": XXL | LLAMA}
GIB = 2**30
GB = 1e9
WRONG = {  # of the published answer
    "kept GiB per token": "right; called the memory of batch 1",
    "devices of 80": "GiB taken for GB",
    "kept GiB per token sharded by half": "one half is missing, and the other sharded over 4, not 64",
    "devices of 95": "GiB divided by GB",
    "batch tokens": "FLOPs of all devices on one, half of them, half of the activations; and 'at most' for 'at least'",
}


def flags(parser) -> None:
    """One config in place of the two: what is not given is that of the published case."""
    for name, default in XXL.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(
                flag,
                action="store_true",
                default=None,
                help="count attention's four D x D matrices",
            )
        else:
            parser.add_argument(flag, type=type(default), metavar="N")


def settings(args) -> list[dict]:
    sizes_given = {name: getattr(args, name) for name in XXL if getattr(args, name) is not None}
    return (
        [dict(model="given") | XXL | sizes_given]
        if sizes_given
        else [dict(model=name) | size for name, size in SIZES.items()]
    )


def block(model, batch: float) -> dict[str, float]:
    """Seconds of a block's forward over `batch` tokens, by what they are for."""
    w = weights(model)
    peak = 1e12 * model.tflops
    link = GB * model.gb_per_s
    moved = 4 * (1 + model.attention) * batch * model.width / (model.fsdp * link * model.tp_axes)
    return {
        "compute": 2 * w * batch / (model.fsdp * model.tp * peak),
        "weights": 2 * w / (model.tp * link * model.fsdp_axes),
        "activations": moved * (model.tp > 1),
    }


def weights(model) -> float:
    """Parameters of a block."""
    return model.matrices * model.width * model.mlp_width + model.attention * 4 * model.width**2


def threshold(compute: float, gather: float, activations: float) -> float:
    """Tokens B with compute * B = gather + activations * B, seconds of a token and of a block; no batch does: inf."""
    return gather / (compute - activations) if compute > activations else math.inf


def measure(setting: dict, args=None) -> dict:
    """The figures by their names in the table. Nothing is timed."""
    model = SimpleNamespace(**setting)
    parameters = model.blocks * weights(model) + 2 * model.vocab * model.width
    states = 16 * parameters
    values = (
        model.width
        + model.mlp_width * (1 + 2 * (model.matrices == 3))
        + model.attention * 5 * model.width
    )
    saved = 2 * model.blocks * values  # bytes a token
    devices = next(
        n for n in range(1, 10**7) if states / n + saved / 2 * (1 + 1 / n) <= GB * model.device_gb
    )
    once = block(model, 1.0)
    sums = threshold(once["compute"], once["weights"], once["activations"])
    overlapping = (
        threshold(once["compute"], once["weights"], 0)
        if once["compute"] > once["activations"]
        else math.inf
    )
    n = model.fsdp * model.tp
    row = {
        "parameters": parameters,
        "states GiB": states / GIB,
        "kept GiB per token": saved / GIB,
        "devices of 80": math.ceil(states / (80 * GB)),
        "devices of 80 GiB": math.ceil(states / (80 * GIB)),
        "kept GiB per token sharded by half": saved / 2 * (1 + 1 / n) / GIB,
        f"devices of {model.device_gb:g}": devices,
        "batch tokens": sums,
        "batch tokens a device": sums / n,
        "batch tokens, both links at once": overlapping,
        "the same a device": overlapping / n,
    }
    return dict(figures=row, steps=steps(once, n))


def steps(once: dict[str, float], devices: int) -> list[tuple[str, float]]:
    """The published threshold, and what it becomes as one mistake after the other is mended: (words, tokens)."""
    compute = once["compute"]
    gather = once["weights"]
    moved = once["activations"]
    first = threshold(compute * devices / 2, gather, moved / 2)
    return [
        ("2 B D F / C = 4 D F / (Y W M_X) + 2 B D / (X W M_Y)", first),
        ("FLOPs divided by the devices", threshold(compute / 2, gather, moved / 2)),
        ("4 B D F for two matrices", threshold(compute, gather, moved / 2)),
        ("4 B D for a gather and a reduction", threshold(compute, gather, moved)),
    ]


COLUMNS = {
    "model": "{model}",
    "quantity": "{quantity}",
    "ours": "{ours}",
    "published": "{published}",
    "ours/published, or /line above": "{factor:.2f}",
    "of the published answer": "{note}",
}


def table(rows: list[dict]) -> tuple[str, str]:
    text = "By formula: nothing was run. Units in the names; GB is 1e9 bytes, GiB 2**30."
    return section(rows, text, COLUMNS, entries(rows))


def entries(rows: list[dict]) -> Iterator[dict]:
    """A line per figure and, of the published case, one per step of its threshold."""
    theirs = {line["quantity"]: float(line["value"]) for line in published("accounting")}
    for row in rows:
        if row["outcome"] != "ok":
            yield row
            continue
        case = row["setting"] == {"model": "xxl"} | XXL
        for name, value in row["figures"].items():
            line = row | dict(quantity=name, ours=number(value))
            if other := case and theirs.get(name):
                line |= dict(published=number(other), factor=float(value) / other)
                line |= dict(note=WRONG.get(name, "right"))
            yield line
        before = None
        for words, value in row["steps"] * case:
            line = row | dict(quantity=f"threshold: {words}", ours=number(value))
            yield line | (dict(factor=value / before) if before else dict(published="641"))
            before = value


def number(value: float | str) -> str:
    """inf is a string in a row."""
    value = float(value)
    digits = 2 * (value < 1000 and value % 1 > 0)
    return grouped(value, digits) if 1 <= value < 1e7 else f"{value:.3g}"


def figure(rows: list[dict], folder) -> list:
    """Compute and links of a block of the first model by the tokens of the batch; where they cross."""
    row = rows[0]
    model = SimpleNamespace(**row["setting"])
    figures = row["figures"]
    lines = {
        "compute": ["compute"],
        "gathering the weights alone": ["weights"],
        "links, one after the other": ["weights", "activations"],
    }
    made = {
        words: [
            (b, sum(1e3 * block(model, b)[part] for part in parts))
            for b in (2**i for i in range(8, 18))
        ]
        for words, parts in lines.items()
    }
    marks = {"hidden from here on": float(figures["batch tokens"])}
    marks = {words: place for words, place in marks.items() if place < math.inf}
    return curves(
        folder,
        "accounting",
        made,
        "tokens of the batch",
        f"ms of a block's forward, {model.model}",
        marks,
    )


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
