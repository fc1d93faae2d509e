"""Result rows: read them, find those of an axis, and the published row that stands beside each. Imports no torch.

The published figures (published/) are facts to compare with: `comparable` says whether a ratio to one means anything.
"""

import csv
import functools
import json
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from lab.sweeps import sweep
from trainer.logging import each_row
from trainer.step_costs import flops_per_token
from trainer.terminal.text import grouped

REFERENCE = Path(__file__).resolve().parents[2] / "published"
NEUTRAL = sweep.OUTPUT | {
    f"--{name}" for name in "steps data lr warmup seed device world link".split()
}
SHAPE = "block depth width head_dim grouping grow vocab seqlen batch grad_accum param_dtype".split()
QWEN_7B = 7_615_616_512  # parameters of Qwen2.5-7B
# Entries of which a row has one if it is of a run or of a study.
SHOWN = "run", "line", "flags", "study", "setting", "outcome", "device"
LOSSES = "loss", "eval_loss", "eval_bpb"
ANY = 10**9  # ranks of a line that names none
REMARKS = {
    "fit": "planned: by plan.py, of a GPU's step in the order of compiled graphs; on a CPU with a process's own memory "
    "added. Of a CPU the peak is resident, whole process. none: not even with all blocks recomputed.",
    "variants": "flex, not compiled: not by itself; its peaks without recomputation hold no T x T scores, see "
    "lab/notes/2026-11.md. sdpa stands beside nothing.",
    "small-params": "small: parameters under 1 MiB. Where published ms are a range, the ratio takes its middle.",
    "mfu": "The published count lacks a factor of width in the MLP and does not group K and V: 1.93 times too low at "
    "depth 4 and 4096 tokens. Recomputed: the same step time with our FLOPs.",
}


def read(paths: list[Path]) -> list[dict]:
    """The rows of JSONL files that a table may show, in order, with `file` and, where there are logged steps, their
    file, `history`; lines cut short are passed over. ValueError: no file."""
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(
            f"no file {missing[0]}: runs, sweeps and fits write such files, --results names others"
        )
    return [
        row | {"file": path.name} | steps_of(path, row)
        for path in paths
        for row in each_row(path)
        if not row.keys().isdisjoint(SHOWN)
    ]


def steps_of(path: Path, row: dict) -> dict[str, str]:
    """{"history": FILE} of a row in the file `path`, if there is such a file."""
    steps = path.with_suffix(".steps") / f"{Path(str(row.get('run'))).name}.jsonl"
    return {"history": str(steps)} if steps.is_file() else {}


@functools.cache
def core(setting: str | None) -> frozenset[tuple[str, tuple[str, ...]]] | None:
    """The flags of a row's setting that have an influence on memory and time; None where it is not a line of flags."""
    with suppress(ValueError):
        flags = sweep.parse(sweep.words(setting or "none"))[1]
        return frozenset((flag, values) for flag, values in flags.items() if flag not in NEUTRAL)
    return None


def on_gpu(row: dict) -> bool:
    """Whether a run was on a GPU: by its memory, by its device, or, where it died before it knew, by its flags."""
    assumed = (
        "CPU"
        if "--device cpu" in str(row.get("line")) or "+cpu" in str(row.get("torch"))
        else "GPU"
    )
    return "peak_alloc_mib" in row or not (
        "peak_rss_mib" in row or str(row.get("device", assumed)).startswith("CPU")
    )


def setting(row: dict, name: str):
    """What --name was. ValueError if the row does not say: a default of today may be another than that of the run."""
    if name not in (row.get("flags") or {}):
        raise ValueError(
            f"the row of '{row.get('line')}' does not say what {name} was: run its line again"
        )
    return row["flags"][name]


def shape(row: dict) -> str:
    return ", ".join(f"{name} {setting(row, name)}" for name in SHAPE)


def ranks(row: dict) -> int:
    return int(re.match(r"\d+", label(row))[0])


def label(row: dict) -> str:
    """4, or 8(sim h100-nvlink)."""
    return str(row.get("world", 1))


