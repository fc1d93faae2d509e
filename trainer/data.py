"""Batches of next-token training data, the same for every number of ranks.

    batches = Batches("stdlib", global_batch=64, seqlen=1024, vocab=32768, seed=0, rank=rank, world=world)
    tokens, targets = next(batches)        # int64 on the CPU, [B, T] each; targets are tokens moved on by one
    batches.sample = 6400                  # resume: the counter is the whole state
    for tokens, targets in batches.held_out(8): ...       # with hold_out=True: of data that is never trained on

Sources: `stdlib` (the bytes of Python's own library), `text:PATH` (the bytes of a file or folder), `bin:GLOB` (token
shards of nanoGPT or llm.c), `random` (new tokens each step, for timing), `overfit` (the first batch of stdlib, always).
Sample i depends on (source, seqlen, seed, i) alone, and a rank takes its slice of every global batch.
check_source and check_files tell what is wrong with a source without torch, whose import takes seconds.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import struct
import sysconfig
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.terminal.output import limit_behind, shown
from trainer.terminal.text import did_you_mean
from trainer.terminal.text import grouped as _n

if TYPE_CHECKING:  # bad files are told before torch is imported, which takes seconds
    import torch
    from torch import Tensor

# Shapes: B rows of this rank in a batch, T tokens of a row (--seqlen)
LLMC_HEADER = 1024  # bytes: 256 int32, of which three are used: magic, version, number of tokens
# Magic -> version, dtype (GPT-2, Llama 3).
LLMC_FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
# llm.c's magic is a date; raw uint16 tokens would need an id above 54'000.
LLMC_MAGICS = range(20240101, 20241232)
HELD_OUT = 64  # one part in so many, the last, and at least one sample, is held out
# Smaller streams are searched for ids outside the vocabulary when they are opened.
SCAN_BYTES = 64 << 20
PROMPT = 64  # tokens before what --sample writes, at most
# Folders that `stdlib` leaves out, because not every installation of Python has the same files in them.
NOT_TEXT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class DataError(Exception):
    """A data file cannot be used. Names the file, the place in it, what was expected and found, and the fix."""


def unusable(where: str, expected: str, found: str, fix: str) -> DataError:
    return DataError(f"{where}: expected {expected}, found {found}; {fix}")


def check_source(source: str) -> None:
    """ValueError unless `source` has one of the forms of --data. Opens no file."""
    if not re.fullmatch(r"stdlib|random|overfit|(text|bin):.+", source):
        like = did_you_mean(source, ("stdlib", "text:", "bin:", "random", "overfit"))
        like = f"; did you mean text:{source}?" if os.path.exists(source) else like
        raise ValueError(
            f"--data {source}: expected one of stdlib, text:PATH, bin:GLOB, random, overfit{like}"
        )


class Shard(NamedTuple):  # one file of tokens, or all files of a text source
    path: str
    count: int  # of tokens
    itemsize: int  # bytes of a token
    skipped: int  # bytes of the file before the first token
    head: bytes  # the first KiB of the file, for the fingerprint
    read: Callable[[int, int], np.ndarray]  # (first token, how many) -> [n] uint8, uint16 or uint32


class Stream:
    """Several shards as one long sequence of token ids; a read may cross from one shard into the next."""

    def __init__(self, shards: list[Shard], vocab: int):
        self.shards = shards
        self.vocab = vocab
        self.ends = list(accumulate(shard.count for shard in shards))
        shape = [(shard.skipped + shard.count * shard.itemsize, shard.head) for shard in shards]
        self.fingerprint = hashlib.blake2b(repr(shape).encode(), digest_size=16).hexdigest()
        if sum(nbytes for nbytes, _ in shape) < SCAN_BYTES:
            for shard in shards:
                self._check(shard, 0, shard.read(0, shard.count))

    def read(self, start: int, out: np.ndarray) -> None:
        """Fills `out` [T+1] with the ids from position `start` on. DataError for one outside the vocabulary."""
        done = 0
        index = bisect_right(self.ends, start)
        while done < len(out):
            shard = self.shards[index]
            at = start + done - self.ends[index] + shard.count
            ids = shard.read(at, min(len(out) - done, shard.count - at))
            self._check(shard, at, ids)
            out[done : done + len(ids)] = ids
            done = done + len(ids)
            index = index + 1

    def _check(self, shard: Shard, at: int, ids: np.ndarray) -> None:
        if ids.max() < self.vocab:
            return
        bad = int((ids >= self.vocab).argmax())
        where = f"{shard.path}, token {_n(at + bad)} (byte {_n(shard.skipped + (at + bad) * shard.itemsize)})"
        fix = "raise --vocab to that of the tokenizer that wrote the file"
        raise unusable(where, f"an id below --vocab {self.vocab}", str(int(ids[bad])), fix)


def files_below(root: str, suffix: str = "", skip: Collection[str] = ()) -> list[Path]:
    """`root` if it is no folder; else the files below it, sorted, without hidden ones and folders named in `skip`."""

    def stop(error: OSError):
        raise error

    paths = []
    if not os.path.isdir(root):
        return [Path(root)]
    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        paths += [
            Path(folder, name)
            for name in names
            if not name.startswith(".") and name.endswith(suffix)
        ]
    return sorted(
        (file for file in paths if file.is_file()),
        key=lambda file: file.relative_to(root).as_posix(),
    )


def matching(pattern: str) -> list[str]:
    """The paths of a pattern, sorted. DataError where ** comes to one twice, as by a link to a folder around it."""
    paths = []
    first = {}
    for path in glob.iglob(pattern, recursive=True):
        other = first.setdefault(os.path.realpath(path), path)
        if "**" in pattern and os.path.normpath(other) != os.path.normpath(path):
            fix = "remove the link between them, or name a pattern without **"
            raise unusable(
                pattern, "each file once", f"{other} and {path}, which are the same file", fix
            )
        paths.append(path)
    return sorted(paths)


def reader(
    path: str, file: int, dtype: np.dtype, skipped: int, fix: str = "write it again"
) -> Callable[[int, int], np.ndarray]:
    """What reads tokens of an open file: (first token, how many) -> [n], or DataError. Not by a mapping: a page that is
    no longer there, of a file that has shrunk, would end the process with SIGBUS. Closes the file with itself."""

    def read(at: int, count: int) -> np.ndarray:
        first = skipped + at * dtype.itemsize
        with readable(path):
            content = os.pread(file, count * dtype.itemsize, first)
        if len(content) < count * dtype.itemsize:
            where = f"{path}, byte {_n(first + len(content))}"
            raise unusable(
                where,
                "as many bytes as when the run began",
                "the end of the file",
                f"the file has shrunk: {fix}",
            )
        return np.frombuffer(content, dtype)

    weakref.finalize(read, os.close, file)
    return read


def _open_tokens(path: str) -> Shard:
    """Opens a token file of nanoGPT (raw uint16) or llm.c (header, uint16 or uint32). Raises OSError and DataError."""
    file = os.open(path, os.O_RDONLY)
    size = os.fstat(file).st_size
    again = "copy or write the file again"
    if not size:
        raise unusable(
            f"{path}, byte 0", "token ids", "an empty file", f"{again}, or leave it out of --data"
        )
    head = os.pread(file, 1024, 0)
    magic, version, count = struct.unpack_from("<3i", head) if size >= 12 else (0, 0, 0)
    skipped, known, dtype = LLMC_HEADER, *LLMC_FORMATS.get(magic, (1, np.uint16))
    if magic not in LLMC_MAGICS:
        skipped = 0
        count = size // 2
        if size % 2:
            raise unusable(
                f"{path}, byte {_n(size - 1)}",
                "an even number of bytes (raw uint16)",
                _n(size),
                again,
            )
    elif magic not in LLMC_FORMATS:
        expected = (
            f"the magic number of llm.c's token files ({' or '.join(map(str, LLMC_FORMATS))})"
        )
        raise unusable(f"{path}, byte 0", expected, str(magic), "name token files in --data")
    elif version != known:
        raise unusable(f"{path}, byte 4", f"version {known} of magic {magic}", str(version), again)
    dtype = np.dtype(dtype)
    whole = skipped + count * dtype.itemsize
    if count < 1 or size != whole:
        raise unusable(
            f"{path}, byte 8",
            f"{_n(whole)} bytes for {_n(count)} tokens",
            f"{_n(size)} bytes",
            again,
        )
    read = reader(str(path), file, dtype, skipped)
    return Shard(path, count, dtype.itemsize, skipped, head, read)


def _found(source: str) -> tuple[str, list[Path]]:
    """(folder, file or pattern, its files) of any source but `random`; of bin at least one. DataError, OSError."""
    kind, _, where = ("stdlib" if source == "overfit" else source).partition(":")
    root = sysconfig.get_path("stdlib") if kind == "stdlib" else os.path.expanduser(where)
    if kind != "bin":
        if os.path.exists(root) and not os.path.isfile(root) and not os.path.isdir(root):
            raise unusable(
                root, "a file or folder", "a pipe or device", "save its output as a file"
            )
        return root, files_below(root, ".py", NOT_TEXT) if kind == "stdlib" else files_below(root)
    files = (
        [root]
        if os.path.isfile(root)
        else [path for path in matching(root) if os.path.isfile(path)]
    )
    if not files:
        raise unusable(
            root,
            "at least one token file",
            "none",
            "check --data bin:GLOB (a folder: bin:DIR/*.bin)",
        )
    return root, files


def inputs(source: str) -> list[str | Path]:
    """What a source of files reads: its folder, or its files."""
    if not source.startswith(("text:", "bin:")):
        return []
    with readable(source):
        root, files = _found(source)
    return [root] if os.path.isdir(root) else files


@contextmanager
def readable(source: str, flag: str = "--data") -> Iterator[None]:
    """Inside it an OSError is a DataError."""
    try:
        yield
    except OSError as error:
        where = error.filename or source
        found = error.strerror or str(error)
        fix = limit_behind(error) or f"check the path in {flag} and its permissions"
        raise unusable(where, "readable data", found, fix) from error


def _check_length(
    source: str, root: str, files: list, tokens: int, seqlen: int = 0, hold_out: bool = False
) -> None:
    if not tokens:
        amount = f"0 bytes in {_n(len(files))} file{'s' * (len(files) != 1)}"
        raise unusable(f"{root}, byte 0", "text", amount, "name a file or folder with text")
    needed = (seqlen + 1) * (1 + hold_out)
    if tokens < needed:
        again = ", twice, because --eval-every holds out a sequence" * hold_out
        fix = " or leave out --eval-every" * hold_out
        expected = f"at least {_n(needed)} tokens (--seqlen + 1{again})"
        raise unusable(
            f"{source}, token {_n(tokens)}",
            expected,
            "the end of the data",
            f"add data or lower --seqlen{fix}",
        )


def check_files(source: str, seqlen: int, hold_out: bool = False) -> None:
    """DataError for what names, sizes and headers tell of the files of a source. Reads no text, imports no torch."""
    if not source.startswith(("text:", "bin:")):
        return
    with readable(source):
        root, files = _found(source)
        if source.startswith("bin:"):
            tokens = sum(_open_tokens(file).count for file in files)
            _check_length(source, root, files, tokens, seqlen, hold_out)
        else:
            _check_length(
                source, root, files, sum(file.stat().st_size for file in files), seqlen, hold_out
            )


def open_source(source: str, vocab: int) -> tuple[Stream, str]:
    """Tokens of any source but `random`, and a description. Raises ValueError for a small --vocab, and DataError."""
    if not source.startswith("bin:") and vocab < 256:
        raise ValueError(
            f"--vocab {vocab}: --data {source} is read as bytes and needs at least 256; raise it, or use --data random"
        )
    with readable(source):
        root, files = _found(source)
        if source.startswith("bin:"):
            shards = [_open_tokens(file) for file in files]
        else:
            text = bytearray().join(file.read_bytes() for file in files)
            _check_length(source, root, files, len(text))
            ids = np.frombuffer(text, np.uint8)
            shards = [
                Shard(
                    root, len(ids), 1, 0, bytes(text[:1024]), lambda at, count: ids[at : at + count]
                )
            ]
    stream = Stream(shards, vocab)
    return (
        stream,
        f"{source}, {_n(len(files))} file{'s' * (len(files) != 1)}, {_n(stream.ends[-1])} tokens",
    )


def generator(*key: str | int) -> torch.Generator:
    """A CPU generator for `key`, which is hashed because torch's CPU generator keeps only 32 bits of its seed."""
    import torch

    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little"))


