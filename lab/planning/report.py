"""What a plan prints: its lines, tables and the plot. Imports no torch."""

from lab.planning import hardware, search
from lab.planning.liveness import Peak
from lab.planning.schedule import PlannedStep, reserved
from lab.planning.search import Answer, Question, Setting
from trainer.terminal.text import grouped

# Percent, percent, rows of all drawn settings: see lab.benchmarks.planner.PEAKS.
PEAK_ERROR = 0.01, 2.7, 36
BLOCKS_ERROR = (
    2.8,
    19,
)  # percent, rows of --compile blocks in results/peaks.jsonl and plan_peaks_blocks.jsonl
GATED_ERROR = 5.3, 6  # percent, rows of --block llama: those of results/plan_peaks_llama.jsonl
NODE, RACK = 8, 72  # GPUs that one NVLink domain has, of a usual node and of an NVL72
FEW_TOKENS = 4096
SHORT = {"fits": "yes", "may fit": "may", "DOES NOT FIT": "no"}
HEADING = "plan: peak MiB, fits, ms a step, exposed ms, tokens/s, error %, MFU %, EXTRAPOLATED"


def kind_of(q: Question) -> str:
    """What an answer has in common with the published runs that say how far off it is."""
    return ", ".join(
        (
            "eager" if q.config.compile == "none" else "compiled",
            "scaled GPU" if q.gpu.scaled else "measured GPU",
            "several nodes" if q.ranks > q.per_node else "one node",
        )
    )


def reserves(q: Question, peak: Peak) -> tuple[float, float]:
    """Bytes that torch's allocator reserves: as planned, and at most (lab.benchmarks.planner.upper)."""
    planned = reserved(q.config, q.ranks, q.a, peak)
    return planned, hardware.field_data()["reserved"]["most"] * planned


def verdict(q: Question, peak: Peak, limit: float) -> str:
    """fits: with the most that the allocator may reserve; may fit: what is allocated does."""
    most = reserves(q, peak)[1]
    return "fits" if most <= limit else "may fit" if peak.nbytes <= limit else "DOES NOT FIT"


def of_one_node(q: Question) -> int:
    """GPUs of a node, if there is no such node; 0: there is."""
    most = RACK if q.gpu.name.startswith("gb") else 2 * NODE
    return min(q.per_node, q.ranks) if min(q.per_node, q.ranks) > most else 0


def unlike(q: Question) -> list[str]:
    """What an answer is about that no published run has: no error bar is known of it."""
    reasons = []
    if kind_of(q) not in hardware.field_data()["bars"]:
        reasons.append(f"this kind of answer ({kind_of(q)}): no such run is published here")
    if "counted on" in q.a.note:
        reasons.append(f"{q.a.note}: its blocks are planned as llama's")
    if q.a.experts or q.a.window:
        reasons.append("this architecture: only dense blocks with full attention were checked")
    if getattr(q.config, "lora", 0) or getattr(q.config, "optimizer", "adamw") != "adamw":
        reasons.append("LoRA, Muon and adamw8bit: no run with any is published here")
    if many := of_one_node(q):
        reasons.append(
            f"{many} GPUs of one node: none is sold with so many; say --gpus {NODE} --nodes"
        )
    return reasons


def network_decides(q: Question) -> bool:
    """Several nodes, and too few tokens a micro-batch to hide the collectives of any network."""
    return q.ranks > q.per_node and q.config.batch * q.config.seqlen <= FEW_TOKENS


def doubts(q: Question, peak: Peak | None = None) -> list[str]:
    """Why an answer is extrapolated: what no run says that stands behind its figures."""
    reasons = [f"{q.gpu.name}: {q.gpu.scaled}"] * bool(q.gpu.scaled) + unlike(q)
    if q.a.gated and kind_of(q).startswith("eager") and q.ranks <= q.per_node:
        reasons.append(
            "eager blocks with a gate on one node: published runs were slower or faster by up to a sixth"
        )
    if network_decides(q):
        reasons.append(
            f"at most {FEW_TOKENS} tokens a micro-batch over several nodes: the network decides, which is seldom stated"
        )
    if peak and reserves(q, peak)[1] > q.gpu.memory:
        reasons.append(
            "memory: so full that the allocator may free and ask again, which costs time that is not planned"
        )
    return reasons


def mib(nbytes: float) -> str:
    return grouped(nbytes / 2**20)


def small(value: float) -> str:
    """A number of which at least two digits are seen: 5'888, 15.3, 0.36."""
    return grouped(value, 0 if value >= 100 else 1 if value >= 10 else 2)