def newest(rows: list[dict], key: Callable[[dict], object] = lambda row: None) -> list[dict]:
    """Of each key, device, torch and label of ranks the last row that is ok, or else the last. A run that died knows no
    device: its row counts where there is no other."""
    last = {}
    for row in sorted(rows, key=lambda row: str(row.get("date"))):
        which = (key(row), row.get("torch"), label(row), row.get("device"))
        if row.get("outcome") == "ok" or last.get(which, {}).get("outcome") != "ok":
            last[which] = row
    known = {which[:3] for which in last if which[3]}
    return [row for which, row in last.items() if which[3] or which[:3] not in known]


def key_names(axis: str) -> list[str]:
    """What a row has in common with the published row beside it: the columns of published/AXIS.csv before `on`."""
    file = REFERENCE / f"{axis}.csv"
    return file.read_text().partition(",on,")[0].split(",") if file.exists() else []


def key_of(row: dict, names: list[str]) -> tuple:
    """Their values in a row of ours."""
    values = {
        name: setting(row, name)
        for name in "remat attn compile seqlen depth width batch grouping mode".split()
    }
    values |= {
        "ranks": ranks(row),
        "small": "replicate" if setting(row, "min_shard_mib") else "shard",
    }
    values["attn"] = "flex" if values["attn"] == "flex" else "sdpa"  # as published
    values["global batch"] = values["ranks"] * values["batch"] * setting(row, "grad_accum")
    return tuple(values[name] for name in names)


def flops_ratio(depth: int, seqlen: int, grouping: int) -> float:
    """FLOPs of a token, causal convention, over those of the published count: no width in the MLP, no grouping."""
    c = SimpleNamespace(
        depth=depth,
        width=4096,
        grouping=grouping,
        head_dim=128,
        grow=4,
        vocab=32768,
    )
    core = flops_per_token(c, seqlen) - flops_per_token(c, seqlen, "linear")
    counted = 6 * (depth * (4 * c.width**2 + 2 * c.grow * c.width) + c.width * c.vocab) + core
    return flops_per_token(c, seqlen) / counted


@functools.cache
def published(axis: str) -> dict[tuple, dict]:
    """Key -> published row: `device`, `ranks`, `mib`, `ms`, `mfu` (of a range the middle, None for words), `text`."""
    names = key_names(axis)
    by_key = {}
    for line in (
        csv.DictReader((REFERENCE / f"{axis}.csv").read_text().splitlines()) if names else ()
    ):
        p = {name: int(value) if value.isdigit() else value for name, value in line.items()}
        n, _, device = line["on"].partition("x")
        p |= {"ranks": int(n), "device": device, "text": {}}
        for name in ("mib", "ms"):
            ends = line.get(name, "").split("-")
            known = all(end.isdigit() for end in ends)
            p[name] = sum(map(int, ends)) / len(ends) if known else None
            p["text"][name] = "-".join(grouped(int(end)) if known else end for end in ends)
        counted = line.get("mfu")
        p["mfu"] = (
            float(counted) * flops_ratio(p["depth"], p["seqlen"], p["grouping"])
            if counted
            else None
        )
        p["text"]["mfu"] = f"{counted}, {grouped(p['mfu'], 1)}"
        by_key[tuple(p[name] for name in names)] = p
    return by_key


def fit_of(row: dict) -> float | None:
    """The published part of recomputed blocks beside a row of what fits, if it is of Qwen2.5-7B, or None."""
    key = [str(n) for n in (ranks(row), row["batch"], row["grad_accum"])]
    lines = csv.reader((REFERENCE / "fit_qwen7b.csv").read_text().splitlines())
    return next(
        (
            float(ac)
            for *shape, ac, ga in lines
            if [*shape, ga] == key and row.get("parameters") == QWEN_7B
        ),
        None,
    )


def measured(row: dict) -> float | None:
    """The published peak MiB of a run of the transformer at a row's setting, or None."""
    usual = dict(remat="both", compile="fwdbwd", depth=4, width=4096, seqlen=4096, batch=8, ranks=2)
    ours = {name: setting(row, name) for name in usual if name != "ranks"} | {"ranks": ranks(row)}
    for axis in ("seqlen", "depth", "width", "gpus", "variants"):
        for p in published(axis).values():
            theirs = usual | {name: p[name] for name in usual if name in p}
            theirs["batch"] = (
                p.get("global batch", theirs["batch"] * theirs["ranks"]) // theirs["ranks"]
            )
            if theirs == ours and p["mib"]:
                return p["mib"]
    return None


