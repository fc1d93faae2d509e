"""What plan.py is asked, and plans compared: what fits, what is fastest, what lowers memory first. Imports no torch.

    question(*parse(["--gpu", "h100", "--gpus", "8"]))      # a Question
    question = Question(c, architecture, gpu("h100"), ranks=8, per_node=8)
    question.answer()                      # Answer(config, ranks, peak, time)
    best(question, limit), relief(question, limit), fit_table(...)

A plan's flags are varied in copies of a SimpleNamespace of resolved flags; which of them go together is what config.py
says.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple

from tyro.conf import OmitArgPrefixes, arg

from lab.planning import hardware
from lab.planning.architecture import MOST_BLOCKS, read
from lab.planning.liveness import Peak, Tape
from lab.planning.schedule import PlannedStep, step_peak
from lab.planning.step_time import SLOWEST, Gpu, Node, Time, step_time
from lab.report.runs import front
from trainer import config as flags
from trainer.collective_time import Link, link
from trainer.step_costs import Architecture, reference
from trainer.terminal.command_line import as_given, flag, parse_known
from trainer.terminal.output import fail

GRID = [round(0.05 * i, 2) for i in range(21)]  # of --remat-ratio
FASTER_FIRST = [  # what lowers memory, about from cheap to dear
    dict(adam_dtype="bf16"),
    dict(ahead=0.05),
    dict(reshard=True),
    dict(mode="fully_shard"),
    dict(accum_sync="every"),
    dict(remat="pointwise"),
    dict(remat="mlp"),
    dict(remat="both"),
    dict(remat="block"),
    dict(loss="chunked"),
    dict(mlp="lean"),
    dict(mlp="lean", mlp_chunk=4096),
    dict(remat="block", mlp="lean", loss="chunked"),
    dict(remat="block", remat_core=True, mlp="lean", mlp_chunk=4096, loss="chunked", ahead=0.05),
]


class Answer(NamedTuple):
    config: SimpleNamespace
    ranks: int
    peak: Peak
    time: Time

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return (
            self.ranks
            * self.config.batch
            * self.config.grad_accum
            * self.config.seqlen
            / self.time.seconds
        )


@dataclass(frozen=True)
class Question:
    """config: resolved flags. inside, across: links between GPUs of a node and between nodes; per_node: GPUs of a
    node."""

    config: SimpleNamespace
    a: Architecture
    gpu: Gpu
    ranks: int
    per_node: int
    inside: Link
    across: Link

    def with_flags(self, **changed) -> "Question":
        return replace(self, config=SimpleNamespace(**(vars(self.config) | changed)))

    @cached_property
    def tape(self) -> Tape:
        return PlannedStep(self.config, self.a, self.ranks).tape

    @cached_property
    def highest(self) -> Peak:
        return step_peak(self.config, self.ranks, self.a, self.gpu.arch, self.tape)

    def peak(self) -> Peak:
        return self.highest

    def shared(self) -> Link:
        """Of a GPU to the same GPU of other nodes: its part of the node's ports."""
        port = self.across
        return (
            port._replace(bytes_per_s=port.bytes_per_s * port.ports / self.per_node)
            if port.ports
            else port
        )

    def ring(self, inside: Link) -> Link:
        """Of a ring through all GPUs of several nodes: it enters and leaves a node once, through all of its ports."""
        node = self.shared().bytes_per_s * self.per_node
        return Link(max(inside.latency_s, self.across.latency_s), min(inside.bytes_per_s, node))

    def answer(self) -> Answer:
        """Peak and time."""
        return Answer(self.config, self.ranks, self.peak(), self.time(self.tape))

    def time(self, tape: Tape) -> Time:
        """Of the step of a tape, with the links that the ranks of a group have between them."""
        inside = self.inside
        if self.gpu.serial_link and "plain" in self.config.compile_options:
            inside = link(self.gpu.serial_link)
        group = (
            self.ranks // self.config.replicas if self.config.mode == "hybrid_shard" else self.ranks
        )
        across = (
            inside
            if self.ranks <= self.per_node
            else self.ring(inside)
            if group == self.ranks
            else self.shared()
        )
        node = Node(self.per_node, inside, self.shared())
        if group > self.per_node:
            inside = self.ring(inside)
        time = step_time(self.config, self.ranks, self.a, self.gpu, inside, across, tape, node)
        late = time.seconds * self.gpu.straggling * math.log2(max(self.ranks / self.per_node, 1))
        return Time(time.seconds + late, time.parts | {SLOWEST: late} if late else time.parts)