def mfu(q: Question, answer: Answer) -> dict[str, float]:
    """Percent of the GPU's peak: mfu counts attention to unmasked keys, mfu_palm to all, hfu all that is multiplied."""
    config = answer.config
    a = q.a
    tokens = config.batch * config.seqlen * config.grad_accum
    frozen = 2 * tokens * a.multiplied if getattr(config, "lora", 0) else 0  # has no gradient
    flops = {
        "mfu": tokens * a.flops_per_token(config.seqlen, "causal") - frozen,
        "mfu_palm": tokens * a.flops_per_token(config.seqlen, "palm") - frozen,
    }
    seen = a.keys(config.seqlen, "causal") / config.seqlen
    done = 0.0
    tape = q.tape if config is q.config else PlannedStep(config, a, q.ranks).tape
    for op in tape.ops:
        for w in op.work:
            done += (
                2 * w[1] * w[2] * w[3]
                if w[0] == "mm"
                else w[2] * seen
                if w[0] == "attention"
                else 0
            )
    flops["hfu"] = done * config.grad_accum
    return {name: 100 * n / answer.time.seconds / q.gpu.peak for name, n in flops.items()}


def line(name: str, answer: Answer, q: Question, reserve_gib: float) -> str:
    fits = SHORT[verdict(q, answer.peak, q.gpu.memory - reserve_gib * 2**30)]
    t = answer.time
    error = bar(q)
    within = f"+-{100 * error[1]:.0f}" if error else "not known"
    return (
        f"{name}: {mib(answer.peak.nbytes)}, {fits}, {grouped(1e3 * t.seconds, 1)}, {grouped(1e3 * t.exposed, 1)}, "
        f"{grouped(answer.tokens_per_second)}, {within}, {mfu(q, answer)['mfu']:.1f}, "
        f"{'yes' if doubts(q, answer.peak) else 'no'}"
    )


def whole(q: Question, reserve_gib: float, tokens: float, price: float) -> list[str]:
    """The answer to one plan."""
    a = q.a
    config = q.config
    answer = q.answer()
    limit = q.gpu.memory - reserve_gib * 2**30
    text = [f"model {a.name}: {grouped(a.parameters)} parameters"]
    if a.experts:
        text[0] += f", {grouped(a.active_parameters)} active"
    text += [f"note: {a.note}"] * bool(a.note)
    text.append(
        f"{q.ranks} x {q.gpu.name}, {config.batch} x {grouped(config.seqlen)} tokens a rank and micro-batch, "
        f"{grouped(q.ranks * config.batch * config.grad_accum * config.seqlen)} tokens a step"
    )
    fits = verdict(q, answer.peak, limit)
    text.append(
        f"peak {mib(answer.peak.nbytes)} MiB: {fits} in {mib(limit)} MiB "
        f"({mib(q.gpu.memory)} minus {reserve_gib:g} GiB kept free); reached during: {answer.peak.moment}"
    )
    if limit < answer.peak.nbytes <= q.gpu.memory:
        beyond, rows = hardware.field_data()["ran"]["beyond_limit"]
        text.append(
            f"that is within the reserve, which is an allowance: {beyond} of {rows} published runs, "
            "all of which ran, is planned as close to the memory"
        )
    text += [
        f"  {mib(size):>10}  {piece}" for piece, size in answer.peak.pieces.items() if size >= 2**19
    ]
    t = answer.time
    measured = hardware.field_data()["reserved"]
    low, high = reserves(q, answer.peak)
    text.append(
        f"reserved {mib(low)} to {mib(high)} MiB by torch's allocator (the peak is what is allocated): "
        f"{measured['above']} of {measured['runs']} measured runs took more, {measured['below']} less"
    )
    within = ""
    if error := bar(q):
        low, high = (answer.tokens_per_second / (1 + sign * error[1]) for sign in (1, -1))
        within = f" ({grouped(low)} to {grouped(high)})"
    text.append(
        f"step {grouped(1e3 * t.seconds, 1)} ms, {grouped(answer.tokens_per_second)} tokens/s{within}"
    )
    text += [
        f"  {grouped(1e3 * s, 1):>10}  {what}"
        for what, s in sorted(t.parts.items(), key=lambda each: -each[1])
    ]
    if t.exposed > t.seconds / 2:
        text.append("bound by communication")
    text.append(
        "  ".join(f"{name} {value:.1f} %" for name, value in mfu(q, answer).items())
        + f" of {q.gpu.peak / 1e12:g} TFLOP/s"
    )
    if tokens:
        hours = tokens / answer.tokens_per_second / 3600
        bill = f", cost {small(hours * q.ranks * price)}" if price else ""
        lasts = f"{small(hours / 24)} days" if hours > 48 else f"{small(hours)} hours"
        text.append(
            f"{search.written(tokens)} tokens: {lasts}, {small(hours * q.ranks)} GPU-hours{bill}"
        )
    if fits == "DOES NOT FIT":
        text.append(
            "flags that lower the peak, cheapest first: MiB saved, ms lost a step, peak MiB, fits"
        )
        for name, saved, lost, new in search.relief(q)[:8]:
            yes = SHORT[verdict(q, new.peak, limit)]
            text.append(
                f"  {name}: {mib(saved)}, {grouped(1e3 * lost, 1)}, {mib(new.peak.nbytes)}, {yes}"
            )
        whole = q.per_node >= NODE
        text.append(f"  more GPUs: --what-if {'nodes 2 4 8 16' if whole else 'gpus 2 4 8'}")
    return text


