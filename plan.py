"""Will it fit, how fast, on how many GPUs: a training step planned before anyone rents the GPUs. Nothing is run.

    python plan.py --gpu h100 --gpus 8 --remat none                        # the flags of main.py, reference setting
    python plan.py --hf Qwen2.5-7B/ --gpus 8 --batch 2 --remat block       # a Hugging Face config.json
    python plan.py --gpus 8 --nodes 2 --best                               # the fastest plan that fits
    python plan.py --gpus 8 --what-if seqlen 2048 4096 8192
    python plan.py --calibrate results/h100.jsonl                          # constants from your own rows
    python plan.py --gpu cpu --calibrate results/exposed.jsonl             # steps at four speeds of simulated links

Peak memory is a closed form, held against the memory of generated code; time is a roofline with two streams
(docs/PLANNER.md). Each answer says how far off it was where it could be checked. No torch is imported, except by
--exact.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, get_type_hints

from tyro.conf import arg

from trainer import config as flags
from trainer.costs import link
from trainer.distributed.command_line import explain, flag, parse_beside
from trainer.distributed.terminal import fail, tell
from trainer.planning import hardware, report, search
from trainer.planning.architecture import read, reference


@dataclass(frozen=True)
class Plan:
    """All other flags are main.py's: python main.py --help lists them."""

    gpu: str = "h100"
    """GPU: a100-80, a100-40, h100, h100-pcie, h200, b200, l40s, rtx-4090 or mi300x; cpu with --calibrate."""
    gpus: int = 1
    """GPUs of a node."""
    nodes: int = 1
    """Nodes."""
    across: str = "ndr-ib"
    """Link between nodes, as --link names the one between GPUs of a node."""
    hf: str | None = None
    """A Hugging Face config.json, or the folder that holds it, instead of the reference transformer."""
    reserve_gib: float = hardware.RESERVE_GIB
    """GPU memory that is not the step's: CUDA's context, NCCL's buffers, what the allocator cannot give out again."""
    tokens: float = 0.0
    """Tokens to train on, such as 2e12: adds days, GPU-hours and, with --price, the cost."""
    price: float = 0.0
    """Price of a GPU-hour."""
    fit: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """Numbers of GPUs: for each, and for micro-batches of 1 to 32, the least recomputation with which --batch x
    --grad-accum x --gpus sequences a step fit."""
    best: bool = False
    """The fastest plan that fits, for the same sequences a step, and the front of memory against time."""
    what_if: Annotated[tuple[str, ...], arg(metavar="FLAG VALUE ...")] = ()
    """A flag of main.py, gpu, gpus or nodes, and the values that it shall have in turn, such as seqlen 2048 4096."""
    plot: str | None = None
    """With --best: a .png or .svg of memory against time. Needs matplotlib."""
    exact: bool = False
    """Peak memory from generated code instead, in a minute. Needs torch and Triton; not for --hf."""
    calibrate: str | None = None
    """JSONL file of main.py's rows: fits the constants of --gpu to seven of them and says how far off the others
    are. Of rows of benchmarks.exposed: to the steps without links, and says how far off those with links are."""


def parse(argv: Sequence[str]) -> tuple[Plan, list[str]]:
    """Its own flags of a command line, and main.py's, still as words. Ends the process with exit code 2 and one line
    for a bad one."""
    own, others = parse_beside(Plan, (flags.Training, flags.System, flags.Output), argv, "plan.py", __doc__)
    return checked(own), others


def checked(own: Plan) -> Plan:
    """Ends the process with exit code 2 and one line for a number that is none of these flags."""
    for name, low in (("gpus", 1), ("nodes", 1), ("reserve_gib", 0), ("tokens", 0), ("price", 0)):
        if not low <= getattr(own, name) < 1e18:
            fail(f"{flag(name)} {getattr(own, name)}: must be at least {low}", 0)
    return own