def misfit(config: SimpleNamespace, a: Architecture, ranks: int) -> str | None:
    """Why flags do not go together, or None: the rules of config.py that a plan can break, and those of an
    architecture."""
    if config.mode == "hybrid_shard" and ranks % config.replicas:
        return f"--replicas {config.replicas}: must divide the {ranks} GPUs"
    if config.ahead != 1 and config.compile in ("none", "blocks"):
        return f"--ahead {written(config.ahead)}: needs --compile fwdbwd"
    if config.mlp == "lean" and (a.gated or a.experts):
        return "--mlp lean: computes LayerNorm, up, GELU and down, which is not what this MLP computes; use --mlp plain"
    if config.mlp == "lean" and config.remat == "pointwise":
        return "--mlp lean: recomputes what --remat pointwise saves; leave one of them out"
    if getattr(config, "remat_ops", False) and (config.remat != "block" or config.remat_core):
        return "--remat-ops: needs --remat block without --remat-core"
    if getattr(config, "remat_keep", "none") != "none" and config.remat != "block":
        return f"--remat-keep {config.remat_keep}: needs --remat block"
    lora = getattr(config, "lora", 0)
    if getattr(config, "optimizer", "adamw") == "adamw8bit":
        if config.adam_dtype != "fp32":
            return "--adam-dtype bf16: not with --optimizer adamw8bit; leave one of them out"
        if uneven := [size for size in (a.width, a.hidden, a.heads * a.head_dim) if size % 256]:
            return (
                f"--optimizer adamw8bit: can be planned only for rows of a multiple of 256 elements, not {uneven[0]}; "
                "use --optimizer adamw"
            )
    if lora and (config.mlp == "lean" or getattr(config, "optimizer", "adamw") != "adamw"):
        return f"--lora {lora}: can be planned only with --mlp plain and --optimizer adamw"
    if lora and getattr(config, "lora_targets", usual := ("all-linear",)) != usual:
        return f"--lora-targets {' '.join(config.lora_targets)}: a plan has adapters on all linear layers; leave it out"
    if getattr(config, "lora_modules_to_save", ()):
        return "--lora-modules-to-save: cannot be planned, since only adapters are counted as trained; leave it out"
    if lora > min(a.width, a.hidden):
        return f"--lora {lora}: must be at most {min(a.width, a.hidden)}, the smallest side of a matrix"
    if config.mlp_chunk and config.mlp != "lean":
        return f"--mlp-chunk {config.mlp_chunk}: needs --mlp lean"
    if config.remat_core and config.remat not in ("attn", "both", "block"):
        other = f"has no effect with --remat {config.remat}"
        return f"--remat-core: {other}; use --remat attn, both or block, or leave it out"
    return None


def label(config: SimpleNamespace, usual: SimpleNamespace) -> str:
    """The flags by which `config` differs from `usual`."""
    before = vars(usual)
    changed = {
        name: value
        for name, value in flags.used(vars(config)).items()
        if value not in (None, before[name])
    }
    return " ".join(as_given(name, value) for name, value in changed.items()) or "as asked"


