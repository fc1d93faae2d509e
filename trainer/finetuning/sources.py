"""Files of examples and what is in them: lines of JSON, an array of JSON, parquet, Arrow, a folder of `datasets`.

    weighted(["a.jsonl:0.7", "b.parquet:0.3"])     # [("a.jsonl", 0.7), ("b.parquet", 0.3)]; without weights None
    files = check_files("chat.jsonl")              # DataError for files that are not there or empty; no torch
    for number_of_file, number, record in records(files): ...

A record is the bytes of an object of JSON, or a row of a table as a dict, which is without what is null: in a table a
null is also what a row lacks that others have. Tables are read by pyarrow, a part at a time.
"""

import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.data import files_below, matching, readable, unusable
from trainer.distributed.terminal import grouped, one_line

LINE_BYTES = 10 << 20  # of a record of JSON at most
PIECE = 1 << 16  # characters that are read of an array at a time, at first
ROWS = 256  # of a table at a time
TABLES = ".parquet", ".arrow"
KINDS = ".jsonl", *TABLES, ".json"
FILES = "a .jsonl, .json, .parquet or .arrow file"
# How names of its files begin.
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=[-_.])")
PLACES = {".jsonl": "line", ".json": "element", ".parquet": "row", ".arrow": "row"}


def weighted(sources: Sequence[str], flag: str = "--data") -> list[tuple[str, float | None]]:
    """Sources and their weights, "path:0.7". ValueError for a weight that is none, or where some have one."""
    pairs = []
    for source in sources:
        path, _, last = source.rpartition(":")
        try:
            weight = (
                float(last) if path and not os.path.exists(os.path.expanduser(source)) else None
            )
        except ValueError:
            weight = None
        if weight is not None and not 0 < weight < math.inf:
            raise ValueError(f"{flag} {source}: a weight must be a positive number")
        pairs.append((source if weight is None else path, weight))
    if len({weight is None for _, weight in pairs}) > 1:
        bare = next(path for path, weight in pairs if weight is None)
        raise ValueError(
            f"{flag} {bare}: has no weight, as others have; give each one ({bare}:0.5), or none"
        )
    return pairs


def check_files(source: str, flag: str = "--data") -> list[Path]:
    """The files of a path, a folder or a pattern. Raises DataError if there is none, or one that is empty or cannot be
    read. Reads no record, imports no torch. flag: for the message."""
    root = os.path.expanduser(source)
    with readable(source, flag):
        found = [root] if os.path.exists(root) else matching(root)
        # ** matches folders and what is in them.
        files = [*dict.fromkeys(file for each in found for file in _inside(str(each), flag))]
        if not files:
            raise unusable(
                root, f"{FILES}, or a folder or pattern of them", "none", f"check {flag}"
            )
        for file in files:
            if not file.is_file():
                raise unusable(
                    str(file), "a file", "a folder, pipe or device", f"name files in {flag}"
                )
            if {".csv", ".tsv", ".xlsx"} & {suffix.lower() for suffix in file.suffixes}:
                fix = "save it as lines of JSON, such as by to_json(.., orient='records', lines=True) of pandas"
                raise unusable(str(file), FILES, f"a {file.suffix} one", fix)
            with open(file, "rb") as opened:
                if not opened.read(1):
                    raise unusable(
                        str(file), "lines of JSON", "an empty file", f"leave it out of {flag}"
                    )
            if file.suffix in TABLES and importlib.util.find_spec("pyarrow") is None:
                fix = "pip install -e '.[hf]', or give lines of JSON"
                raise unusable(str(file), "pyarrow, to read it", "none", fix)
    return files


