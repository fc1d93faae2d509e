"""3. As predicted, 4. Fast: memory and steps beside what was planned; what to use here. 5: programs of one GPU."""

import os
import re
import tempfile

from lab.benchmarks.verify.machine import Machine, Verdict, judged
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
    flags, ranks = own["small"] if m.tiny else m.settings["reference"]["flags"], str(m.all_ranks)
    said = m.run(
        ["-m", "lab.profiling.peak", "--world", ranks, "--arch", m.about["arch"], *flags.split()]
    )
    simulated = number(r"simulated, not measured: .*cuBLAS ([\d'.]+)", said)
    plan = number(
        r"(?m)^peak ([\d'.]+) MiB",
        m.run(["plan.py", "--gpu", "h100", "--gpus", ranks, *flags.split()]),
    )
    off = simulated / plan - 1
    return judged(
        own, abs(off) <= own["planned"], simulated_mib=simulated, planned_mib=plan, off=off
    )


def allocated(m: Machine, own: dict) -> Verdict:
    """What the allocator gave beside the simulated peak of 3.1."""
    if not m.cuda:
        raise Verdict("not measured", "there is no GPU")
    if m.tiny or "simulated_mib" not in m.verdicts.get("3.1", {}).get("figures", {}):
        raise Verdict("not run", "it needs 3.1, without --tiny")
    simulated = m.verdicts["3.1"]["figures"]["simulated_mib"]
    mib = m.row(m.settings["reference"]["flags"])["peak_alloc_mib"]
    off = mib / simulated - 1
    return judged(
        own, abs(off) <= own["simulated"], allocated_mib=mib, simulated_mib=simulated, off=off
    )


def links(m: Machine, own: dict) -> Verdict:
    """Latency and bandwidth among all ranks, fitted to collectives of several sizes."""
    m.needs_ranks()
    results = m.out / f"verify-links-{m.ranks}.jsonl"
    with tempfile.TemporaryDirectory() as plots:
        words = f"-m lab.studies.collectives --ranks {m.ranks} --device {m.kind} --mb {own['sizes'][m.kind]}"
        m.run([*words.split(), "--results", str(results), "--plots", plots])
    row = read_jsonl(results)[-1]
    if row["outcome"] != "ok":
        raise Verdict("not run", row["outcome"])
    link = row["link"]
    found = judged(own, link["gb_per_s"] is not None and link["residual"] <= own["most"], **link)
    if not m.cuda:
        raise Verdict(
            "not measured", f"ranks on one CPU have no links; what stands for them: {found.words}"
        )
    return found


def step(m: Machine, own: dict) -> Verdict:
    """A step of the reference setting beside the planned one, over the links of 3.3."""
    m.needs_gpus()
    flags = m.settings["reference"]["flags"]
    link = f"measured:{m.out}/verify-links-{m.ranks}.jsonl"
    plan = number(r"(?m)^step ([\d'.]+) ms", planned(m, "--link", link, *flags.split()))
    least = m.row(flags)["step_ms_min"]
    off = plan / least - 1
    return judged(own, abs(off) <= own["planned"], planned_ms=plan, step_ms_min=least, off=off)


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


def elsewhere(m: Machine, own: dict) -> Verdict:
    """What one GPU can show is not run on several."""
    raise Verdict("not run" if m.cuda else "not measured", own["said"])


def owed(m: Machine, own: dict) -> Verdict:
    """A program of one GPU, which appends rows and resumes. A sweep that leaves cells out is tried again by the next
    call."""
    if not m.world:
        raise Verdict("not run", m.settings["checks"]["5"]["said"])
    if not (m.cuda or m.tiny):
        raise Verdict("not measured", "there is no GPU; --tiny rehearses it")
    out, small, cuda = (
        m.out / f"gpu{'-tiny' * m.tiny}.jsonl",
        "--small" * m.tiny,
        "--device cuda" * (not m.tiny),
    )
    words = f"{own.get('words', SWEEP)} {own.get('full', '') * (not m.tiny)}"
    words = words.format(
        axis=own.get("axis"), out=out, folder=m.out, small=small, cuda=cuda
    ).split()
    if not words:
        raise Verdict("not measured", "--tiny leaves it out")
    try:
        said = m.run(words, NPROC="1", CELL_TIMEOUT=os.environ.get("CELL_TIMEOUT", "240"))
    except Verdict as verdict:
        if "axis" in own:
            verdict.status = "not run"
        raise
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "it ended well")
    return Verdict("not measured", f"rehearsed: {last}") if m.tiny else Verdict("held", last)
