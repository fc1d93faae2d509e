"""Result rows as Markdown tables beside the published figures of published/. Imports no torch.

    about, table = section("depth", published.read([Path("runs/sweep-depth.jsonl")]), small=False)

A table is of an axis of a sweep, or of one of LAYOUTS.
"""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from lab.report import published
from lab.report.columns import METRICS, MS, Columns, column, memory, outcomes, shown, where
from lab.report.runs import flags_apart, left_out, loss, runs, sent
from lab.sweeps import sweep
from trainer.step_costs import kept_per_block
from trainer.terminal.text import grouped, markdown

Entries = list[tuple[tuple, dict | None, dict | None]]


def relative(figures: list[float | None], names: list[str | None]) -> tuple[str, list[str]]:
    """The column of figures over the first of the same name."""
    base = {}
    for name, value in zip(names, figures, strict=True):
        base.setdefault(name if value else None, value)
    return "x", [
        grouped(value / base[name], 2) if value else ""
        for name, value in zip(names, figures, strict=True)
    ]


def axis_columns(axis: str, entries: Entries) -> Columns:
    """Ours, published and their ratios; where nothing is comparable, both relative to their first instead."""
    names = published.key_names(axis) or ["flags"]
    ours = [o for _, o, _ in entries]
    theirs = [p for *_, p in entries]
    fair = [published.comparable(o, p) for _, o, p in entries]
    columns = [(name, [str(key[i]) for key, *_ in entries]) for i, name in enumerate(names)]
    if "ranks" in names:
        columns[names.index("ranks")] = (
            "n",
            [published.label(o) if o else str(p["ranks"]) for _, o, p in entries],
        )
    columns += where(ours, always=True)["ranks" in names :]
    if len({p["device"] for p in theirs if p}) > 1:
        columns.append(("published on", [p["device"] if p else "" for p in theirs]))
    columns += outcomes(ours)
    for title, key, digits, their_key, their_title in METRICS:
        figures = [published.figure(o, key) for o in ours]
        other = [p and p.get(their_key) for p in theirs]
        alone = any(theirs) and not any(fair) and ("mib" in key or key == "step_ms")
        if any(figures):
            columns.append((title, [shown(o, key, digits) for o in ours]))
            columns += [relative(figures, [o and published.series(o, axis) for o in ours])] * alone
        if any(other):
            columns.append((their_title, [p["text"][their_key] if p else "" for p in theirs]))
            columns += [relative(other, [p and p["device"] for p in theirs])] * alone
            ratios = [
                f"{a / b:.3f}" if f and a and b else ""
                for a, b, f in zip(figures, other, fair, strict=True)
            ]
            columns += [("ours/published", ratios)] * any(ratios)
    return columns


def compile_modes(rows: list[dict]) -> tuple[list[dict], Columns]:
    """The rows and columns of a table of the --compile modes. ValueError if they differ in anything else."""
    order = ("none", "blocks", "model", "fwdbwd", "step")
    rows = published.newest(
        [row for row in rows if row.get("compile") in order], lambda row: row["compile"]
    )
    rows.sort(key=lambda row: order.index(row["compile"]))
    always = *published.SHAPE, "steps", "mode", "remat"
    if len({tuple(published.setting(row, name) for name in always) for row in rows}) > 1:
        raise ValueError(
            "compile: the rows differ in shape, --steps, --mode or --remat; give a file in which only --compile differs"
        )
    columns = [("`--compile`", [row["compile"] for row in rows]), *where(rows)]
    loss = f"loss, step {published.setting(rows[0], 'steps') if rows else ''}"
    columns += [
        (loss, [shown(row, "loss", 4) or row["outcome"] for row in rows]),
        *column(rows, MS, "step_ms", 1),
        ("compile s", [shown(row, "compile_s", 1) or "n/a" for row in rows]),
    ]
    return rows, columns + memory(rows)


def links(rows: list[dict]) -> tuple[list[dict], Columns]:
    """Runs that differ in their ranks and links alone: a line each, a column of smallest steps for each number of ranks
    and link. Only what ran on more than one link; what stands in the column of one rank has the same flags."""
    rows = published.newest(
        [row for row in rows if published.core(row.get("line"))],
        lambda row: published.core(row["line"]),
    )
    lines = {}
    for row in rows:
        lines.setdefault(published.core(row["line"]), {})[published.label(row)] = row
    lines = {
        core: line for core, line in lines.items() if sum("(sim" in label for label in line) > 1
    }
    lines = {
        core: line
        for core, line in lines.items()
        if len({published.ranks(line[n]) for n in line} - {1}) == 1
    }
    labels = sorted({label for line in lines.values() for label in line})
    columns = [("flags", [f"`{sweep.join(dict(core))}`" for core in lines])]
    for label in labels:
        columns += column(
            [line.get(label) for line in lines.values()], f"n = {label}, ms", "step_ms_min", 1
        )
    most = [line[max(line)] for line in lines.values()]
    columns += column(
        most, f"n = {published.ranks(most[0])}, peak MiB" if most else "", "peak_alloc_mib", 0
    )
    return [row for line in lines.values() for row in line.values()], columns


