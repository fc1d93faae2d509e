"""3. As predicted, 4. Fast: memory and steps beside what was planned; what to use here. 5: programs of one GPU."""

import os
import re

from lab.benchmarks.verify.machine import Machine, Verdict, beside, judged
from lab.planning import hardware
from trainer.logging import read_jsonl

SWEEP = "-m lab.sweeps.sweep {axis} --budget 450 --results {out} {small} {cuda}"


def number(pattern: str, said: str) -> float:
    """The first that a pattern finds, which may be grouped by '."""
    return float(re.search(pattern, said)[1].replace("'", ""))


def planned(m: Machine, *words: str) -> str:
    """What plan.py says for this machine; a verdict where it does not know the GPU."""
    device = re.split("[^a-z0-9]+", m.about["device"].lower())
    for name in sorted(hardware.names(), key=len, reverse=True):
        if all(any(word.startswith(part) for word in device) for part in name.split("-")):
            return m.run(["plan.py", "--gpu", name, "--gpus", str(m.ranks), *words])
    raise Verdict("not measured", f"plan.py knows no {m.about['device']}")


def peak(m: Machine, own: dict) -> Verdict:
    """The peak of generated code beside the planned one. No GPU is used."""
    flags = own["small"] if m.tiny else m.settings["reference"]["flags"]
    ranks = str(m.all_ranks)
    peaks = ["-m", "lab.profiling.peak", "--world", ranks, "--arch", m.about["arch"]]
    plans = ["plan.py", "--gpu", "h100", "--gpus", ranks]
    told = m.run([*peaks, *flags.split()])
    simulated = number(r"simulated, not measured: .*cuBLAS ([\d'.]+)", told)
    planned = number(r"(?m)^peak ([\d'.]+) MiB", m.run([*plans, *flags.split()]))
    return beside(own, simulated, planned, simulated_mib=simulated, planned_mib=planned)


def allocated(m: Machine, own: dict) -> Verdict:
    """What the allocator gave beside the simulated peak of 3.1."""
    if not m.cuda:
        raise Verdict("not measured", "there is no GPU")
    if m.tiny or "simulated_mib" not in m.verdicts.get("3.1", {}).get("figures", {}):
        raise Verdict("not run", "it needs 3.1, without --tiny")
    simulated = m.verdicts["3.1"]["figures"]["simulated_mib"]
    mib = m.row(m.settings["reference"]["flags"])["peak_alloc_mib"]
    return beside(own, mib, simulated, allocated_mib=mib, simulated_mib=simulated)


def links(m: Machine, own: dict) -> Verdict:
    """Latency and bandwidth among all ranks, fitted to collectives of several sizes."""
    m.needs_gpus()
    if m.cluster.nodes > 1:
        raise Verdict("not run", "./launch.sh nodes measures the links of several nodes")
    results = m.out / f"verify-links-{m.ranks}.jsonl"
    with m.folder() as plots:
        words = f"-m lab.studies.collectives --ranks {m.ranks} --device cuda --mb {own['sizes']}"
        m.run([*words.split(), "--results", str(results), "--plots", plots])
    row = read_jsonl(results)[-1]
    if row["outcome"] != "ok":
        raise Verdict("not run", row["outcome"])
    link = row["link"]
    within = link["gb_per_s"] is not None and link["residual"] <= own["most"]
    return judged(own, within, **link)


def step(m: Machine, own: dict) -> Verdict:
    """A step of the reference setting beside the planned one, over the links of 3.3."""
    m.needs_gpus()
    results = m.out / f"verify-links-{m.ranks}.jsonl"
    if m.cluster.nodes > 1 or not results.exists():
        raise Verdict("not run", "it needs the links of 3.3")
    flags = m.settings["reference"]["flags"]
    plan = planned(m, "--link", f"measured:{results}", *flags.split())
    ms = number(r"(?m)^step ([\d'.]+) ms", plan)
    least = m.row(flags)["step_ms_min"]
    return beside(own, ms, least, planned_ms=ms, step_ms_min=least)


def fast(m: Machine, own: dict) -> Verdict:
    """Tokens per second and MFU of our settings beside FSDP2's compiled blocks."""
    m.needs_gpus()
    flags = own["flags"]
    if "depths" in own:
        said = planned(m, *flags.split(), "--what-if", "depth", *own["depths"].split())
        fits = re.findall(r"(?m)^depth (\d+): [^,]+, yes", said)
        if not fits:
            raise Verdict("not run", f"no depth of {own['depths']} is planned to fit")
        flags += f" --depth {fits[0]}"
    rows = {more: m.row(f"{flags} {more}".strip()) for more in own["settings"].values()}
    best = min(rows, key=lambda more: rows[more]["step_ms_min"])
    theirs = "--wrapper fsdp2 --compile blocks"
    rows[theirs] = m.row(f"{flags} {theirs}")
    ratio = rows[best]["step_ms_min"] / rows[theirs]["step_ms_min"]
    keys = "step_ms", "step_ms_min", "tok_s", "mfu", "peak_alloc_mib", "peak_reserved_mib"
    figures = {more or "defaults": {key: row[key] for key in keys} for more, row in rows.items()}
    told = judged(
        own | rows[best], ratio <= own["most"], best=f"{flags} {best}".strip(), ratio=ratio
    )
    return Verdict(told.status, told.words, **figures)


def owed(m: Machine, own: dict) -> Verdict:
    """A program of one GPU, which appends rows and resumes. A sweep that leaves cells out is tried again by the next
    call."""
    if not m.world:
        raise Verdict("not run", "it needs one GPU: ./launch.sh gpu")
    if not (m.cuda or m.tiny):
        raise Verdict("not measured", "there is no GPU; --tiny rehearses it")
    if m.tiny and own.get("axis", "").startswith("gpu-"):
        raise Verdict(
            "not measured", "--tiny leaves it out: no cell of it is small enough for a CPU"
        )
    words = own.get("words", SWEEP)
    if not m.tiny:
        words += " " + own.get("full", "")
    words = words.format(
        axis=own.get("axis"),
        out=m.out / ("gpu-tiny.jsonl" if m.tiny else "gpu.jsonl"),
        folder=m.out,
        small="--small" if m.tiny else "",
        cuda="" if m.tiny else "--device cuda",
    )
    if not words:
        raise Verdict("not measured", "--tiny leaves it out")
    limit = os.environ.get("CELL_TIMEOUT", "240")
    try:
        said = m.run(words.split(), NPROC="1", CELL_TIMEOUT=limit)
    except Verdict as verdict:
        if "axis" in own:
            verdict.status = "not run"
        raise
    lines = [line for line in said.splitlines() if line.strip()] or ["nothing"]
    line = next((line for line in lines if re.match(r"\d+ cells", line)), lines[-1])
    return Verdict("not measured" if m.tiny else "held", f"it ended well: {line}")