def question(own: Plan, words: Sequence[str]) -> search.Question:
    """words: the flags of main.py. ValueError, one line, for flags that do not fit together."""
    c, gpu, ranks = flags.parse(words), hardware.gpu(own.gpu), own.gpus * own.nodes
    if c.world:
        raise ValueError(f"--world {c.world}: say --gpus and --nodes instead")
    if own.gpu == "cpu":
        raise ValueError("--gpu cpu: is for --calibrate with rows of benchmarks.exposed; name a GPU")
    planned = dict(wrapper="simple", compile="fwdbwd", min_shard_mib=0.0, cuda_graph=False, keep_last=False)
    planned |= dict(ahead=min(c.ahead, 1.0))
    if wrong := next((name for name, value in planned.items() if getattr(c, name) != value), None):
        value = f" {getattr(c, wrong)}" * (wrong not in ("cuda_graph", "keep_last"))
        raise ValueError(f"{flag(wrong)}{value}: is not planned; leave it out, or python -m trainer.profiling.peak")
    if c.param_dtype == "fp32":
        raise ValueError("--param-dtype fp32: rates and peaks are known of bf16 alone; leave it out")
    if own.hf:
        a = read(own.hf)
        c = flags.filled(c, "cuda").on(ranks)
        if c.effective_batch != ranks * c.batch * c.grad_accum:
            raise ValueError(f"--effective-batch {c.effective_batch}: must be GPUs x --batch x --grad-accum")
        plain = SimpleNamespace(**(c.flat() | dict(depth=a.depth, width=a.width, head_dim=a.head_dim, vocab=a.vocab)))
    else:
        c = flags.resolve(c, "cuda", ranks)
        plain, a = SimpleNamespace(**c.flat()), reference(c)
    if problem := search.misfit(plain, a, ranks):
        raise ValueError(problem)
    inside = link(c.link if any(word.startswith("--link") for word in words) else gpu.link)
    return search.Question(plain, a, gpu, ranks, own.gpus, inside, link(own.across))


def sweep(own: Plan, words: list[str]) -> list[str]:
    """The lines of --what-if. ValueError for a flag or value that there is not."""
    name, *values = own.what_if
    name = name.lstrip("-").replace("-", "_")
    sizes, others = (
        {"gpu": str, "gpus": int, "nodes": int},
        get_type_hints(flags.Training) | get_type_hints(flags.System),
    )
    if not values or name not in sizes | others:
        raise ValueError(
            f"--what-if {' '.join(own.what_if)}: name a flag of main.py, gpu, gpus or nodes, and its values"
        )
    lines = [report.HEADING]
    for text in values:
        if problem := explain([flag(name), text], sizes | others):
            raise ValueError(problem)
        if name in sizes:
            q = question(checked(replace(own, **{name: sizes[name](text)})), words)
        else:
            q = question(own, [*words, flag(name), text])
        lines.append(report.line(f"{name} {text}", q.answer(), q, own.reserve_gib))
    return lines


def fit(own: Plan, q: search.Question) -> list[str]:
    """The lines of --fit. ValueError if no number of GPUs divides the sequences of a step."""
    sequences = q.ranks * q.c.batch * q.c.grad_accum
    limit = q.gpu.memory - own.reserve_gib * 2**30
    asked = [n for n in own.fit if n > 0 and sequences % n == 0]
    if len(asked) < len(own.fit):
        wrong = next(n for n in own.fit if n not in asked)
        raise ValueError(
            f"--fit {wrong}: must divide the {sequences} sequences of a step (--gpus x --batch x --grad-accum)"
        )
    return report.fit_lines(search.fit_table(q, own.fit, (1, 2, 4, 8, 16, 32), sequences, limit), sequences)


def exact(own: Plan, q: search.Question, words: list[str]) -> int:
    """Runs trainer.profiling.peak on the flags of main.py; returns its exit code."""
    if own.hf:
        raise ValueError("--exact: simulates the reference transformer; leave out --hf")
    command = [sys.executable, "-m", "trainer.profiling.peak", "--world", str(q.ranks), "--arch", q.gpu.arch, *words]
    return subprocess.run(command).returncode


def main(argv: list[str]) -> int:
    """Prints the answer; returns the exit code. What cannot be planned ends in one line and SystemExit(2)."""
    own, words = parse(argv)
    try:
        if own.calibrate:
            return report.calibrated(own.calibrate, hardware.gpu(own.gpu))
        q = question(own, words)
        if own.exact:
            return exact(own, q, words)
        if own.fit:
            lines = fit(own, q)
        elif own.best:
            lines = report.best_lines(q, own.reserve_gib, own.plot)
        elif own.what_if:
            lines = sweep(own, words)
        else:
            lines = report.whole(q, own.reserve_gib, own.tokens, own.price)
    except ValueError as error:
        fail(str(error), 0)
    for text in [*lines, *report.honesty(q)]:
        tell(text)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main(sys.argv[1:]))
