"""Files of examples and what is in them: lines of JSON, an array of JSON, parquet, Arrow, a folder of `datasets`.

    weighted(["a.jsonl:0.7", "b.parquet:0.3"])     # [("a.jsonl", 0.7), ("b.parquet", 0.3)]; without weights None
    files = check_files("chat.jsonl")              # DataError for files that are not there or empty; imports no library
    for number, record in records(files[0]): ...

A record is the bytes of a line, or the object of an array's element or of a table's row. `datasets` reads tables. Lines
of JSON it does not: it gives all lines of a file one schema, fails where a key comes late in the file, turns texts such
as 2024-01-01 into dates, and does not name a line that is bad.
"""

import errno
import importlib.util
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.data import DataError, files_below, matching, readable, unusable
from trainer.terminal.text import grouped, one_line

TABLES = ".parquet", ".arrow"
KINDS = ".jsonl", *TABLES, ".json"
SHEETS = ".csv", ".tsv", ".xlsx"
FILES = "a .jsonl, .json, .parquet or .arrow file"
# How the names of files of a split begin.
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=[-_.])")
PLACES = {".jsonl": "line", ".json": "element", ".parquet": "row", ".arrow": "row"}
BATCH = 256  # rows of a table at a time


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
            f"{flag} {bare}: has no weight, but others have one; give each source a weight ({bare}:0.5), or none"
        )
    return pairs


def check_files(source: str, flag: str = "--data") -> list[Path]:
    """The files of a path, a folder or a pattern. Raises DataError if there is none, or one that is empty or cannot be
    read. Reads no record. flag: for the message."""
    root = os.path.expanduser(source)
    with readable(source, flag):
        paths = [root] if os.path.exists(root) else matching(root)
        # ** matches folders and what is in them.
        files = [*dict.fromkeys(file for path in paths for file in _inside(Path(path), flag))]
        if not files:
            fix = f"check {flag}"
            raise unusable(root, f"{FILES}, or a folder or pattern of them", "none", fix)
        for file in files:
            if not file.is_file():
                fix = f"name files in {flag}"
                raise unusable(str(file), "a file", "a folder, pipe or device", fix)
            if any(suffix.lower() in SHEETS for suffix in file.suffixes):
                fix = "save it as lines of JSON, as by pandas: to_json(.., orient='records', lines=True)"
                raise unusable(str(file), FILES, f"a {file.suffix} one", fix)
            with open(file, "rb") as opened:
                if not opened.read(1):
                    fix = f"leave it out of {flag}"
                    raise unusable(str(file), "lines of JSON", "an empty file", fix)
            if importlib.util.find_spec("datasets") is None:
                fix = "pip install -e '.[hf]'"
                raise unusable(str(file), "the library datasets, to read it", "none", fix)
    return files


def _inside(folder: Path, flag: str) -> list[Path]:
    """The files of a folder, of one kind; a file itself. Of a folder that `datasets` saved those that it names."""
    if not folder.is_dir():
        return [folder]
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        fix = f"name one of these folders in {flag}"
        raise unusable(str(folder), "one dataset", f"the splits {splits}", fix)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved(folder)
    files = {kind: files_below(str(folder), kind) for kind in KINDS}
    # A .json may be about the others.
    kinds = [kind for kind in KINDS[:-1] if files[kind]] or [KINDS[-1]]
    if len(kinds) > 1:
        fix = f"name a pattern in {flag}, such as {folder}/*{kinds[0]}"
        raise unusable(str(folder), "files of one kind", " and ".join(kinds), fix)
    names = (SPLIT.match(file.name) for file in files[kinds[0]])
    splits = sorted({name[1] for name in names if name})
    if len(splits) > 1:
        fix = f"name a pattern in {flag}, such as {folder}/**/{splits[-1]}*{kinds[0]}"
        raise unusable(str(folder), "files of one split", " and ".join(splits), fix)
    return files[kinds[0]]


def _saved(folder: Path) -> list[Path]:
    """The files that state.json names. They must lie in the folder, or where the hub's cache keeps them: a stranger's
    folder must not name a file of whoever reads it."""
    state = folder / "state.json"
    try:
        files = [
            folder / file["filename"] for file in json.loads(state.read_bytes())["_data_files"]
        ]
        targets = [file.resolve() for file in files]
    # The last of endless nesting, or of links in a circle.
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        found = one_line(error)
        raise unusable(
            str(state), "a file that datasets saved", found, "save the dataset again"
        ) from error
    homes = folder.resolve(), folder.resolve().parent.parent / "blobs"
    for file, target in zip(files, targets, strict=True):
        if not any(target.is_relative_to(home) for home in homes):
            found = f"{str(file)!r}, which is outside"
            raise unusable(
                str(state), "files of its folder", found, "copy the file into the folder"
            )
    return files


def place(file: Path, number: int) -> str:
    """Where a record is, for people."""
    return f"{file}, {PLACES.get(file.suffix, 'line')} {grouped(number)}"