def collectives(rows: list[dict]) -> tuple[list[dict], Columns]:
    """How many collectives a step runs, by kind; exposed: no product runs meanwhile (lab/benchmarks/collectives.py)."""
    # Studies/ has one, too.
    rows = [row for row in rows if row.get("study") == "collectives" and "graphs" in row]
    rows = published.newest(rows, lambda row: str(row["flags"]))
    sent = [
        [each for graph in row["graphs"].values() for each in graph["collectives"]] for row in rows
    ]
    names = [" ".join(row["flags"]["compile_options"]) or "those of `overlap.py`" for row in rows]
    columns = [
        ("Inductor options", names),
        ("`--compile`", [row["flags"]["compile"] for row in rows]),
    ]
    for kind in dict.fromkeys(each[0] for of_row in sent for each in of_row):
        of_kind = [[gap for name, _, gap, *_ in of_row if name == kind] for of_row in sent]
        columns.append((f"{kind}s", [str(len(gaps)) for gaps in of_kind]))
        columns.append(("of them exposed", [str(gaps.count(0)) for gaps in of_kind]))
    columns.append(("MiB sent", [grouped(sum(each[4] for each in of_row)) for of_row in sent]))
    alive = [max(graph["gathered_mib"] for graph in row["graphs"].values()) for row in rows]
    return rows, [*columns, ("most gathered MiB at once", [grouped(each) for each in alive])]


def peaks(rows: list[dict]) -> tuple[list[dict], Columns]:
    """Simulated peaks at the setting of most rows: a line per recipe and torch, a column per number of ranks that
    several of them have; what a block keeps in [B,T,D], TFLOP of a rank's step, and the published peaks of the recipe.
    """
    of_sweeps = [row for row in rows if row.get("study") == "peak" and row.get("line")]
    rows = published.newest(of_sweeps, lambda row: row["line"])
    lines = {}
    shapes = Counter(map(published.shape, rows))
    usual = max(shapes.values(), default=0)
    for row in rows:
        if shapes[published.shape(row)] == usual and row["outcome"] == "ok":
            lines.setdefault((published.core(row["line"]), row["torch"]), {})[
                published.ranks(row)
            ] = row
    lines = {key: line for key, line in lines.items() if len(line) > 1}
    counts = [
        n for n, k in sorted(Counter(n for line in lines.values() for n in line).items()) if k > 1
    ]
    lines = dict(sorted(lines.items(), key=lambda item: -item[1][max(item[1])]["simulated_mib"]))
    most = [line[max(line)] for line in lines.values()]  # the row of the most ranks
    columns = [("flags", [f"`{sweep.join(dict(core))}`" for core, _ in lines])]
    columns += [each for each in where(most) if each[0] == "torch"]
    columns += [("kept", [f"{kept_per_block(SimpleNamespace(**row['flags'])):g}" for row in most])]
    for n in counts:
        columns += column([line.get(n) for line in lines.values()], f"N = {n}", "simulated_mib", 0)
    columns += [("TFLOP", [shown(row, "tflop", 1) for row in most])]
    measured = [
        [published.measured(line[n]) for n in counts if n in line] for line in lines.values()
    ]
    texts = [
        ", ".join(map(grouped, mib)) * peak["published"]
        for mib, peak in zip(measured, most, strict=True)
    ]
    return [line[n] for line in lines.values() for n in counts if n in line], [
        *columns,
        ("published", texts),
    ]


def fit(rows: list[dict]) -> tuple[list[dict], Columns]:
    """The answers of lab/fit.py: the least recomputed share that fits, planned and measured, for each number of ranks
    and micro-batch; beside the published table where model and effective batch are its own."""
    asked = "model", "memory_mib", "gpu", "effective_batch", "seqlen", "batch"
    rows = [row for row in rows if row.get("study") == "fit"]
    rows = published.newest(rows, lambda row: tuple(row[k] for k in asked))
    rows.sort(
        key=lambda row: (
            row["model"],
            str(row["gpu"]),
            row["memory_mib"],
            published.ranks(row),
            row["batch"],
        )
    )
    apart = [k for k in asked[:-1] if len({str(row[k]) for row in rows}) > 1]
    columns = [(k.replace("_", "-"), [grouped(row[k]) for row in rows]) for k in apart] + where(
        rows
    )
    columns += [
        (k.replace("_", "-"), [str(row[k]) for row in rows]) for k in ("batch", "grad_accum")
    ]
    for title, key in (("planned ratio", "planned_ratio"), ("measured ratio", "ratio")):
        if any(key in row for row in rows):
            columns.append(
                (title, [grouped(row.get(key), 2, "none" if key in row else "") for row in rows])
            )
    beside = [published.fit_of(row) for row in rows]
    columns += [("published ratio", [grouped(each, 2, "") for each in beside])] * (
        beside != [None] * len(rows)
    )
    columns += [
        ("planned peak MiB", [grouped(row.get("planned_mib"), missing="") for row in rows]),
        *memory(rows),
        ("planned step ms", [grouped(row.get("planned_ms"), missing="") for row in rows]),
    ]
    columns += column(rows, MS, "step_ms", 1) + column(rows, "tokens/s", "tok_s", 0)
    return rows, columns + outcomes(rows)


