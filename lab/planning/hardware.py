"""GPUs by name, from hardware.toml; and their constants fitted to measured rows. Imports no torch.

    gpu("h100").products            # FLOP/s that large products reach
    calibrate(samples, gpu("h100"))  # Fit(gpu, fitted on, errors of the others)

A sample is a setting with its measured step. The constants are few (products, memory, the shortest operation, and
attention where several kernels were measured), so that seven samples settle them; all others are there to be wrong
about.
"""

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from lab.planning.architecture import Architecture, reference
from lab.planning.liveness import Tape
from lab.planning.schedule import Step
from lab.planning.step_time import Gpu, step_time
from trainer.costs import Link, link, sent_bytes
from trainer.distributed.terminal import did_you_mean, regular

DATA, FIELD = (Path(__file__).with_name(name) for name in ("hardware.toml", "field.toml"))
# Of a GPU: CUDA's context, NCCL's buffers, what the allocator cannot give out again.
RESERVE_GIB = 3.0
MOST = 7  # samples that constants are fitted on
ALONE = " without links"


def names() -> list[str]:
    return list(tomllib.loads(DATA.read_text()))


def gpu(name: str, watts: float = 0.0) -> Gpu:
    """watts: its power limit, if it is lower than stated. ValueError, one line, for a name that hardware.toml does not
    have, or more watts than the GPU takes."""
    data = tomllib.loads(DATA.read_text())
    if name not in data:
        raise ValueError(
            f"--gpu {name}: must be one of {', '.join(data)}{did_you_mean(name, data)}"
        )
    own = data[name]
    if watts > own["watts"]:
        raise ValueError(f"--watts {watts:g}: {name} takes at most {own['watts']}; leave it out")
    like = data[own.get("like", name)]
    reached = like["reached"]
    flops = own["tflops"] / like["tflops"]
    memory = own["tb_per_s"] / like["tb_per_s"]
    watts = watts or own["watts"]  # the clock goes about as the square root of the power
    flops *= min(1.0, watts / like["watts"] / (own["tflops"] / like["tflops"])) ** 0.5
    rates = {k: tuple(1e12 * flops * v for v in pair) for k, pair in reached["attention"].items()}
    limited = watts < own["watts"]
    scaled = "" if like is own else f"rates scaled from {own.get('like', name)}, not measured"
    scaled = (
        f"rates scaled to {watts:g} of {own['watts']} W, at which no run is published"
        if limited
        else scaled
    )
    return Gpu(
        name,
        1e12 * own["tflops"],
        1e12 * flops * reached["products"],
        1e12 * memory * reached["tb_per_s"],
        2**20 * own["memory_mib"],
        own["sms"],
        rates,
        1e-6 * reached["floor_us"],
        scaled,
        own["arch"],
        own["link"],
        "" if scaled else reached.get("serial_link", ""),
        tuple(reached["error"]),
        reached["source"],
        own.get("like", name),
        limited=limited,
    )


def field_data() -> dict[str, dict]:
    """field.toml: {"constants": .., "bars": {kind: (rows, error)}, "ran": {"beyond_limit": (planned so, rows)}}."""
    return tomllib.loads(FIELD.read_text())


def field(gpu: Gpu, eager: bool, found: dict[str, float] | None = None) -> Gpu:
    """What other people's steps reach on a GPU (field.toml); `gpu` has the rates of this program's own steps on a card
    that did nothing else. eager: without a compiler, which takes kernels one by one."""
    found = found or field_data()["constants"]

    def of(what: str) -> float:
        return found.get(f"{gpu.like} {what}", 1.0)

    attention, floor = (
        (of("eager attention"), 1e-6 * found["eager floor_us"]) if eager else (1.0, gpu.floor)
    )
    rates = {
        kernel: tuple(attention * rate for rate in pair) for kernel, pair in gpu.attention.items()
    }
    return gpu._replace(
        products=of("products") * gpu.products,
        bandwidth=of("memory") * gpu.bandwidth,
        attention=rates,
        floor=floor,
        passes=found["eager passes"] if eager else 1.0,
        straggling=found["straggling"],
    )


class Sample(NamedTuple):
    """A measured step: resolved flags, ranks, link, milliseconds, architecture and the operations of a micro-batch."""

    name: str
    c: SimpleNamespace
    ranks: int
    link: Link
    ms: float
    a: Architecture
    tape: Tape


def sample(name: str, c: SimpleNamespace, ranks: int, link: Link, ms: float) -> Sample:
    """Of resolved flags of the reference transformer."""
    a = reference(c)
    return Sample(name, c, ranks, link, ms, a, Step(c, a, ranks).tape)


class Fit(NamedTuple):
    """fitted: names of the samples that the constants were fitted on. errors: predicted / measured - 1, by name."""

    gpu: Gpu
    fitted: tuple[str, ...]
    errors: dict[str, float]

    def held_out(self) -> list[float]:
        """Absolute errors of the samples that were not fitted, smallest first."""
        return sorted(abs(e) for name, e in self.errors.items() if name not in self.fitted)


