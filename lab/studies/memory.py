"""Peak memory by context length: a forward for inference, one for training, forward and backward, a whole step.

    python -m lab.studies.memory --small
    python -m lab.studies.memory --size 2.7b --context 128 256 512 --device cuda

Each row is of a process of its own, which runs one of these once to warm up and once under torch's profiler: the
program names the moment of the peak, what memory holds there and its largest pieces. On CUDA it leaves a snapshot of
the run in --plots, which pytorch.org/memory_viz draws, allocation by allocation. mixed: weights in fp32, gathered and
computed with in bf16 by simple_fsdp's MixedPrecisionPolicy; AdamW's moments are there only where a whole step is run.

By formula: the residual stream is 4 b T D bytes in fp32 (2 b T D mixed); weights, gradients and two moments in fp32
take 16 bytes a parameter, which is what there is at the end of a step, at any context.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator

import torch

from lab.studies.study import (
    SIZES,
    VOCAB,
    beside,
    check_default,
    curves,
    main,
    on_ranks,
    published,
    section,
)
from trainer import config
from trainer.measuring import timeline
from trainer.parallelize import build
from trainer.step_costs import reference
from trainer.terminal.text import grouped

PARTS = "inference", "forward", "forward + backward", "step"
# Columns of published/memory_2p7b.csv.
PUBLISHED = {"forward": "forward_gb", "step": "full_step_gb"}
SAME = "size", "batch"


def flags(parser) -> None:
    parser.add_argument("--size", choices=list(SIZES), help="(default: 2.7b, with --small tiny)")
    parser.add_argument(
        "--context", nargs="+", type=int, help="tokens of a sequence (default: 128 256 512)"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences")


def check(args) -> None:
    """A size of a GPU on a CPU, unless it is asked for."""
    check_default(args, "size", "size is")


def settings(args) -> list[dict]:
    """Every part at every context in fp32, and mixed at the longest."""
    contexts = args.context or ([8, 64] if args.small else [128, 256, 512])
    base = dict(size=args.size or ("tiny" if args.small else "2.7b"), batch=args.batch)
    runs = [(context, "fp32") for context in contexts] + [(max(contexts), "mixed")]
    return [
        base | dict(context=t, precision=precision, part=part)
        for t, precision in runs
        for part in PARTS
    ]


def measure(setting: dict, args) -> dict:
    """The figures of a setting, from a new process."""
    folder = args.plots or args.results.parent / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    return on_ranks(
        1, work, setting, str(folder / f"study-memory-{name_of(setting)}"), device=args.device
    )[0]


def name_of(setting: dict) -> str:
    return "-".join(str(value).replace(" + ", "-") for value in setting.values())


class Part:
    """Of a step the part that is asked for, which timeline.watch looks into as into a whole one."""

    def __init__(self, step, part: str):
        self.step = step
        self.part = part
        self.model = step.model
        self.optimizer = step.optimizer
        self.watch_phases = step.watch_phases
        if part != "step":
            self.optimizer.m = []
            self.optimizer.v = []

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """tokens, targets [B, T] -> the loss."""
        if self.part == "step":
            return self.step(tokens, targets)
        divisor = self.step.loss_divisor(targets)
        with torch.set_grad_enabled(self.part != "inference"):
            loss = self.step.forward(tokens, targets, divisor)
        if self.part == "forward + backward":
            self.step.backward(loss, self.optimizer.params)
        return loss.detach()


def of_trainer(setting: dict, device: torch.device) -> config.Config:
    """The flags of main.py that are a setting."""
    width, depth, heads = SIZES[setting["size"]]
    words = (
        f"--block llama --width {width} --depth {depth} --head-dim {width // heads} --grouping 1"
    )
    words += f" --vocab {VOCAB} --seqlen {setting['context']} --batch {setting['batch']}"
    words += " --compile none --data random --clip 0"
    mixed = setting["precision"] == "mixed"
    words += (
        " --wrapper simple --param-dtype bf16" if mixed else " --wrapper none --param-dtype fp32"
    )
    return config.resolve(config.parse(words.split()), device.type, 1)


def work(rank: int, device: torch.device, setting: dict, stem: str) -> dict:
    """In the new process: one run to warm up, one that is watched."""
    trainer_config = of_trainer(setting, device)
    part = Part(build(trainer_config, device, 1), setting["part"])
    tokens, targets = torch.randint(VOCAB, (2, setting["batch"], setting["context"]), device=device)
    part(tokens, targets)
    streams = []
    with part.model.blocks[0].register_forward_hook(
        lambda module, inputs, y: streams.append(y.nbytes)
    ):
        _, memory_timeline, _ = timeline.watch(
            trainer_config, part, tokens, targets, f"{stem}.pickle"
        )
    top = memory_timeline.peaks(1)[0]
    mib = 2**20
    row = dict(
        peak_mib=round(top.nbytes / mib, 3),
        moment=top.moment,
        residual_bytes=streams[-1],
        parameters=reference(Namespace(**trainer_config.flat())).parameters,
        state_bytes=sum(dict(states(top)).values()),
        pieces_mib={name: round(size / mib, 3) for name, size in top.pieces.items() if size},
        largest=[
            [n, round(size / mib, 3), text]
            for n, size, text in timeline.largest(memory_timeline, 3)
        ],
    )
    name, weight = max(part.model.named_parameters(), key=lambda item: item[1].numel())
    row |= dict(largest_weight=[name, round(weight.numel() * weight.element_size() / mib, 3)])
    return row


def states(top: timeline.Peak) -> Iterator[tuple[str, int]]:
    """Bytes of weights, moments and gradients at a peak."""
    return (
        (name, top.pieces[name])
        for name in (timeline.PARAMETERS, timeline.MOMENTS, timeline.GRADIENTS)
    )


COLUMNS = {
    "size": "{size}",
    "context": "{context}",
    "precision": "{precision}",
    "part": "{part}",
    "peak MiB": "{peak_mib:,.1f}",
    "16 bytes a parameter, MiB": "{formula_bytes:MiB ,.1f}",
    "peak at": lambda row: row["moment"].partition(" in ")[0],
    "largest of this run there, MiB": "{largest[0][0]} x {largest[0][1]:,.2f}: {what}",
    "residual stream, MiB": "{residual_bytes:MiB ,.2f}",
    "published GB": "{published}",
}


def table(rows: list[dict]) -> tuple[str, str]:
    """A line per row; published peaks beside those of the same size, part and context."""
    same = dict(size="2.7b", precision="fp32")
    theirs = {
        (part, int(line["context"])): same
        | dict(context=line["context"], part=part, published=line[column])
        for line in published("memory_2p7b")
        for part, column in PUBLISHED.items()
    }

    def key(row: dict) -> tuple[str, int] | None:
        setting = row["setting"]
        return (setting["part"], setting["context"]) if setting | same == setting else None

    n, mib = rows[0].get("largest_weight", ["", 0])
    text = (
        f"Batch {rows[0]['setting']['batch']}. The largest weight of {rows[0]['setting']['size']} is {n}, "
        f"{grouped(mib, 2)} MiB, and so are its gradient and each of its moments."
    )
    return section(rows, text, COLUMNS, beside(map(entry, rows), theirs, key))


def entry(row: dict) -> dict:
    """The line of a row: with what a whole step should hold, and the first words of its largest piece."""
    if row["outcome"] != "ok":
        return row
    line = row | dict(what=row["largest"][0][2].partition(";")[0])
    step = row["setting"]["part"] == "step"
    return line | (dict(formula_bytes=16 * row["parameters"]) if step else {})


def figure(rows: list[dict], folder) -> list:
    """Peak over context by part, in fp32."""
    made = {}
    for row in rows:
        if row["setting"]["precision"] == "fp32":
            made.setdefault(row["setting"]["part"], []).append(
                (row["setting"]["context"], row["peak_mib"])
            )
    return curves(folder, "memory", made, "tokens of a sequence", "peak MiB")


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