def relief(q: Question) -> list[tuple[str, float, float, Answer]]:
    """What lowers the peak of a plan: (flags, bytes saved, seconds lost, answer), least time lost for a byte saved
    first."""
    now = q.answer()
    gains = []
    options = [*FASTER_FIRST]
    if q.config.batch % 2 == 0:
        options.append(dict(batch=q.config.batch // 2, grad_accum=2 * q.config.grad_accum))
    for changed in options:
        new = q.with_flags(**changed)
        if vars(new.config) == vars(q.config) or misfit(new.config, q.a, q.ranks):
            continue
        answer = new.answer()
        saved = now.peak.nbytes - answer.peak.nbytes
        lost = answer.time.seconds - now.time.seconds
        if saved > 0:
            gains.append((label(new.config, q.config), saved, lost, answer))
    return sorted(gains, key=lambda each: max(each[2], 0) / each[1])


def plans(q: Question) -> Iterator[Question]:
    """Plans for the same global batch: mode, replicas, recomputation, loss, MLP, micro-batches, when they communicate,
    and Adam's moments."""
    sequences = q.config.batch * q.config.grad_accum
    micro = [b for b in sorted({1, 2, 4, 8, 16, 32, q.config.batch}) if sequences % b == 0]
    modes = [dict(mode="fully_shard")]
    if q.ranks > 1:
        modes.append(dict(mode="replicate"))
    if q.ranks > q.per_node and q.ranks % q.per_node == 0:
        modes.append(dict(mode="hybrid_shard", replicas=q.ranks // q.per_node))
    remats = [
        dict(remat=kind, remat_core=False, remat_ratio=1.0)
        for kind in ("none", "pointwise", "both", "block")
    ]
    mlps = [dict(mlp="plain", mlp_chunk=0)] + (
        [] if q.a.gated else [dict(mlp="lean", mlp_chunk=4096)]
    )
    for mode, remat, mlp, loss, batch in product(modes, remats, mlps, ("full", "chunked"), micro):
        accum = sequences // batch
        for sync in ("every", "last") if accum > 1 and q.ranks > 1 else ("every",):
            yield q.with_flags(
                **mode, **remat, **mlp, loss=loss, batch=batch, grad_accum=accum, accum_sync=sync
            )


def nearby(q: Question) -> Iterator[Question]:
    """Plans that differ from one in how much it recomputes, how early it gathers, or the chunks of its MLP."""
    finer = (
        [dict(remat_ratio=ratio) for ratio in (0.25, 0.5, 0.75)] if q.config.remat != "none" else []
    )
    finer += [dict(remat_core=True)] if q.config.remat in ("both", "block") else []
    finer += [dict(ahead=0.05), dict(mlp_chunk=0 if q.config.mlp_chunk else 8192)]
    for changed in finer:
        yield q.with_flags(**changed)
    if q.config.remat in ("both", "block"):
        yield q.with_flags(remat_core=True, ahead=0.05)


class Estimate(NamedTuple):
    """What a plan takes, and the plan, or its answer."""

    nbytes: float
    seconds: float
    q: "Question | Answer"


def estimate(q: Question) -> Estimate:
    """Of a deep model from two shallow ones: blocks are alike, so both figures grow by the same for each."""
    deep = q.a.depth
    few = (4, 8)
    if deep <= 2 * few[1]:
        answer = q.answer()
        return Estimate(answer.peak.nbytes, answer.time.seconds, q)
    shallow = [replace(q, a=replace(q.a, depth=d)).with_flags(depth=d).answer() for d in few]
    low, high = (Estimate(each.peak.nbytes, each.time.seconds, q) for each in shallow)
    grown = (deep - few[0]) / (few[1] - few[0])
    return Estimate(*(x + grown * (y - x) for x, y in zip(low[:2], high[:2], strict=True)), q)


def best(q: Question, limit: float) -> tuple[Answer | None, list[Answer]]:
    """The fastest plan whose peak is at most `limit` bytes (None: there is none), and the front. With fp32 moments and
    with bf16: first a grid, then what is near the best of it."""
    wide = [
        q.with_flags(adam_dtype=dtype) for dtype in dict.fromkeys((q.config.adam_dtype, "bf16"))
    ]
    estimates = [
        estimate(plan)
        for each in wide
        for plan in plans(each)
        if not misfit(plan.config, q.a, q.ranks)
    ]
    top = sorted(
        (each for each in estimates if each.nbytes <= limit), key=lambda each: each.seconds
    )[:3]
    for each in [*front(estimates), *top]:
        estimates += [
            estimate(plan) for plan in nearby(each.q) if not misfit(plan.config, q.a, q.ranks)
        ]
    exact = {id(each): each.q.answer() for each in front(estimates)}
    fitting = sorted(
        (each for each in estimates if each.nbytes <= 1.02 * limit), key=lambda each: each.seconds
    )
    answers = (exact.get(id(each)) or each.q.answer() for each in fitting[:12])
    fastest = next((answer for answer in answers if answer.peak.nbytes <= limit), None)
    shown = [
        Estimate(each.peak.nbytes, each.time.seconds, each)
        for each in (*exact.values(), fastest)
        if each
    ]
    return fastest, [each.q for each in front(shown)]


def least(
    grid: Sequence[float], fits: Callable[[float], bool | None], first: float | None = None
) -> float | None:
    """The least value of an ascending grid that fits, if all above one that fits do, too; else None. It is looked for
    by halves; with `first` from the least value that is not below it on, in growing steps and then by halves.
    fits(value) None: not known, ends the search."""
    low = 0
    high = len(grid)
    step = high if first is None else 1
    at = high // 2
    if first is not None:
        at = next((i for i, value in enumerate(grid) if value >= first), high - 1)
    while low < high:
        at = at if low <= at < high else (low + high) // 2
        yes = fits(grid[at])
        if yes is None:
            return None
        low, high, at = (low, at, at - step) if yes else (at + 1, high, at + step)
        step *= 2
    return grid[low] if low < len(grid) else None


class Setting(NamedTuple):
    ranks: int
    micro: int
    ratio: float | None  # the least fraction of recomputed blocks that fits; None: none does
    accum: int
    # At that fraction, or at 1 where none fits. None: not planned.
    question: Question | None = None


def fit_table(
    q: Question, gpus: Sequence[int], micro: Sequence[int], sequences: int, limit: float
) -> list[Setting]:
    """For every number of GPUs and sequences of a micro-batch that divide the `sequences` of a step: the least
    recomputation, on a grid of 0.05, with which a step fits into `limit` bytes, and the accumulation that follows."""
    settings = []
    for ranks, batch in product(gpus, micro):
        if sequences % (ranks * batch):
            continue
        accum = sequences // (ranks * batch)
        asked = replace(q.with_flags(batch=batch, grad_accum=accum), ranks=ranks)
        asked = asked if asked.config.remat != "none" else asked.with_flags(remat="block")
        at = {ratio: asked.with_flags(remat_ratio=ratio) for ratio in GRID}
        ratio = least(GRID, lambda ratio, at=at: at[ratio].peak().nbytes <= limit)
        settings.append(Setting(ranks, batch, ratio, accum, at[1.0 if ratio is None else ratio]))
    return settings


@dataclass(frozen=True)
class Plan:
    """All other flags are main.py's: python main.py --help lists them."""

    gpu: str = "h100"
    """Kind of GPU, by its name in lab/planning/hardware.toml, such as a100-80, h100, h200 or l40s."""
    watts: float = 0.0
    """Power limit of each GPU in watts, if it is below the maker's. 0: the maker's."""
    gpus: int = 1
    """GPUs per node."""
    nodes: int = 1
    """Number of nodes."""
    across: str = "ndr-ib"
    """Network between nodes: a name as for --link, or LATENCY_US:GB_PER_S per GPU, or LATENCY_US:8x50 for a node with 8
    ports of 50 GB/s each. ndr-ib and hdr-ib have one port per GPU, as a DGX H100 and a DGX A100 do."""
    hf: str | None = None
    """Plan this Hugging Face model instead of main.py's: a config.json, or its folder."""
    logits: Literal["auto", "bf16", "fp32"] = "auto"
    """fp32: the logits are stored in fp32 as well as in bf16. auto: fp32 if the step is eager, where cross_entropy
    needs it."""
    master_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which weights and gradients are stored. Adam's moments: --adam-dtype."""
    remat_ops: bool = False
    """With --remat block: save every second matrix product of a block and attention's output, as torchtitan's selective
    activation checkpointing per operation does."""
    remat_keep: Literal["none", "qkv"] = "none"
    """With --remat block: the products of a block that are saved, as checkpoint policies of others name them."""
    lora: int = 0
    """Rank of LoRA adapters on every linear layer of the blocks except experts. All other weights are frozen in the
    dtype of config.json. 0: all weights are trained."""
    reserve_gib: float = hardware.RESERVE_GIB
    """GPU memory in GiB that the step cannot use: CUDA's context, NCCL's buffers."""
    tokens: float = 0.0
    """Tokens to train on, such as 2e12. The answer then gives days, GPU-hours and, with --price, the cost."""
    price: float = 0.0
    """Price of a GPU-hour, in any currency."""
    fit: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """For each of these numbers of GPUs and for micro-batches of 1 to 32: the least recomputation that fits. The
    sequences of a step stay --batch x --grad-accum x --gpus."""
    best: bool = False
    """Search for the fastest plan that fits, with the same sequences per step, and print the Pareto front of memory
    against time."""
    what_if: Annotated[tuple[str, ...], arg(metavar="FLAG VALUE ...")] = ()
    """Plan once for each value of a flag of main.py or plan.py, such as --what-if seqlen 2048 4096."""
    plot: str | None = None
    """With --best: file (.png, .svg) for a plot of memory against time, by matplotlib."""
    exact: bool = False
    """Peak memory from the code that the compiler generates, in about a minute. Needs torch and Triton. Not with
    --hf."""


@dataclass(frozen=True)
class Both(flags.Config):
    """Those of main.py, among which a message about a flag that there is not looks for what was meant, too."""

    plan: OmitArgPrefixes[Plan]


def of_command(argv: Sequence[str]) -> list[str]:
    """The words of plan.py for those of a command that runs main.py, under torchrun or not. Of torchrun's own flags
    the numbers of processes and of nodes count (of 1:4 nodes, 4)."""
    at = next((i for i, word in enumerate(argv) if Path(word).name == "main.py"), None)
    if at is None:
        return [*argv]
    programs = re.compile(r"(.*/)?(python[\d.]*|torchrun)")
    first = next((i for i, word in enumerate(argv[:at]) if programs.fullmatch(word)), at)
    words = " ".join(argv[first:at]).replace("=", " ").split()
    names = {"nproc-per-node": "--gpus", "nnodes": "--nodes"}
    sizes = []
    for word, value in pairwise(words):
        if name := names.get(word.removeprefix("--").replace("_", "-")):
            sizes += [name, value.rpartition(":")[2]]
    return [*argv[:first], *sizes, *argv[at + 1 :]]


def parse(argv: Sequence[str], about: str = "") -> tuple[Plan, list[str]]:
    """The flags of a command line, and main.py's, still as words; the command may be one that runs main.py. Ends the
    process with exit code 2 and one line for a bad one."""
    argv = of_command(argv)
    request, others = parse_known(Plan, argv, "plan.py", about)
    for name, usage in dict(fit="--fit 8 16", what_if="--what-if seqlen 2048 4096").items():
        if flag(name) in argv and not getattr(request, name):
            fail(f"{flag(name)}: needs values after it, as {usage}", 0)
    return checked(request), others


def written(value: float | str) -> str:
    """A number as a person writes it: 1e12, 2, 0.25, and 123456789, of which 1.23457e8 would lose digits."""
    if isinstance(value, str) or not abs(value) < 1e18:
        return str(value)[:50]
    short = f"{value:g}"
    return re.sub(r"e\+0*", "e", short if float(short) == value else f"{value:.12g}")


def check_range(name: str, values: Iterable[float], low: int, limit: str) -> None:
    """Ends the process with exit code 2 and one line for a value of a flag below `low`, or not below `limit`."""
    for value in values:
        if not low <= value < float(limit):
            wanted = f"at least {low}" if value < low else f"a number below {limit}"
            fail(f"{flag(name)} {written(value)}: must be {wanted}", 0)


def checked(request: Plan) -> Plan:
    """Ends the process with exit code 2 and one line for a number that is none of these flags."""
    for name in ("gpus", "nodes"):
        check_range(name, (getattr(request, name),), 1, "1e18")
    for name in ("reserve_gib", "tokens", "price", "watts", "lora"):
        check_range(name, (getattr(request, name),), 0, "1e18")
    for name in ("hf", "plot"):
        if getattr(request, name) == "":
            fail(f"{flag(name)}: names no file; name one, or leave it out", 0)
    return request


UNREAD = set(
    "data eval_every steps lr warmup warmup_ratio schedule weight_decay clip nonfinite seed init".split()
) | {f.name for f in fields(flags.Output)}


def named(words: Sequence[str]) -> list[str]:
    """The fields of the flags among words."""
    return [word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]


def unread(words: Sequence[str]) -> list[str]:
    """A line on flags of main.py that no answer depends on."""
    ignored = [flag(name) for name in named(words) if name in UNREAD]
    return [f"ignored, because no part of a plan depends on it: {' '.join(ignored)}"] * bool(
        ignored
    )


def two_questions(request: Plan, words: Sequence[str]) -> str | None:
    """Why flags of plan.py do not go together, or None."""
    kinds = [name for name in ("exact", "fit", "best", "what_if") if getattr(request, name)]
    if len(kinds) > 1:
        return f"{flag(kinds[0])} and {flag(kinds[1])}: cannot be combined; give one of them"
    single = not kinds
    for name, wanted, reason in (
        ("plot", request.best, "--best"),
        ("price", request.tokens, "--tokens"),
        ("tokens", single, "a single plan, so leave out --fit, --best and --what-if"),
    ):
        if (value := getattr(request, name)) and not wanted:
            return f"{flag(name)} {written(value)}: needs {reason}"
    shape = {f.name for f in fields(flags.Shape)}
    if request.hf and (wrong := next((name for name in named(words) if name in shape), None)):
        return f"{flag(wrong)}: the shape comes from --hf {request.hf}; leave one of them out"
    return None


def question(request: Plan, words: Sequence[str]) -> Question:
    """words: the flags of main.py. ValueError, one line, for flags that do not fit together."""
    config = flags.parse(words, kind=Both, prog="plan.py")
    config = flags.Config(config.training, config.system, config.output)
    ranks = request.gpus * request.nodes
    if config.world and ranks > 1:
        raise ValueError(
            f"--world {config.world}: --gpus x --nodes already gives {ranks} ranks; leave --world out"
        )
    if config.world:
        request = replace(request, gpus=config.world)
        ranks = config.world
        config = replace(config, system=replace(config.system, world=None))
    gpu = hardware.field(hardware.gpu(request.gpu, request.watts), config.compile == "none")
    if request.reserve_gib * 2**30 >= gpu.memory:
        raise ValueError(
            f"--reserve-gib {request.reserve_gib:g}: must be below the {gpu.memory / 2**30:.1f} GiB of {request.gpu}"
        )
    compiled = config.compile if config.compile in ("none", "blocks") else "fwdbwd"
    wrapper = "fsdp2" if config.wrapper == "fsdp2" and compiled != "fwdbwd" else "simple"
    planned = dict(
        wrapper=wrapper,
        compile=compiled,
        min_shard_mib=0.0,
        cuda_graph=False,
        keep_last=False,
        deterministic=False,
        device="auto" if config.device == "cpu" else config.device,
        ahead=min(config.ahead, 1.0),
    )
    if wrong := next(
        (name for name, value in planned.items() if getattr(config, name) != value), None
    ):
        value = getattr(config, wrong)
        value = "" if isinstance(value, bool) else f" {written(value)}"
        raise ValueError(
            f"{flag(wrong)}{value}: cannot be planned; leave it out, or run python -m lab.profiling.peak"
        )
    if config.param_dtype == "fp32":
        raise ValueError(
            "--param-dtype fp32: can be planned only in bf16, in which the GPUs were measured; leave it out"
        )
    config = flags.resolve(config, "cuda", ranks)
    if config.depth > MOST_BLOCKS:
        raise ValueError(f"--depth {config.depth}: must be at most {MOST_BLOCKS}")
    a = read(request.hf) if request.hf else reference(config)
    shape = dict(depth=a.depth, width=a.width, head_dim=a.head_dim, vocab=a.vocab)
    values = dict(
        logits=request.logits,
        master_dtype=request.master_dtype,
        lora=request.lora,
        remat_ops=request.remat_ops,
        remat_keep=request.remat_keep,
    )
    plain = SimpleNamespace(**(config.flat() | shape | values))
    if problem := misfit(plain, a, ranks):
        raise ValueError(problem)
    inside = link(config.link if any(word.startswith("--link") for word in words) else gpu.link)
    try:
        across = link(request.across, ports=True)
    except ValueError as error:
        raise ValueError(str(error).replace("--link", "--across", 1)) from None
    return Question(plain, a, gpu, ranks, request.gpus, inside, across)
