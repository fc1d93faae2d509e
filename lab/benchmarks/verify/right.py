"""1. Right: the wrapper beside FSDP2, DDP and one process; a checkpoint on fewer ranks; faults that must end a run."""

import json
import math
import tempfile
from pathlib import Path

from lab.benchmarks.verify.machine import Machine, Verdict, judged


def flags(m: Machine, n: int, *more: str) -> str:
    """Of the tiny model on n ranks, whose step has the same sequences on any number of them."""
    own = m.settings["tiny"]
    sequences = math.lcm(own["sequences"], m.all_ranks)
    words = [own["flags"], "--device", m.kind, "--batch", f"{sequences // n}", *more]
    words += [own["cuda"]] * m.cuda + [f"--world {m.world}"] * bool(m.world)
    return " ".join(words)


def apart(a: list[float], b: list[float]) -> float:
    """The largest difference; infinite where a number is none."""
    found = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def close(m: Machine, own: dict, both: dict[str, tuple[dict, dict]], **more) -> Verdict:
    """A verdict on what was trained twice, by names; those of settings.toml's [close] have limits of their own."""
    found, figures = [], {}
    for name, (ours, theirs) in both.items():
        most = m.settings["close"].get(name, m.settings["close"][m.kind])
        loss = apart(ours["losses"], theirs["losses"])
        norm = apart(ours["norms"], theirs["norms"]) / max(theirs["norms"])
        found.append((max(loss / most["loss"], norm / most["norm"]), name, loss, norm, most))
        figures[name] = f"{loss:.1e} {norm:.1e}"
    worst, name, loss, norm, most = max(found)
    told = judged(own | more, worst <= 1, name=name, n=len(both), loss=loss, norm=norm, most_loss=most["loss"],
                  most_norm=most["norm"])  # fmt: skip
    return Verdict(told.status, told.words, **figures)


def pairs(m: Machine, own: dict) -> Verdict:
    """10 steps beside FSDP2 and DDP."""
    asked = {}
    for side in ("ours", "theirs"):
        asked |= {
            f"{side} {name}": flags(m, m.all_ranks, "--compile none", each)
            for name, each in own[side].items()
        }
    told = m.trained(m.ranks, asked)
    both = {name: (told[f"ours {name}"], told[f"theirs {name}"]) for name in own["ours"]}
    equal = [name for name, (ours, theirs) in both.items() if ours["bits"] == theirs["bits"]]
    found = close(m, own, both, equal=", ".join(equal) or "none")
    if (m.all_ranks == 2 or m.world) and not {*own["exact"]} <= {*equal}:
        found.status = "not held"
        found.words += f", expected {', '.join(own['exact'])}"
    return found


def same_loss(m: Machine, own: dict) -> Verdict:
    """Settings that must not change the loss, or the modes and numbers of ranks, beside one process."""
    if m.tiny and "compiles" in own:
        raise Verdict("not measured", "--tiny compiles nothing")
    n, eager = m.all_ranks, "--compile none"
    settings = {f"{n} ranks": eager} | own["settings"]
    if m.about["torch"] < "2.13":
        settings.pop("step", None)
    if not m.world:
        settings |= own.get("modes", {})
    if n == 2 or n % 2:
        settings.pop("hybrid_shard", None)
    told = m.trained(m.ranks, {name: flags(m, n, words) for name, words in settings.items()})
    reference = told[f"{n} ranks"]
    if not m.world:
        alone = {"1 ranks": flags(m, 1, eager)} if "modes" in own else {}
        alone = m.trained(1, alone | {"one process": flags(m, 1, eager, "--wrapper none")})
        reference = alone.pop("one process")
        told |= alone
        for fewer in range(2, n if alone else 2):
            if m.settings["tiny"]["sequences"] % fewer == 0:
                told |= m.trained(fewer, {f"{fewer} ranks": flags(m, fewer, eager)})
        if not reference["losses"][0] - reference["losses"][-1] > own["learned"]:
            raise Verdict(
                "not held", "the loss of one process hardly falls: equal losses show nothing"
            )
    return close(m, own, {name: (each, reference) for name, each in told.items()})


def faulty(m: Machine, own: dict, folder: str) -> tuple[list[str], bool]:
    """A run of 6 steps on all ranks, the last of which has a fault: its flags but those of its files, and whether it
    said what the fault was. Raises a verdict for another exit code."""
    m.needs_ranks()
    more, last = ["--compile none --steps 6 --log-every 1", own["flags"]], m.ranks - 1
    files = f"--results {folder}/whole.jsonl --save {folder}/saved --save-every 3"
    planted = dict(code=own["code"], FAULT=f"{last}:{own['fault']}")
    said = m.on_ranks(m.ranks, "main.py", *flags(m, m.ranks, *more, files).split(), **planted)
    return more, own["named"].format(rank=last) in said


def fault(m: Machine, own: dict) -> Verdict:
    """A run whose last rank has a fault must end with a code, and say what it was."""
    with tempfile.TemporaryDirectory() as folder:
        _, right = faulty(m, own, folder)
    return judged(own, right, right=right)


def logged(results: Path) -> dict[int, float]:
    """Step -> loss of the only run of a file."""
    (file,) = results.with_suffix(".steps").glob("*.jsonl")
    return {each["step"]: each["loss"] for each in map(json.loads, file.read_text().splitlines())}


def resumed(m: Machine, own: dict) -> Verdict:
    """The same, and half of the ranks go on from its checkpoint of step 3 as it did until its end."""
    with tempfile.TemporaryDirectory() as folder:
        more, right = faulty(m, own, folder)
        half, rest = m.ranks // 2, Path(folder, "rest.jsonl")
        go_on = f"--results {rest} --resume {folder}/saved/step-00000003"
        m.on_ranks(half, "main.py", *flags(m, half, *more, go_on).split())
        before, after = logged(rest.with_name("whole.jsonl")), logged(rest)
    both = sorted(before.keys() & after.keys())
    if not both:
        raise Verdict("not held", "no step was logged by both runs")
    off, most = (
        apart([before[k] for k in both], [after[k] for k in both]),
        m.settings["close"][m.kind]["loss"],
    )
    return judged(own, right and off <= most, right=right, off=off, most=most)