def _inside(root: str, flag: str) -> list[Path]:
    """The files of a folder, of one kind; a file itself. Of a folder that `datasets` saved those that it names."""
    folder = Path(root)
    if not folder.is_dir():
        return [folder]
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        raise unusable(
            root, "one dataset", f"the splits {splits}", f"name one of these folders in {flag}"
        )
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        try:
            named = json.loads((folder / "state.json").read_bytes())["_data_files"]
            return [folder / each["filename"] for each in named]
        except (ValueError, KeyError, TypeError) as error:
            raise unusable(
                f"{root}/state.json", "what datasets saves", one_line(error), "save it again"
            ) from error
    kinds = {kind: files_below(root, kind) for kind in KINDS}
    # A .json may be about the others.
    there = [kind for kind in KINDS[:-1] if kinds[kind]] or [KINDS[-1]]
    if len(there) > 1:
        fix = f"name a pattern in {flag}, such as {root}/*{there[0]}"
        raise unusable(root, "files of one kind", " and ".join(there), fix)
    splits = sorted({found[1] for file in kinds[there[0]] if (found := SPLIT.match(file.name))})
    if len(splits) > 1:
        fix = f"name a pattern in {flag}, such as {root}/**/{splits[-1]}*{there[0]}"
        raise unusable(root, "files of one split", " and ".join(splits), fix)
    return kinds[there[0]]


def place(file: Path, number: int) -> str:
    """Where a record is, for people."""
    return f"{file}, {PLACES.get(file.suffix, 'line')} {grouped(number)}"


def records(files: list[Path]) -> Iterator[tuple[int, int, bytes | dict[str, Any]]]:
    """(number of the file, number of the record from 1, the record). Raises DataError, and OSError."""
    for index, file in enumerate(files):
        if file.suffix in TABLES:
            found = enumerate(_rows(file), 1)
        elif _begins_an_array(file):
            found = enumerate(_elements(file), 1)
        else:
            found = _lines(file)
        for number, record in found:
            yield index, number, record


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Without blank ones. A line that is too long comes as its first LINE_BYTES + 1 bytes."""
    with open(file, "rb") as opened:
        number = 0
        while line := opened.readline(LINE_BYTES + 1):
            number = number + 1
            rest = line
            # As Windows begins files.
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            while len(rest) > LINE_BYTES and not rest.endswith(b"\n"):
                rest = opened.readline(LINE_BYTES + 1)
            if line.strip():
                yield number, line


def _begins_an_array(file: Path) -> bool:
    if file.suffix != ".json":
        return False
    with open(file, "rb") as opened:
        return opened.read(PIECE).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _elements(file: Path) -> Iterator[bytes]:
    """Those of an array of JSON, of which a part is in memory at a time."""
    decoder = json.JSONDecoder()
    number = 0
    # A bad byte is told by its element.
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as opened:
        text = opened.read(PIECE).lstrip()[1:]
        while True:
            text = text.lstrip(" \t\r\n,")
            if text[:1] == "]":
                return
            try:
                _, end = decoder.raw_decode(text)
            except (ValueError, RecursionError) as error:
                more = opened.read(max(PIECE, len(text)))
                if not more or len(text) > LINE_BYTES:
                    where = f"{file}, after element {grouped(number)}"
                    raise unusable(
                        where, "an array of JSON", one_line(error, kind=False), "mend the file"
                    ) from error
                text += more
                continue
            number += 1
            yield text[:end].encode(errors="surrogateescape")
            text = text[end:]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Those of a table."""
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if file.suffix == ".parquet":
            with parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(ROWS):
                    yield from map(_without_nulls, batch.to_pylist())
            return
        with pyarrow.OSFile(str(file)) as opened:
            kind = ipc.open_file if opened.read(6) == b"ARROW1" else ipc.open_stream
            opened.seek(0)
            table = kind(opened)
            batches = (
                map(table.get_batch, range(table.num_record_batches))
                if kind is ipc.open_file
                else table
            )
            for batch in batches:
                for first in range(0, len(batch), ROWS):
                    yield from map(_without_nulls, batch.slice(first, ROWS).to_pylist())
    except pyarrow.ArrowException as error:
        raise unusable(
            str(file), f"a {file.suffix} file", one_line(error, 200), "save it again"
        ) from error
    except OSError as error:  # pyarrow's own do not say of which file
        raise OSError(error.errno, str(error), str(file)) from error


def _without_nulls(value: Any) -> Any:
    """A value of a table as JSON has it: dates and the like as text."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")  # what is no text makes its line a bad one
    return value if isinstance(value, str | int | float | None) else str(value)