def fit_lines(settings: list[Setting], sequences: int) -> list[str]:
    """The table of --fit."""
    head = [
        f"least recomputation for {sequences} sequences a step, by what is allocated: may fit; -: does not",
        "gpus, micro-batch, ratio, grad-accum",
    ]
    ratios = ["-" if each.ratio is None else format(each.ratio, ".2f") for each in settings]
    return head + [
        f"{each.ranks}, {each.micro}, {ratio}, {each.accum}"
        for each, ratio in zip(settings, ratios, strict=True)
    ]


def best_lines(q: Question, reserve_gib: float, plot: str | None) -> list[str]:
    """The fastest plan and the front. ValueError for a --plot that cannot be written."""
    peak = q.peak()
    planned, most = reserves(q, peak)
    limit = (q.gpu.memory - reserve_gib * 2**30) * planned / most - (planned - peak.nbytes)
    if plot:  # before the search
        draw([], plot, limit)
    top, front = search.best(q, limit)
    if plot:
        draw(front, plot, limit)
    text = (
        [HEADING, line("best: " + search.label(top.config, q.config), top, q, reserve_gib)]
        if top
        else ["no plan fits with what the allocator may reserve"]
    )
    text.append("front of memory against time:")
    return text + [
        line("  " + search.label(each.config, q.config), each, q, reserve_gib) for each in front
    ]


def draw(front: list[Answer], path: str, limit: float) -> None:
    """Memory against time of a front, with a line at the bytes that fit. ValueError, one line, where that fails."""
    try:
        from matplotlib.figure import Figure

        plot = Figure(figsize=(6, 4), layout="constrained")
        ax = plot.subplots()
        ax.step(
            [each.peak.nbytes / 2**20 for each in front],
            [1e3 * each.time.seconds for each in front],
            where="post",
            marker="o",
            color="black",
            label="no plan needs less memory and less time",
        )
        ax.axvline(limit / 2**20, linestyle="--", color="0.5", label=f"what fits: {mib(limit)} MiB")
        ax.set(xlabel="peak MiB of a rank, predicted", ylabel="ms a step, predicted")
        ax.legend()
        plot.savefig(path)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"--plot {path}: {error}; name a .png or .svg in a folder that exists"
        ) from error


def bar(q: Question) -> tuple[int, float] | None:
    """(published runs of this kind, error that 85 % of them keep within, as a fraction). None: no run is of this
    kind."""
    return None if q.gpu.limited or unlike(q) else hardware.field_data()["bars"].get(kind_of(q))


def error_notes(q: Question, single: bool = True) -> list[str]:
    """How far to trust an answer. single: to q alone, whose memory counts; tables say it of each line."""
    text = [
        "time: predicted; extrapolated: there is no error bar, since no published run is of this kind"
    ]
    if error := bar(q):
        text = [
            f"time: predicted; of {error[0]} published runs ({kind_of(q)}), and of all {kind_of(q).split(',')[0]} "
            f"ones, 85 % were within {100 * error[1]:.0f} %, by constants fitted without their publication"
        ]
    text += [f"EXTRAPOLATED for {doubt}" for doubt in doubts(q, q.peak() if single else None)]
    return [*text, peak_error(q)]


def peak_error(q: Question) -> str:
    """How far to trust the peak: only compiled steps with AdamW were compared with generated code."""
    config = q.config
    others = [
        getattr(config, "lora", 0),
        getattr(config, "remat_ops", False),
        getattr(config, "remat_keep", "none") != "none",
        "plain" in config.compile_options,
        getattr(config, "logits", "auto") == "fp32",
        getattr(config, "master_dtype", "fp32") != "fp32",
        getattr(config, "optimizer", "adamw") != "adamw",
        q.a.experts,
        q.a.note,
    ]
    if config.compile == "none" or any(others):
        return "peak: predicted; for such a step it was never compared with generated code (docs/planner.md)"
    if config.compile == "blocks":
        worst, rows = BLOCKS_ERROR
        return (
            f"peak: predicted; beside generated code of {rows} settings of compiled blocks it was off by at most "
            f"{worst} %. --exact simulates it"
        )
    if q.a.gated:
        worst, rows = GATED_ERROR
        return f"peak: predicted; with a gated MLP it was off by at most {worst} % in {rows} settings of generated code"
    median, worst, rows = PEAK_ERROR
    return (
        f"peak: predicted; beside generated code of {rows} settings drawn over all options of the reference "
        f"transformer it was off by {median:.2f} % (median), {worst:.1f} % (worst). --exact simulates it"
    )