def rows_of_a_rank(global_batch: int, world: int) -> int:
    """Rows of a global batch on each rank. ValueError if they do not divide."""
    rows, rest = divmod(global_batch, world)
    if rest or rows < 1:
        raise ValueError(
            f"--batch: {global_batch} samples a step do not divide among {world} ranks "
            f"({global_batch} = {world} ranks x {rows} + {rest}); use a multiple of {world}"
        )
    return rows


class ReadAhead(Iterator):
    """Batches of which two are read before they are needed, so that all ranks end together where one cannot read on."""

    ahead: dict[int, Any] = {}  # batches that were read, by their first sample
    # Tokens that end what is learned, by their text, of which a checkpoint tells its export.
    learned_ends: dict[str, int] = {}
    error: DataError | None = None  # what could not be read

    def taken(self) -> Any:
        """The batch that begins with `sample`, which goes on to the next one."""
        out = self.ahead.pop(self.sample, None)
        out = self._batch(self.sample) if out is None else out
        self.sample += self.global_batch
        return out

    def problem(self) -> DataError | None:
        """Why this rank cannot go on to the batch after the next one, which is read now, with the next one: all ranks
        can then end together, at a boundary that comes before any of them needs it."""
        if self.error is None:
            wanted = self.sample, self.sample + self.global_batch
            try:
                self.ahead = {
                    sample: self.ahead[sample] if sample in self.ahead else self._batch(sample)
                    for sample in wanted
                }
            except DataError as error:
                self.error = error
        return self.error


