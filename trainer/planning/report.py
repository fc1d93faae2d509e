"""What a plan prints: its lines, tables and the plot. Imports no torch."""

from trainer.distributed.terminal import grouped, tell
from trainer.planning import hardware, search
from trainer.planning.schedule import Step
from trainer.planning.schedule import whole as gathers_once
from trainer.planning.search import Answer, Cell, Question
from trainer.planning.step_time import Gpu

PEAK_ERROR = 0.01, 1.9, 67  # percent, percent, rows of all drawn settings: see benchmarks.plans.PEAKS
GATED_ERROR = 2.3, 6  # percent, rows of --block llama: those of results/plan_peaks_llama.jsonl
HEADING = "plan: peak MiB, fits, ms a step, exposed ms, tokens/s, MFU %"


def mib(nbytes: float) -> str:
    return grouped(nbytes / 2**20)


def mfu(q: Question, answer: Answer) -> dict[str, float]:
    """Percent of the GPU's peak: mfu counts attention to unmasked keys, mfu_palm to all, hfu all that is multiplied."""
    c, a = answer.c, q.a
    tokens = c.batch * c.seqlen * c.grad_accum
    flops = {
        "mfu": tokens * a.flops_per_token(c.seqlen, "causal"),
        "mfu_palm": tokens * a.flops_per_token(c.seqlen, "palm"),
    }
    seen, done = a.keys(c.seqlen, "causal") / c.seqlen, 0.0
    for op in Step(c, a, q.ranks, gathers_once(c, q.ranks)).tape.ops:
        for w in op.work:
            done += 2 * w[1] * w[2] * w[3] if w[0] == "mm" else w[2] * seen if w[0] == "attention" else 0
    flops["hfu"] = done * c.grad_accum
    return {name: 100 * n / answer.time.seconds / q.gpu.peak for name, n in flops.items()}


def line(name: str, answer: Answer, q: Question, reserve_gib: float) -> str:
    fits = "yes" if answer.peak.nbytes <= q.gpu.memory - reserve_gib * 2**30 else "no"
    t = answer.time
    return (f"{name}: {mib(answer.peak.nbytes)}, {fits}, {grouped(1e3 * t.seconds, 1)}, {grouped(1e3 * t.exposed, 1)}, "
            f"{grouped(answer.tokens_per_second)}, {mfu(q, answer)['mfu']:.1f}")  # fmt: skip


def whole(q: Question, reserve_gib: float, tokens: float, price: float) -> list[str]:
    """The answer to one plan."""
    a, c, answer = q.a, q.c, q.answer()
    limit = q.gpu.memory - reserve_gib * 2**30
    text = [f"model {a.name}: {grouped(a.parameters)} parameters"]
    if a.experts:
        text[0] += f", {grouped(a.active_parameters)} active"
    text += [f"note: {a.note}"] * bool(a.note)
    text.append(f"{q.ranks} x {q.gpu.name}, {c.batch} x {grouped(c.seqlen)} tokens a rank and micro-batch, "
                f"{grouped(q.ranks * c.batch * c.grad_accum * c.seqlen)} tokens a step")  # fmt: skip
    fits = answer.peak.nbytes <= limit
    text.append(f"peak {mib(answer.peak.nbytes)} MiB: {'fits' if fits else 'DOES NOT FIT'} in {mib(limit)} "
                f"({mib(q.gpu.memory)} less {reserve_gib:g} GiB reserved), at {answer.peak.moment}")  # fmt: skip
    text += [f"  {mib(size):>10}  {piece}" for piece, size in answer.peak.pieces.items() if size >= 2**19]
    t = answer.time
    text.append(f"step {grouped(1e3 * t.seconds, 1)} ms, {grouped(answer.tokens_per_second)} tokens/s")
    text += [f"  {grouped(1e3 * s, 1):>10}  {what}" for what, s in sorted(t.parts.items(), key=lambda each: -each[1])]
    if t.exposed > t.seconds / 2:
        text.append("bound by communication")
    text.append("  ".join(f"{name} {value:.1f} %" for name, value in mfu(q, answer).items())
                + f" of {q.gpu.peak / 1e12:g} TFLOP/s")  # fmt: skip
    if tokens:
        hours = tokens / answer.tokens_per_second / 3600
        cost = f", cost {grouped(hours * q.ranks * price)}" if price else ""
        text.append(f"{tokens:g} tokens: {grouped(hours / 24, 1)} days, {grouped(hours * q.ranks)} GPU-hours{cost}")
    if not fits:
        text.append("what to turn first: MiB saved, ms lost a step, peak MiB, fits")
        for name, saved, lost, new in search.relief(q)[:8]:
            yes = "yes" if new.peak.nbytes <= limit else "no"
            text.append(f"  {name}: {mib(saved)}, {grouped(1e3 * lost, 1)}, {mib(new.peak.nbytes)}, {yes}")
        text.append("  more GPUs: --what-if gpus 2 4 8 16 32")
    return text


