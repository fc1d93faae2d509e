"""A report as one HTML page that needs no other file and no network: tables, and figures as SVG inside it.

text = page([("depth", "**depth**: commit ..", "| depth | ..", [Path("plots/depth-gpu.svg")])])
"""

import base64
import re
from html import escape
from pathlib import Path

# The page may load nothing: the browser itself would refuse what is not in it.
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Report</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --text: #111; --back: #fff; --line: #ccc; --quiet: #444 }
body { font: 15px/1.45 sans-serif; max-width: 76rem; margin: 1rem auto; padding: 0 1rem; color: var(--text);
    background: var(--back) }
p { overflow-wrap: anywhere }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; max-width: 100% }
th, td { border-bottom: 1px solid var(--line); padding: 2px 7px; text-align: left; vertical-align: top }
td { overflow-wrap: anywhere }
th { border-bottom: 1px solid var(--text) }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums }
code { font-size: 12px; overflow-wrap: anywhere }
figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; vertical-align: top; width: 36rem; max-width: 100% }
figure img { width: 100%; height: auto }
figcaption { font-size: 13px; color: var(--quiet) }
@media (prefers-color-scheme: dark) {
    :root { --text: #e6e6e6; --back: #1a1a1a; --line: #444; --quiet: #aaa }
    figure img { filter: invert(.9) hue-rotate(180deg) }
}
@media (max-width: 40rem) { /* a phone: a wide table or figure keeps its size and scrolls */
    .wide, figure { overflow-x: auto }
    td { min-width: 5rem }
    td.number { white-space: nowrap; overflow-wrap: normal; min-width: 0 }
    figure { margin-right: 0 }
    figure img { width: 34rem }
}
</style></head><body>
<h1>Report</h1>
"""


def inline(text: str) -> str:
    """Markdown's `code` and **bold** in a line as HTML."""
    return re.sub(
        r"\*\*(.+?)\*\*",
        r"<b>\1</b>",
        re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False)),
    )


def table(text: str) -> str:
    """A table in Markdown as HTML; columns whose second line ends with a colon stand to the right."""
    head, marks, *body = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
    )
    kinds = [' class="number"' if mark.endswith(":") else "" for mark in marks]
    rows = [
        "".join(f"<td{kind}>{inline(cell)}</td>" for kind, cell in zip(kinds, line, strict=True))
        for line in body
    ]
    titles = "".join(
        f"<th{kind}>{inline(title)}</th>" for kind, title in zip(kinds, head, strict=True)
    )
    return "\n".join(
        [
            f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>',
            *(f"<tr>{row}</tr>" for row in rows),
            "</tbody></table></div>",
        ]
    )


def figure(path: Path) -> str:
    """An SVG file as part of the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    name = escape(path.stem)
    return f'<figure><img alt="{name}" src="data:image/svg+xml;base64,{data}"><figcaption>{name}</figcaption></figure>'


def page(sections: list[tuple[str, str, str, list[Path]]]) -> str:
    """sections: (title, text, table in Markdown or nothing, figures), each figure as SVG; other files are left out."""
    parts = [HEAD]
    for title, text, rows, figures in sections:
        parts.append(f"<h2>{inline(title)}</h2>")
        parts += [f"<p>{inline(line)}</p>" for line in text.splitlines() if line.strip()]
        parts += [table(rows)] if rows else []
        parts += [figure(path) for path in figures if path.suffix == ".svg"]
    return "\n".join([*parts, "</body></html>\n"])