def sampled(number: int, row: dict, known: Sequence[float]) -> list[Sample]:
    """The samples of a row, or none. known: milliseconds of those before."""
    f = row.get("flags") or {}
    whole = {"depth", "remat", "ahead", "link", "compile_options"} <= f.keys()
    planned = (
        whole and f["compile"] == "fwdbwd" and f["wrapper"] == "simple" and not f.get("keep_last")
    )
    if not planned or f["ahead"] > 1 or not row.get("step_ms_min"):
        return []
    one = sample(
        f"row {number}",
        SimpleNamespace(**f),
        f.get("world") or row["world"],
        link(f["link"]),
        row["step_ms_min"],
    )
    if row.get("study") != "exposed":
        return [one]
    alone = one._replace(name=f"row {number}{ALONE}", link=link("none"), ms=row["compute_ms"])
    speed = Link(0.0, 1e3 * sent(one) / row["link_ms"])
    linked = one._replace(
        name=f"row {number}, links {row['factor']:g} x", link=speed, ms=row["step_ms"]
    )
    return [linked] if alone.ms in known else [alone, linked]


def samples(path: str, device: str) -> list[Sample]:
    """The rows of a JSONL file that a step can be predicted for: --compile fwdbwd, --wrapper simple, of main.py or of
    lab.benchmarks.exposed. Of main.py's the smallest step counts, since medians hold what else the machine did; the
    others took turns with a step without links, which is a sample ALONE. ValueError, one line, if there are
    none, or if a CPU made them and `device` is a GPU."""
    try:
        rows = [json.loads(line) for line in regular(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "holds a line that is no JSON"
        raise ValueError(
            f"--calibrate {path}: {said}; name a JSONL file of main.py's rows"
        ) from error
    found: list[Sample] = []
    for number, row in enumerate(rows, 1):
        try:
            if device != "cpu" and str(row.get("device")).startswith("CPU"):
                raise ValueError("is of a CPU; say --gpu cpu")
            found += sampled(number, row, [s.ms for s in found])
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            said = error if isinstance(error, ValueError) else "is no row of main.py; leave it out"
            raise ValueError(f"--calibrate {path}: row {number} {said}") from error
    if not found:
        raise ValueError(
            f"--calibrate {path}: no row of --compile fwdbwd, --wrapper simple with a measured step"
        )
    return found


def sent(s: Sample) -> float:
    """Bytes that one rank sends in a micro-batch, in the shard group."""
    starts = [w for op in s.tape.ops for w in op.work if w[0] == "start"]
    return sum(sent_bytes(op, nbytes, s.ranks) for _, _, op, nbytes in starts)


def predicted_ms(s: Sample, gpu: Gpu) -> float:
    own = link(gpu.serial_link) if gpu.serial_link and "plain" in s.c.compile_options else s.link
    return 1e3 * step_time(s.c, s.ranks, s.a, gpu, own, tape=s.tape).seconds


def spread(found: Sequence[Sample], most: int = MOST) -> list[Sample]:
    """`most` of the samples, as unlike in time per token as there are: of all sorted by it, evenly."""
    if len(found) <= most:
        return list(found)
    ranked = sorted(found, key=lambda s: s.ms / (s.c.batch * s.c.seqlen))
    return [ranked[round(i * (len(ranked) - 1) / (most - 1))] for i in range(most)]


def calibrate(
    found: Sequence[Sample],
    start: Gpu,
    fit_on: Sequence[Sample] = (),
    predict: Callable[[Sample, Gpu], float] = predicted_ms,
) -> Fit:
    """Constants of a GPU that come nearest to the samples `fit_on` (default: those ALONE, or seven of them): coordinate
    descent on the squares of relative errors, from those of `start`, within what the device states."""
    chosen = list(fit_on) or [s for s in found if s.name.endswith(ALONE)] or spread(found)
    kernels = sorted({"flex" if s.c.attn == "flex" else "other" for s in chosen})
    names = ["products", "bandwidth", "floor", *(["flex"] if len(kernels) > 1 else []), "attention"]

    def made(x: dict[str, float]) -> Gpu:
        rates = {
            k: tuple(
                v * x["attention"] * (x.get("flex", 1.0) if k == "flex" else 1.0) for v in pair
            )
            for k, pair in start.attention.items()
        }
        return start._replace(
            products=start.products * x["products"],
            bandwidth=start.bandwidth * x["bandwidth"],
            floor=start.floor * x["floor"],
            attention=rates,
        )

    def loss(x: dict[str, float]) -> float:
        return sum((predict(s, made(x)) / s.ms - 1) ** 2 for s in chosen)

    # Less is not worth a step: it would creep for long.
    x = dict.fromkeys(names, 1.0)
    width = 0.3
    enough = 1 - 1e-6
    best = loss(x)
    while width > 0.003:
        better = False
        for name in names:
            for factor in (1 + width, 1 / (1 + width)):
                new = x | {name: x[name] * factor}
                if made(new).products <= start.peak and (score := loss(new)) < best * enough:
                    x = new
                    best = score
                    better = True
        width *= 1 if better else 0.5
    fitted = made(x)
    return Fit(
        fitted,
        tuple(s.name for s in chosen),
        {s.name: predict(s, fitted) / s.ms - 1 for s in found},
    )