def fit_lines(cells: list[Cell], sequences: int) -> list[str]:
    """The table of --fit."""
    head = [
        f"least recomputation for {sequences} sequences a step; -: does not fit",
        "gpus, micro-batch, ratio, grad-accum",
    ]
    return head + [
        f"{c.ranks}, {c.micro}, {'-' if c.ratio is None else format(c.ratio, '.2f')}, {c.accum}" for c in cells
    ]


def best_lines(q: Question, reserve_gib: float, plot: str | None) -> list[str]:
    """The fastest plan and the front. ValueError for a --plot that cannot be written."""
    if plot:  # before the search
        draw([], plot)
    top, front = search.best(q, q.gpu.memory - reserve_gib * 2**30)
    if plot:
        draw(front, plot)
    text = [HEADING, line("best: " + search.label(top.c, q.c), top, q, reserve_gib)] if top else ["no plan fits"]
    text.append("front of memory against time:")
    return text + [line("  " + search.label(each.c, q.c), each, q, reserve_gib) for each in front]


def draw(front: list[Answer], path: str) -> None:
    """Memory against time of a front. ValueError, one line, where that fails."""
    try:
        from matplotlib.figure import Figure

        plot = Figure(figsize=(6, 4), layout="constrained")
        ax = plot.subplots()
        ax.step([each.peak.nbytes / 2**30 for each in front], [1e3 * each.time.seconds for each in front],
                where="post", marker="o")  # fmt: skip
        ax.set(xlabel="peak GiB of a rank, predicted", ylabel="ms a step, predicted")
        plot.savefig(path)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: {error}; name a .png or .svg in a folder that exists") from error


def honesty(q: Question) -> list[str]:
    """How far to trust an answer."""
    gpu = q.gpu
    median, worst, rows = gpu.error
    where = gpu.scaled.split()[3].rstrip(",") if gpu.scaled else gpu.name
    text = [
        f"time: predicted; where {where} was measured, {rows:g} steps that no constant was fitted on were off by "
        f"{100 * median:.1f} % (median), {100 * worst:.1f} % (worst)"
    ]
    if gpu.scaled:
        text.append(f"time: EXTRAPOLATED for {gpu.name}: {gpu.scaled}")
    if q.a.name != "reference":
        text.append(
            "EXTRAPOLATED for this architecture: peaks and times were checked on the reference transformer alone"
        )
    if q.a.gated:
        worst, rows = GATED_ERROR
        text.append(f"peak of a gated MLP: off by at most {worst} % in {rows} settings; its times were not checked")
    median, worst, rows = PEAK_ERROR
    text.append(
        f"peak: predicted; beside generated code of {rows} drawn settings it was off by {median:.2f} % (median), "
        f"{worst:.1f} % (worst). --exact simulates it"
    )
    return text


def calibrated(path: str, start: Gpu) -> int:
    """Prints the constants that fit a file's rows. ValueError for a file without such rows."""
    found = hardware.samples(path)
    fit = hardware.calibrate(found, start)
    g, errors = fit.gpu, fit.held_out()
    rates = ", ".join(f"{k} = [{f / 1e12:.3g}, {b / 1e12:.3g}]" for k, (f, b) in g.attention.items())
    tell(f"[{g.name}.reached]\nproducts = {g.products / 1e12:.4g}\ntb_per_s = {g.bandwidth / 1e12:.3g}")
    tell(f"floor_us = {1e6 * g.floor:.1f}\nattention = {{ {rates} }}")
    tell(f"fitted on {', '.join(fit.fitted)} of {path}; {len(errors)} others:")
    for name, error in fit.errors.items():
        tell(f"  {name}: {100 * error:+.1f} %{' (fitted)' * (name in fit.fitted)}")
    if errors:
        tell(f"error = [{errors[len(errors) // 2]:.3f}, {errors[-1]:.3f}, {len(errors)}]")
    return 0