def entries(
    axis: str, rows: list[dict], small: bool
) -> list[tuple[tuple, dict | None, dict | None]]:
    """(key, our row, published row) of an axis; None for a row that is missing. ValueError where none is ours."""
    names = key_names(axis)
    theirs = published(axis)
    lines = {}
    keyed = []
    for setting in sweep.read_settings(axis, small, ANY, []):
        n, flags = sweep.parse(shlex.split(setting))
        lines[int(flags.get("--world", [n])[0]), core(setting)] = None
    shared = frozenset.intersection(*(flags for _, flags in lines))
    by_flags = {}
    for row in rows:
        by_flags.setdefault(core(row.get("line")), []).append(row)
    for n, flags in lines:
        for row in newest([row for row in by_flags.get(flags, []) if n in (ANY, ranks(row))]):
            keyed.append((key_of(row, names) or (sweep.join(dict(flags - shared)),), row))
    if not keyed:
        raise ValueError(
            f"{axis}: none of the {len(rows)} rows belong to it{'' if small else '; for small sizes add --small'}"
        )
    ours = {}
    for key, row in keyed:
        ours.setdefault(key, []).append(row)
    keys = dict.fromkeys([*ours, *theirs])
    keys = sorted(keys) if names and axis != "variants" else keys
    return [(k, row, theirs.get(k)) for k in keys for row in ours.get(k, [None])]


def comparable(ours: dict | None, theirs: dict | None) -> bool:
    """At the published setting (that of the axis' line at full size), on as many ranks, on a GPU."""
    full = ours and [setting(ours, name) for name in ("block", "vocab", "param_dtype")] == [
        "gelu",
        32768,
        "bf16",
    ]
    return bool(full and theirs and on_gpu(ours) and ranks(ours) == theirs["ranks"])


def simulated(row: dict) -> bool:
    """Whether one process played rank 0 of many, so that the loss means nothing."""
    return "(sim" in label(row)


def figure(row: dict | None, key: str) -> float | None:
    """The number of a row that is ok, or None; of simulated ranks no loss is a number."""
    unknown = not row or row.get("outcome", "ok") != "ok" or (key in LOSSES and simulated(row))
    value = None if unknown else row.get(key)
    return value if isinstance(value, int | float) else None


def series(row: dict, axis: str) -> str:
    """What one curve was measured on: device, torch and, where they are not the axis, the ranks."""
    n = label(row).lstrip("0123456789") if axis == "gpus" else f"n={label(row)}"
    return f"{str(row.get('device') or 'no device').split(',')[0]}, torch {row.get('torch')} {n}".strip()


def rows_of(side: str, files: list[Path]) -> dict[tuple, dict]:
    """(ranks, setting) -> the newest row of a file, or of a commit (seven digits or more) in `files`, one with
    uncommitted changes only where there is no other; ValueError."""
    commit = re.fullmatch("[0-9a-f]{7,40}", side) and not Path(side).is_file()
    rows = read(files if commit else [Path(side)])
    rows = [row for row in rows if not commit or str(row.get("commit")).startswith(side)]
    if not rows:
        raise ValueError(
            f"{side}: no row of this {'commit' if commit else 'file'}; --results names other files"
        )
    named = [(row, row.get("line") or json.dumps(row.get("flags"), sort_keys=True)) for row in rows]
    # The last one counts: that of a commit, if there is one.
    named.sort(key=lambda each: not each[0].get("dirty"))
    return {(label(row), name): row for row, name in named}


def ratio(a: dict, b: dict, name: str) -> str:
    """A figure of `b` over that of `a`, 0.963 [0.801-1.120]; nothing where one has none."""
    x, low, high, y, least, most = (
        figure(row, name + end) for row in (a, b) for end in ("", "_min", "_max")
    )
    spread = f" [{least / high:.3f}-{most / low:.3f}]" if all((low, high, least, most)) else ""
    return f"{y / x:.3f}{spread}" if x and y else ""