class Batches(ReadAhead):
    """Infinite iterator over (tokens [B, T], targets [B, T]), int64 on the CPU; B = global_batch / world rows. A sample
    is T+1 tokens, and those of an epoch lie on a grid with step T: the last target of one is the first token of the
    next. Each epoch has its own seeded order and offset of the grid; fewer than 2T tokens are left out. hold_out: the
    last 1/64 of the tokens, at least one sample, is in no batch (random: other tokens), but in `held_out`. Raises
    ValueError for bad flags, DataError for bad files: of large ones while iterating, on the rank that meets it."""

    ends: Collection[int] = ()  # tokens that end what --sample writes

    def __init__(
        self,
        source: str,
        *,
        global_batch: int,
        seqlen: int,
        vocab: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
        hold_out: bool = False,
    ):
        check_source(source)
        self.global_batch = global_batch
        self.seqlen = seqlen
        self.vocab = vocab
        self.seed = seed
        self.rows = rows_of_a_rank(global_batch, world)
        self.rank = rank
        self.overfit = source == "overfit"
        self.sample = start  # samples consumed so far by all ranks together; set it to resume
        self.fingerprint = source  # changes when the data does; to be saved beside `sample`
        self.stream, self.epoch_samples = None, None  # None: no epochs
        self.bytes = source != "random" and not source.startswith("bin:")  # a token is a byte
        self.unit = "bytes" if self.bytes else "token ids"
        self.held = range(hold_out << 31)  # what is held out: of a stream, where each sample begins
        if source == "random":
            self.description = f"random: fresh tokens below {_n(vocab)}, no epochs"
            return
        self.stream, words = open_source(source, vocab)
        tokens = self.stream.ends[-1]
        _check_length(source, source, self.stream.shards, tokens, seqlen, hold_out)
        held = max(tokens // HELD_OUT, seqlen + 1) if hold_out else 0
        self.held = range(tokens - held, tokens - seqlen, seqlen)
        targets = tokens - held - 1
        # The same number at every offset.
        self.epoch_samples = max(1, (targets - seqlen + 1) // seqlen)
        self._offsets = min(seqlen, targets - self.epoch_samples * seqlen + 1)
        self._epoch = -1, 0, ()  # number, offset of the grid, order of the chunks
        self.fingerprint = self.stream.fingerprint
        self.description = f"{words}, {_n(self.epoch_samples)} samples of {_n(seqlen)} an epoch"
        if held:
            self.description += f", {_n(len(self.held))} more held out"
            self.fingerprint += f", without the last {held} tokens"
        if self.overfit:
            self.description += f", the first {_n(global_batch)} for ever"
            self.fingerprint += f", the first {global_batch}"

    def __next__(self) -> tuple[Tensor, Tensor]:
        out = self.taken()  # [B, T+1]
        return out[:, :-1].contiguous(), out[:, 1:].contiguous()  # [B, T], [B, T]

    def _batch(self, sample: int) -> Tensor:
        """This rank's rows of the batch that begins with a sample: [B, T+1]."""
        import torch

        first = (0 if self.overfit else sample) + self.rank * self.rows
        return torch.stack([self.row(index) for index in range(first, first + self.rows)])

    def held_examples(self, count: int) -> int:
        """How many sequences `held_out` has in so many batches."""
        return min(count * self.global_batch, len(self.held))

    def held_out(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The first `count` batches of what is held out, always the same: (tokens [B, T], targets [B, T]) of this rank.
        Where less is held out there are fewer, and targets that the last one lacks are IGNORE. What cannot be read is
        left out, too, and noted in `error`: the other ranks wait for this one."""
        import torch

        from lean import IGNORE

        for first in range(0, min(count * self.global_batch, len(self.held)), self.global_batch):
            # [B, T+1].
            out = torch.zeros(self.rows, self.seqlen + 1, dtype=torch.int64, device="cpu")
            first += self.rank * self.rows
            rows_left = max(0, min(self.rows, len(self.held) - first))
            try:
                for i in range(rows_left):
                    out[i] = self.row(first + i, held=True)
            except DataError as error:
                self.error = error
                rows_left = 0
            tokens, targets = out[:, :-1].contiguous(), out[:, 1:].contiguous()  # [B, T], [B, T]
            targets[rows_left:] = IGNORE
            yield tokens, targets

    def prompt(self, most: int) -> list[int]:
        """What --sample goes on from: the first tokens of what is held out or, without it, of what is trained on."""
        return self.row(0, held=len(self.held) > 0)[: min(most, PROMPT)].tolist()

    def readable(self, ids: list[int]) -> str:
        """Bytes as text, other tokens as their ids."""
        if not self.bytes:
            return f" {' '.join(map(str, ids))} "
        return shown(bytes(ids).decode("utf-8", "replace"))

    def row(self, sample: int, held: bool = False) -> Tensor:
        """[T+1]: a sample that is trained on or, if `held`, one that is held out."""
        import torch

        row = torch.empty(self.seqlen + 1, dtype=torch.int64, device="cpu")
        if self.stream is None:
            row.random_(
                0,
                self.vocab,
                generator=generator("held out" if held else "random", self.seed, sample),
            )
        else:
            self.stream.read(self.held[sample] if held else self.position(sample), row.numpy())
        return row

    def position(self, sample: int) -> int:
        """Index in the stream of the first token of a sample; not for `random`."""
        epoch, index = divmod(sample, self.epoch_samples)
        if self._epoch[0] != epoch:
            import torch

            drawn = generator("epoch", self.seed, epoch)
            offset = int(torch.randint(self._offsets, (1,), generator=drawn, device="cpu"))
            order = torch.randperm(self.epoch_samples, generator=drawn, device="cpu")
            self._epoch = epoch, offset, order
        _, offset, order = self._epoch
        return offset + int(order[index]) * self.seqlen
