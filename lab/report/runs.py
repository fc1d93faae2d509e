"""Tables of runs, whatever their settings: all figures of each, their losses, what they send. Imports no torch.

rows, columns = runs(published.read([Path("runs/results.jsonl")]))
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from lab.report import published
from lab.report.columns import METRICS, Columns, column, outcomes, where
from lab.report.history import comparable, curves_of, learned_from, setting
from trainer import config
from trainer.terminal.command_line import as_given, flag
from trainer.terminal.text import grouped

Costly = TypeVar("Costly", bound=tuple)
# What is drawn of rows: of memory the first that any has. Key of ours, field of a Point, words for an axis.
MEMORY = (
    ("simulated_mib", "simulated peak memory"),
    ("peak_alloc_mib", "peak allocated memory"),
    ("peak_rss_mib", "peak resident memory"),
)


def loss(rows: list[dict]) -> tuple[list[dict], Columns]:
    """Runs with logged steps: what tells their settings apart, and their last losses, also on held-out data."""
    rows = comparable(rows)
    settings = [setting(row) for row in rows]
    apart = (
        [k for k in settings[0] if len({str(each.get(k)) for each in settings}) > 1] if rows else []
    )
    apart = [k for k in apart if all(k in each for each in settings)]
    columns = [("run", [row["run"] for row in rows])]
    columns += (
        [
            (name, ["" if each[name] is None else str(each[name]) for each in settings])
            for name in apart
        ]
        + where(rows)
        + outcomes(rows)
    )
    columns += [("steps", [str(published.setting(row, "steps")) for row in rows])] * (
        "steps" not in apart
    )
    for title, key in (
        ("loss", "loss"),
        ("held-out loss", "eval_loss"),
        ("bits per byte", "eval_bpb"),
    ):
        columns += column(rows, title, key, 4)
    return rows, columns


def left_out(rows: list[dict]) -> str:
    """A line that says how many runs a table of losses leaves out; empty if it has them all."""
    lessons = [learned_from(row) for row, _ in curves_of(rows)]
    others = sum(each != lessons[-1] for each in lessons)
    played = sum(map(published.simulated, rows))
    lines = [f"Left out: {others} of other data, model or vocabulary than the last run's."] * bool(
        others
    )
    lines += [f"Left out: {played} of simulated ranks, whose loss means nothing."] * bool(played)
    return "\n".join(lines)


def flags_apart(settings: list[dict]) -> list[str]:
    """Of settings, the flags that tell each from the others, as a command line has them. Of more than four flags only
    those whose value is not the one of most settings. A flag that belongs to another one, such as --remat-ratio to
    --remat, is left out at its default: the other one says what differs."""
    groups = (config.Training, config.System, config.Output)
    usual_beside = {
        name: getattr(group, name)
        for name in config.ONLY_WITH
        for group in groups
        if hasattr(group, name)
    }
    settings = [
        {
            name: None if name in usual_beside and value == usual_beside[name] else value
            for name, value in config.used(each).items()
        }
        for each in settings
    ]
    names = {name: None for each in settings for name in each}  # of one program's, too
    values = {
        name: Counter(repr(each[name]) for each in settings if name in each) for name in names
    }
    names = [name for name, count in values.items() if len(count) > 1]
    usual = {name: values[name].most_common(1)[0][0] for name in names} if len(names) > 4 else {}

    changing = [
        {k: each.get(k) for k in names if repr(each.get(k)) != usual.get(k)} for each in settings
    ]
    texts = [
        " ".join(as_given(k, v) for k, v in each.items() if v not in (None, []))
        for each in changing
    ]
    return [text or "those of most runs" * bool(usual) for text in texts]


def runs(rows: list[dict]) -> tuple[list[dict], Columns]:
    """The runs of files, whatever their settings: what tells these apart, every figure, and memory and time over
    those of the first run on the same device and torch; of times also the least and the most that both ranges allow."""
    rows = [row for row in rows if row.get("flags") and "outcome" in row and "study" not in row]
    rows = published.newest(rows, lambda row: row.get("line") or row.get("run"))
    if not rows:
        return [], []
    columns = [
        ("flags that differ", flags_apart([setting(row) for row in rows])),
        *where(rows),
        *outcomes(rows),
    ]
    base = {}
    firsts = [base.setdefault((row.get("device"), row.get("torch")), row) for row in rows]
    for title, key, digits, *_ in METRICS:
        values = column(rows, title, key, digits)
        columns += values
        if values and len(rows) > 1 and (key == "step_ms" or key.startswith("peak")):
            columns += [
                (
                    "x the first",
                    [published.ratio(*pair, key) for pair in zip(firsts, rows, strict=True)],
                )
            ]
    return rows, columns + column(rows, "held-out loss", "eval_loss", 4)


def sent(rows: list[dict]) -> tuple[list[dict], Columns]:
    """The collectives of the last step of each run of simulated ranks: how many, what they send, how long they take."""
    rows = [row for row in rows if "run" in row]  # other programs count them, too
    rows = [row for row in rows if isinstance(row.get("collectives"), dict) and row["collectives"]]
    lines = [(row, kind, counts) for row in rows for kind, counts in row["collectives"].items()]
    columns = [
        ("run", [row["run"] for row, *_ in lines]),
        *where([row for row, *_ in lines]),
        ("collective", [kind.replace("_", "-") for _, kind, _ in lines]),
    ]
    for title, key, digits in (
        ("calls", "n", 0),
        ("MiB", "mib", 1),
        ("ms by the model of the link", "ms", 2),
    ):
        columns += [(title, [grouped(counts[key], digits) for *_, counts in lines])]
    return rows, columns


def memory_of(rows: Iterable[dict]) -> tuple[str, str]:
    """(key, words) of the first kind of memory that any row has."""
    rows = [*rows]
    return next(
        (kind for kind in MEMORY if any(published.figure(row, kind[0]) for row in rows)), MEMORY[1]
    )


def cost_setting(row: dict) -> dict:
    """The setting of a row that has an influence on memory and time, its shape and ranks among it."""
    values = {
        name: value for name, value in setting(row).items() if flag(name) not in published.NEUTRAL
    }
    return values | {"ranks": published.label(row)}


def shared(rows: list[dict]) -> list[list[dict]]:
    """The rows, with time and memory, of every setting (shape, device, torch, ranks) that at least three share."""
    settings = {}
    for row in published.newest(rows, lambda row: str(sorted(cost_setting(row).items()))):
        if published.figure(row, "step_ms") and published.figure(row, memory_of([row])[0]):
            key = published.shape(row), row.get("device"), row.get("torch"), published.label(row)
            settings.setdefault(key, []).append(row)
    return [those for those in settings.values() if len(those) > 2]


BUSY = 1.5  # equal work that takes so many times as long was not alone on its machine


def busy_machine(rows: Iterable[dict]) -> str:
    """A line where runs of equal work, as those of an --lr sweep, differ more than BUSY times in the time of a step;
    empty where none do."""
    times = {}
    for row in rows:
        if row.get("flags") and (ms := published.figure(row, "step_ms")):
            work = str(sorted(cost_setting(row).items())), row.get("device"), row.get("torch")
            times.setdefault(work, []).append(ms)
    ratios = [max(steps) / min(steps) for steps in times.values()]
    if max(ratios, default=1) <= BUSY:
        return ""
    return (
        f"Busy: the step of equal work took up to {max(ratios):.1f} times as long in one run as in another, so other "
        "programs used the machine; compare no times of these runs."
    )


def front(candidates: Iterable[Costly]) -> list[Costly]:
    """The Pareto front of tuples that begin with two costs: what no other undercuts in both, by the first cost."""
    best = []
    for candidate in sorted(candidates, key=lambda candidate: candidate[:2]):
        if not best or candidate[1] < best[-1][1]:
            best.append(candidate)
    return best