def records(
    file: Path, scratch: Path | None = None
) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """(number of the record from 1, the record). scratch: a folder for what is needed meanwhile; None: where temporary
    files are. Raises DataError, and OSError."""
    if file.suffix in TABLES:
        yield from enumerate(_rows(file, scratch), 1)
        return
    with open(file, "rb") as lines:
        # A .json may hold lines of JSON, too.
        begin = lines.peek(64).strip(b"\xef\xbb\xbf \t\r\n")[:1]
        if file.suffix == ".json" and begin == b"[":
            yield from enumerate(_elements(file), 1)
        else:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def parsed(text: bytes) -> Any:
    """A value of JSON. ValueError, also for one key twice in an object; a mark of the byte order, as Windows begins
    files, is left out."""
    return json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique)


def unique(pairs: list[tuple[str, Any]]) -> dict:
    """An object of JSON. ValueError for one key twice, of which json would keep the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} twice in one object")
    return made


def _elements(file: Path) -> list:
    try:
        return parsed(file.read_bytes())
    except (ValueError, RecursionError) as error:
        found = one_line(error, kind=False)
        raise unusable(str(file), "an array of JSON", found, "correct the file") from error


def _rows(file: Path, scratch: Path | None) -> Iterator[dict[str, Any]]:
    """Those of a table. `datasets` copies it first, which is mapped into memory then: a page of the file itself would
    end the process with SIGBUS where the file shrinks."""
    import datasets
    from datasets.packaged_modules.arrow.arrow import Arrow
    from datasets.packaged_modules.parquet.parquet import Parquet

    datasets.disable_progress_bars()
    builder = Parquet if file.suffix == ".parquet" else Arrow
    with _scratch(scratch, file) as folder:
        # By a plain name: `datasets` takes brackets for a pattern, and a :: for a place on another machine.
        link = Path(folder, "table" + file.suffix)
        link.symlink_to(file.resolve())
        try:
            made = builder(cache_dir=folder, data_files={"train": [str(link)]})
            made.download_and_prepare()
            table = made.as_dataset(split="train")
        except Exception as error:  # whatever strange bytes lead to
            if full := no_room(error):
                raise without_room(folder, f"a copy of {file}", full) from error
            name = ""
            with suppress(Exception):
                name = _unknown_column(file)
            if name:
                fix = "leave the column out, or save it as a struct, a list or text of JSON"
                raise unusable(str(file), "columns that datasets can read", name, fix) from error
            found = one_line(error.__cause__ or error, 200)
            raise unusable(str(file), f"a {file.suffix} file", found, "save it again") from error
        # As Arrow has them: `datasets` would open the files that columns of images and sounds name.
        for batch in table.with_format("arrow").iter(BATCH):
            for row in batch.to_pylist():
                yield _value(row, table.features)


def _unknown_column(file: Path) -> str:
    """The name and the type of a column that `datasets` has no type for, such as a map; "" if it knows all."""
    import datasets
    import pyarrow
    from pyarrow import ipc, parquet

    if file.suffix == ".parquet":
        schema = parquet.read_schema(file)
    else:
        with open(file, "rb") as opened:
            begin = opened.read(6)
            opened.seek(0)
            read = ipc.open_file if begin == b"ARROW1" else ipc.open_stream
            schema = read(opened).schema
    for field in schema:
        try:
            datasets.Features.from_arrow_schema(pyarrow.schema([field]))
        except ValueError:
            return f"{field.name} of type {field.type}"
    return ""


def _scratch(scratch: Path | None, file: Path) -> tempfile.TemporaryDirectory:
    try:
        return tempfile.TemporaryDirectory(dir=scratch)
    except OSError as error:  # of which --data is no cause
        raise without_room(scratch or "TMPDIR", f"a copy of {file}", error) from error


def no_room(error: BaseException | None) -> BaseException | None:
    """The error of a full disk, a quota or a limit of the size of files that is behind another; Arrow has text."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
        if re.search(r"No space left|quota exceeded|File too large", str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


def without_room(folder: str | Path, what: str, error: BaseException) -> DataError:
    fix = "free some space, or name other folders by XDG_CACHE_HOME and TMPDIR"
    return unusable(str(folder), f"room for {what}", one_line(error, 200, kind=False), fix)


def _value(value: Any, feature: Any = None) -> Any:
    """A value of a table as JSON has it: dates as text, without nulls, which in a table are also what a row lacks and
    others have. feature: what `datasets` knows of its type."""
    import datasets

    if isinstance(feature, datasets.Json) and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    if isinstance(value, dict):
        kinds = feature if isinstance(feature, dict) else {}
        return {
            key: _value(each, kinds.get(key)) for key, each in value.items() if each is not None
        }
    if isinstance(value, list):
        return [_value(each, getattr(feature, "feature", None)) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")  # what is no text makes its line a bad one
    return value if isinstance(value, str | int | float | None) else str(value)