def nodes(rows: list[dict]) -> tuple[list[dict], Columns]:
    """Steps of each --mode on real links, and what fitted links and simulated ranks say (lab/benchmarks/nodes.py)."""
    rows = [row for row in rows if row.get("study") == "nodes" and "line" in row]
    rows = published.newest(rows, lambda row: (row["network"], row["line"]))
    columns = [(name, [row[name] for row in rows]) for name in ("network", "line")]
    columns += where(rows) + column(rows, MS, "step_ms", 1) + column(rows, "x", "ratio", 2)
    columns += [
        (f"{name} ms", [grouped(row[key], 1) for row in rows])
        for name, key in (("computation", "compute_ms"), ("links", "link_ms"))
    ]
    for title, parts in (
        ("predicted", ("compute_ms", "link_ms")),
        ("simulated", ("simulated_ms",)),
    ):
        ms = [sum(row[part] for part in parts) for row in rows]
        off = [
            f"{100 * (each / row['step_ms'] - 1):+.0f}" for each, row in zip(ms, rows, strict=True)
        ]
        columns += [(f"{title} ms", [grouped(each, 1) for each in ms]), ("off by %", off)]
    return rows, columns


def versions(rows: list[dict]) -> tuple[list[dict], Columns]:
    """The last row of each version of torch (tests/versions.py): its tests by result, and why not all have passed."""
    last = {row["setting"]["version"]: row for row in rows if row.get("study") == "versions"}
    rows = [
        last[name]
        for name in sorted(last, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    ]

    def why(row: dict) -> str:
        outcome = [] if row["outcome"] == "ok" else [row["outcome"]]
        reasons = [f"{reason}: {n}" for reason, n in sorted(row["reasons"].items())]
        return "; ".join([*outcome, *row["failures"][:3], *reasons])

    columns = [("torch", [row["torch"] for row in rows])]
    columns += [
        (key, [grouped(row[key]) for row in rows]) for key in ("passed", "failed", "skipped")
    ]
    columns.append(("why not all passed", [why(row) for row in rows]))
    columns.append(
        ("minutes", [grouped(row["seconds"] / 60, 1) if row.get("seconds") else "" for row in rows])
    )
    return rows, [
        *columns,
        ("environment, GB", [grouped(row["environment_gb"], 1, "") for row in rows]),
    ]


def first_step(rows: list[dict]) -> tuple[list[dict], Columns]:
    """From the command to its first step and result, by the compile cache (lab/benchmarks/first_step.py)."""
    rows = [row for row in rows if row.get("study") == "first_step"]
    rows = published.newest(rows, lambda row: (row["name"], row["cache"]))
    columns = [(title, [row[title] for row in rows]) for title in ("name", "cache")]
    for title, key in (
        ("command, s", "command_s"),
        ("command, CPU s", "command_cpu_s"),
        ("first step, CPU s", "first_step_cpu_s"),
    ):
        columns.append((title, [grouped(row[key], 1) for row in rows]))
    return rows, columns


def trl(rows: list[dict]) -> tuple[list[dict], Columns]:
    """finetune.py beside TRL (lab/benchmarks/trl.py); ratios are ours over TRL's."""
    rows = [row for row in rows if row.get("study") == "trl"]
    rows = published.newest(rows, lambda row: (row["compile"], row["pad"]))

    def beside(key: str, digits: int = 0) -> list[str]:
        pairs = ((row.get(key), row.get(f"{key}_trl")) for row in rows)
        return [", ".join(grouped(each, digits) for each in pair) for pair in pairs]

    columns = [
        ("--compile", [row["compile"] for row in rows]),
        ("--pad", [row["pad"] for row in rows]),
        ("tokens of answers / s: ours, TRL", beside("tok_s")),
        ("ratio", [grouped(row["ratio"], 2) for row in rows]),
        ("by CPU seconds", [grouped(row["ratio_cpu"], 2) for row in rows]),
        ("peak MiB", beside("peak_mib")),
        ("CPU s of 3 steps and their start", beside("process_cpu_s", 1)),
        ("load before, after", [", ".join(map(str, row["load"])) for row in rows]),
    ]
    return rows, columns


LAYOUTS = {
    "compile": compile_modes,
    "peaks": peaks,
    "links": links,
    "collectives": collectives,
    "loss": loss,
    "runs": runs,
    "sent": sent,
    "first_step": first_step,
    "trl": trl,
    "fit": fit,
    "nodes": nodes,
    "versions": versions,
}


def about(name: str, ours: list[dict], entries: Entries) -> str:
    """The text above a table: commit, versions, devices, shared flags, and what it may be compared with."""

    def values_of(key):
        return ", ".join(sorted({str(row[key]) for row in ours if row.get(key)})) or "unknown"

    n = ", ".join(sorted({published.label(row) for row in ours}))
    commits = {str(row.get("commit"))[:7] for row in ours}
    dirty = " (uncommitted changes)" * any(row.get("dirty") for row in ours)
    # Counts and plans have none.
    steps = f"{values_of('n')} timed steps, " * any(row.get("n") for row in ours)
    lines = [
        f"**{name}**: commit {', '.join(sorted(commits))}{dirty}, torch {values_of('torch')}, {values_of('device')}, "
        f"n = {n} ranks, {steps}{values_of('file')}."
    ]
    cores = [published.core(row.get("line")) or frozenset() for row in ours]
    if cores and (shared := frozenset.intersection(*cores)):
        lines += [f"All of ours: `{sweep.join(dict(shared))}`."]
    if "(sim" in n:
        lines += [
            "N(sim LINK): one process in place of N, its collectives timed by a model of the link."
        ]
    if theirs := [p for *_, p in entries if p]:
        machines = [
            f"{n}x{device}" for device, n in sorted({(p["device"], p["ranks"]) for p in theirs})
        ]
        how = "Ratios only at the published setting, on as many ranks of a GPU, whichever it is."
        if not any(published.comparable(o, p) for _, o, p in entries):
            how = "No ratios to it: setting, ranks or device differ. x: relative to the first of each device and n."
        lines += [
            f"Published by others on {', '.join(machines)}: published/{name}.csv, not ours. {how}"
        ]
    return "\n".join([*lines, *filter(None, [published.REMARKS.get(name)])])


def check_name(name: str) -> None:
    """Raises ValueError for a name that is neither an axis nor a layout."""
    known = {**sweep.axes(), **LAYOUTS}
    if name not in known:
        raise ValueError(f"unknown axis '{name}': expected all or one of {', '.join(known)}")


def layout(name: str, rows: list[dict]) -> tuple[list[dict], Columns]:
    """The rows and columns of a table; none of an axis that is no layout, too."""
    return LAYOUTS[name](rows) if name in LAYOUTS else ([], [])


def section(
    name: str, rows: list[dict], small: bool, made: tuple[list[dict], Columns] | None = None
) -> tuple[str, str]:
    """The text above a table, and the table. made: what `layout` has given. Raises ValueError where it has no row."""
    ours, columns = made or layout(name, rows)
    if ours:
        others = left_out(rows) if name == "loss" else ""
        return about(name, ours, []) + f"\n{others}" * bool(others), markdown(columns)
    if name not in sweep.axes():
        needs = "; it takes runs on real ranks whose steps are in FILE.steps/" * (name == "loss")
        raise ValueError(f"{name}: none of the {len(rows)} rows belong to it{needs}")
    entries = published.entries(name, rows, small)
    return about(name, [o for _, o, _ in entries if o], entries), markdown(
        axis_columns(name, entries)
    )


def compared(sides: list[str], files: list[Path]) -> str:
    """Markdown, a line for each setting that both sides have: their figures and the second's over the first's; of step
    times also the least and the most that both ranges allow. ValueError where they share none."""
    first, second = (published.rows_of(side, files) for side in sides)
    both = [key for key in first if key in second]
    if not both:
        raise ValueError(f"{' '.join(sides)}: no setting has a row in both")
    changed = flags_apart([first[key].get("flags") or {} for key in both])
    columns = [("n", [n for n, _ in both]), ("flags that differ", changed)]
    dirty = [
        ", ".join(
            side
            for side, rows in zip(sides, (first, second), strict=True)
            if rows[key].get("dirty")
        )
        for key in both
    ]
    columns += [("with uncommitted changes", dirty)] * any(dirty)
    for title, name, digits, *_ in METRICS:
        a, b = ([published.figure(rows[key], name) for key in both] for rows in (first, second))
        if any(a) and any(b):
            texts = ([shown(rows[key], name, digits) for key in both] for rows in (first, second))
            columns += [(f"{title}, {side}", text) for side, text in zip(sides, texts, strict=True)]
            columns += [
                ("ratio", [published.ratio(first[key], second[key], name) for key in both])
            ] * (name != "loss")
    return markdown(columns)
