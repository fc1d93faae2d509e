"""1. Right: the wrapper beside FSDP2, DDP and one process; a checkpoint on fewer ranks; faults that must end a run."""

import json
import math
from pathlib import Path

from lab.benchmarks.verify.machine import Machine, Verdict, judged


def flags(m: Machine, n: int, *more: str) -> str:
    """Of the tiny model on n ranks, whose step has the same sequences on any number of them."""
    own = m.settings["tiny"]
    sequences = math.lcm(own["sequences"], m.all_ranks)
    words = [own["flags"], "--device", m.kind, "--batch", str(sequences // n), *more]
    if m.cuda:
        words.append(own["cuda"])
    if m.world:
        words.append(f"--world {m.world}")
    return " ".join(words)


def apart(a: list[float], b: list[float]) -> float:
    """The largest difference; infinite where a number is none."""
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def close(m: Machine, own: dict, both: dict[str, tuple[dict, dict]], **more) -> Verdict:
    """A verdict on what was trained twice, by names; those of settings.toml's [close] have limits of their own."""
    limits = m.settings["close"]
    rows = []
    figures = {}
    for name, (ours, theirs) in both.items():
        most = limits.get(name, limits[m.kind])
        scale = max(theirs["norms"])
        loss = apart(ours["losses"], theirs["losses"])
        norm = apart(
            [norm / scale for norm in ours["norms"]],
            [norm / scale for norm in theirs["norms"]],
        )
        share = max(loss / most["loss"], norm / most["norm"])
        row = dict(
            share=share,
            name=name,
            loss=loss,
            norm=norm,
            most=most,
        )
        rows.append(row)
        figures[name] = f"{loss:.1e} {norm:.1e}"
    worst = max(rows, key=lambda row: row["share"])
    verdict = judged(own, worst["share"] <= 1, n=len(both), **worst, **more)
    verdict.figures = figures
    return verdict


def pairs(m: Machine, own: dict) -> Verdict:
    """10 steps beside FSDP2 and DDP."""
    settings = {}
    for side in ("ours", "theirs"):
        for name, words in own[side].items():
            settings[f"{side} {name}"] = flags(m, m.all_ranks, "--compile none", words)
    trained = m.trained(m.ranks, settings)
    both = {}
    equal = []
    for name in own["ours"]:
        ours = trained[f"ours {name}"]
        theirs = trained[f"theirs {name}"]
        both[name] = ours, theirs
        if ours["bits"] == theirs["bits"]:
            equal.append(name)
    verdict = close(m, own, both, equal=", ".join(equal) or "none")
    if (m.all_ranks == 2 or m.world) and not {*own["exact"]} <= {*equal}:
        verdict.status = "not held"
        verdict.words += f", expected {', '.join(own['exact'])}"
    return verdict


def settings_of(m: Machine, own: dict) -> dict[str, str]:
    """Those of a check that this torch and so many ranks can run."""
    settings = dict(own["settings"])
    if m.about["torch"] < "2.13":
        settings.pop("step", None)
    if not m.world:
        settings |= own.get("modes", {})
    if m.all_ranks == 2 or m.all_ranks % 2:
        settings.pop("hybrid_shard", None)
    return settings


def same_loss(m: Machine, own: dict) -> Verdict:
    """Settings that must not change the loss, or the modes and numbers of ranks, beside one process."""
    if m.tiny and "compiles" in own:
        raise Verdict("not measured", "--tiny compiles nothing")
    n = m.all_ranks
    eager = "--compile none"
    settings = {f"{n} ranks": flags(m, n, eager)}
    for name, words in settings_of(m, own).items():
        settings[name] = flags(m, n, words)
    trained = m.trained(m.ranks, settings)
    reference = trained[f"{n} ranks"]
    if not m.world:
        reference = with_fewer(m, trained, "modes" in own)
        if not reference["losses"][0] - reference["losses"][-1] > own["learned"]:
            why = "the loss of one process hardly falls: equal losses show nothing"
            raise Verdict("not held", why)
    return close(m, own, {name: (each, reference) for name, each in trained.items()})


def with_fewer(m: Machine, trained: dict[str, dict], numbers: bool) -> dict:
    """What one process trains without a wrapper. numbers: adds those of fewer ranks under it to `trained`."""
    eager = "--compile none"
    alone = {"one process": flags(m, 1, eager, "--wrapper none")}
    if numbers:
        alone["1 ranks"] = flags(m, 1, eager)
        for fewer in range(2, m.ranks):
            if m.settings["tiny"]["sequences"] % fewer == 0 and m.nodes_of(fewer):
                trained |= m.trained(fewer, {f"{fewer} ranks": flags(m, fewer, eager)})
    trained |= m.trained(1, alone)
    return trained.pop("one process")


def fault(m: Machine, own: dict) -> Verdict:
    """A run of 6 steps, whose last rank has a fault, must end with a code and say what the fault was. If the check has
    a tolerance, half of the ranks go on from its checkpoint of step 3, as it did until its end."""
    m.needs_ranks()
    common = f"--compile none --steps 6 --log-every 1 {own['flags']}"
    last = m.ranks - 1
    off = most = 0
    with m.folder() as folder:
        whole = Path(folder, "whole.jsonl")
        rest = Path(folder, "rest.jsonl")
        files = f"--results {whole} --save {folder}/saved --save-every 3"
        planted = f"{last}:{own['fault']}", "main.py"
        words = flags(m, m.ranks, common, files).split()
        said = m.on_ranks(m.ranks, "tests/planted.py", *planted, *words, code=own["code"])
        right = own["named"].format(rank=last) in said
        if own.get("resumes"):
            half = m.ranks // 2
            files = f"--results {rest} --resume {folder}/saved/step-00000003"
            m.on_ranks(half, "main.py", *flags(m, half, common, files).split())
            most = m.settings["close"][m.kind]["loss"]
            off = logged_apart(whole, rest)
    return judged(own, right and off <= most, right=right, off=off, most=most)


def logged_apart(*results: Path) -> float:
    """How far the losses of two runs are apart, each the only one of its file, in the steps that both logged."""
    losses = []
    for path in results:
        (file,) = path.with_suffix(".steps").glob("*.jsonl")
        of_run = {}
        for line in file.read_text().splitlines():
            step = json.loads(line)
            of_run[step["step"]] = step["loss"]
        losses.append(of_run)
    both = losses[0].keys() & losses[1].keys()
    if not both:
        raise Verdict("not held", "no step was logged by both runs")
    before, after = losses
    return apart([before[step] for step in both], [after[step] for step in both])
