"""Columns of a table: (title, cells) pairs, made from the figures of rows. Imports no torch.

columns = [*where(rows), *outcomes(rows), *column(rows, MS, "step_ms", 1)]
"""

import itertools

from lab.report import published
from trainer.terminal.text import grouped

MS = "step ms, median [min-max]"
# Title, key and digits of our figure; key and title of the published one. Resident and allocated never share a column.
METRICS = (
    ("resident MiB", "peak_rss_mib", 0, None, None),
    ("allocated MiB", "peak_alloc_mib", 0, "mib", "published allocated MiB"),
    (MS, "step_ms", 1, "ms", "published ms"),
    ("MFU %", "mfu", 1, "mfu", "published MFU %: as counted, recomputed"),
    ("MFU % PaLM", "mfu_palm", 1, None, None),
    ("HFU %", "hfu", 1, None, None),
    ("compile s", "compile_s", 1, None, None),
    ("loss", "loss", 4, None, None),
)
Columns = list[tuple[str, list[str]]]


def shown(row: dict | None, key: str, digits: int) -> str:
    """A figure of a row with its range, 91.4 [75.3-219.9]; nothing where it has none."""
    text, low, high = (
        grouped(published.figure(row, key + end), digits, missing="")
        for end in ("", "_min", "_max")
    )
    return text + f" [{low}-{high}]" * bool(low)


def column(rows: list[dict | None], title: str, key: str, digits: int) -> Columns:
    """The column of a figure; none where no row has it."""
    texts = [shown(row, key, digits) for row in rows]
    return [(title, texts)] if any(texts) else []


def memory(rows: list[dict]) -> Columns:
    """The columns of peak memory that the rows have."""
    return [
        part
        for title, key, digits, *_ in METRICS[:2]
        for part in column(rows, f"peak {title}", key, digits)
    ]


def outcomes(rows: list[dict | None]) -> Columns:
    """The column of outcomes; none where every row is ok."""
    texts = [row.get("outcome", "")[:80] if row else "" for row in rows]
    return [("outcome", texts)] if {*texts} - {"", "ok"} else []


def where(rows: list[dict | None], always: bool = False) -> Columns:
    """Columns that tell rows apart: the ranks (unless all ran on one), device and torch where they differ."""
    columns = [("n", [published.label(row) if row else "" for row in rows])]
    columns += [
        (name, [(row or {}).get(name) or "" for row in rows]) for name in ("device", "torch")
    ]
    needed = [
        always or set(columns[0][1]) != {"1"},
        *(len(set(texts) - {""}) > 1 for _, texts in columns[1:]),
    ]
    return list(itertools.compress(columns, needed))
