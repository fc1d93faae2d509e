"""Batches of next-token training data, the same for every number of ranks.

    batches = Batches("stdlib", global_batch=64, seqlen=1024, vocab=32768, seed=0, rank=rank, world=world)
    tokens, targets = next(batches)        # int64 on the CPU, [B, T] each; targets are tokens moved on by one
    batches.sample = 6400                  # resume: the counter is the whole state

Sources: `stdlib` (the bytes of Python's own library), `text:PATH` (the bytes of a file or folder), `bin:GLOB` (token
shards of nanoGPT or llm.c), `random` (new tokens each step, for timing), `overfit` (the first batch of stdlib, always).
Sample i depends on (source, seqlen, seed, i) alone, and a rank takes its slice of every global batch.
"""

import glob
import hashlib
import os
import re
import struct
import sysconfig
from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.distributed.terminal import grouped as _n

# Shapes: B rows of this rank in a batch, T tokens of a row (--seqlen)
LLMC_HEADER = 1024  # bytes: 256 int32, of which three are used: magic, version, number of tokens
LLMC_FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}  # magic -> version, dtype (GPT-2, Llama 3)
LLMC_MAGICS = range(20240101, 20241232)  # llm.c's magic is a date; raw uint16 tokens would need an id above 54'000
SCAN_BYTES = 64 << 20  # smaller streams are searched for ids outside the vocabulary when they are opened
# Folders that `stdlib` leaves out, because not every installation of Python has the same files in them.
NOT_TEXT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class DataError(Exception):
    """A data file cannot be used. Names the file, the place in it, what was expected and found, and the fix."""


def _bad(where: str, expected: str, found: str, fix: str) -> DataError:
    return DataError(f"{where}: expected {expected}, found {found}; {fix}")


def check_source(source: str) -> None:
    """ValueError unless `source` has one of the forms of --data. Opens no file."""
    if not re.fullmatch(r"stdlib|random|overfit|(text|bin):.+", source):
        raise ValueError(f"--data {source}: expected one of stdlib, text:PATH, bin:GLOB, random, overfit")


class Shard(NamedTuple):  # one file of tokens, or all files of a text source
    path: str
    tokens: np.ndarray  # [n] uint8, uint16 or uint32, in memory or mapped; never written
    skipped: int  # bytes of the file before the first token
    head: bytes  # the first KiB of the file, for the fingerprint


class Stream:
    """Several shards as one long sequence of token ids; a read may cross from one shard into the next."""

    def __init__(self, shards: list[Shard], vocab: int):
        self.shards, self.vocab = shards, vocab
        self.ends = list(accumulate(len(shard.tokens) for shard in shards))
        shape = [(shard.skipped + shard.tokens.nbytes, shard.head) for shard in shards]
        self.fingerprint = hashlib.blake2b(repr(shape).encode(), digest_size=16).hexdigest()
        if sum(shard.tokens.nbytes for shard in shards) < SCAN_BYTES:
            for shard in shards:
                self._check(shard, 0, shard.tokens)

    def read(self, start: int, out: np.ndarray) -> None:
        """Fills `out` [T+1] with the ids from position `start` on. DataError for one outside the vocabulary."""
        done, index = 0, bisect_right(self.ends, start)
        while done < len(out):
            shard = self.shards[index]
            at = start + done - self.ends[index] + len(shard.tokens)
            ids = shard.tokens[at : at + len(out) - done]
            self._check(shard, at, ids)
            out[done : done + len(ids)] = ids
            done, index = done + len(ids), index + 1

    def _check(self, shard: Shard, at: int, ids: np.ndarray) -> None:
        if ids.max() < self.vocab:
            return
        bad = int((ids >= self.vocab).argmax())
        where = f"{shard.path}, token {_n(at + bad)} (byte {_n(shard.skipped + (at + bad) * shard.tokens.itemsize)})"
        fix = "raise --vocab to that of the tokenizer that wrote the file"
        raise _bad(where, f"an id below --vocab {self.vocab}", str(int(ids[bad])), fix)


def _files(root: str, suffix: str = "", skip: Collection[str] = ()) -> list[Path]:
    """`root` if it is no folder; else the files below it, sorted, without hidden ones and folders named in `skip`."""
    def stop(error: OSError):
        raise error

    found = []
    if not os.path.isdir(root):
        return [Path(root)]
    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in names if not name.startswith(".") and name.endswith(suffix)]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


def _open_tokens(path: str) -> Shard:
    """Maps a token file of nanoGPT (raw uint16) or llm.c (header, uint16 or uint32). Raises OSError and DataError."""
    with open(path, "rb") as file:
        size, again = os.fstat(file.fileno()).st_size, "copy or write the file again"
        if not size:
            raise _bad(f"{path}, byte 0", "token ids", "an empty file", f"{again}, or leave it out of --data")
        memory = np.memmap(file, mode="r")
    magic, version, count = struct.unpack_from("<3i", memory) if size >= 12 else (0, 0, 0)
    skipped, known, dtype = LLMC_HEADER, *LLMC_FORMATS.get(magic, (1, np.uint16))
    if magic not in LLMC_MAGICS:
        skipped, count = 0, size // 2
        if size % 2:
            raise _bad(f"{path}, byte {_n(size - 1)}", "an even number of bytes (raw uint16)", _n(size), again)
    elif magic not in LLMC_FORMATS:
        expected = f"llm.c's magic for tokens ({' or '.join(map(str, LLMC_FORMATS))})"
        raise _bad(f"{path}, byte 0", expected, str(magic), "name files of tokens in --data")
    elif version != known:
        raise _bad(f"{path}, byte 4", f"version {known} of magic {magic}", str(version), again)
    whole = skipped + count * np.dtype(dtype).itemsize
    if count < 1 or size != whole:
        raise _bad(f"{path}, byte 8", f"{_n(whole)} bytes for {_n(count)} tokens", f"{_n(size)} bytes", again)
    return Shard(path, memory[skipped:].view(dtype), skipped, memory[:1024].tobytes())


def open_source(source: str, vocab: int) -> tuple[Stream, str]:
    """Tokens of any source but `random`, and a description. Raises ValueError for a small --vocab, and DataError."""
    kind, _, where = ("stdlib" if source == "overfit" else source).partition(":")
    if kind != "bin" and vocab < 256:
        raise ValueError(f"--vocab {vocab}: --data {source} is bytes and needs at least 256; raise it or --data random")
    root = sysconfig.get_path("stdlib") if kind == "stdlib" else os.path.expanduser(where)
    try:
        if kind == "bin":
            files = [root] if os.path.isfile(root) else sorted(filter(os.path.isfile, glob.glob(root, recursive=True)))
            if not files:
                raise _bad(root, "at least one token file", "none", "check --data bin:GLOB (a folder: bin:DIR/*.bin)")
            shards = [_open_tokens(file) for file in files]
        else:
            files = _files(root, ".py", NOT_TEXT) if kind == "stdlib" else _files(root)
            text = bytearray().join(file.read_bytes() for file in files)
            if not text:
                found = f"0 bytes in {_n(len(files))} files"
                raise _bad(f"{root}, byte 0", "text", found, "name a file or folder with text")
            shards = [Shard(root, np.frombuffer(text, np.uint8), 0, bytes(text[:1024]))]
    except OSError as error:
        where, found = error.filename or root, error.strerror or str(error)
        raise _bad(where, "readable data", found, "check the path in --data and its permissions") from error
    stream = Stream(shards, vocab)
    return stream, f"{source}, {_n(len(files))} file{'s' * (len(files) != 1)}, {_n(stream.ends[-1])} tokens"


def _generator(*key: str | int) -> torch.Generator:
    """A CPU generator for `key`, which is hashed because torch's CPU generator keeps only 32 bits of its seed."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little"))


class Batches(Iterator):
    """Infinite iterator over (tokens [B, T], targets [B, T]), int64 on the CPU; B = global_batch / world rows. A sample
    is T+1 tokens, and those of an epoch lie on a grid with step T: the last target of one is the first token of the
    next. Each epoch has its own seeded order and offset of the grid; fewer than 2T tokens are left out. Raises
    ValueError for bad flags, DataError for bad files: of large ones while iterating, on the rank that meets it."""

    def __init__(self, source: str, *, global_batch: int, seqlen: int, vocab: int, seed: int,
                 rank: int = 0, world: int = 1, start: int = 0):
        check_source(source)
        rows, rest = divmod(global_batch, world)
        if rest or rows < 1:
            raise ValueError(f"--batch: {global_batch} samples a step do not divide among {world} ranks "
                             f"({global_batch} = {world} ranks x {rows} + {rest}); use a multiple of {world}")
        self.global_batch, self.seqlen, self.vocab, self.seed = global_batch, seqlen, vocab, seed
        self.rows, self.rank, self.overfit = rows, rank, source == "overfit"
        self.sample = start  # samples consumed so far by all ranks together; set it to resume
        self.fingerprint = source  # changes when the data does; to be saved beside `sample`
        self.stream, self.epoch_samples = None, None  # None: no epochs
        if source == "random":
            self.description = f"random: fresh tokens below {_n(vocab)}, no epochs"
            return
        self.stream, words = open_source(source, vocab)
        targets = self.stream.ends[-1] - 1
        if targets < seqlen:
            expected = f"at least {_n(seqlen + 1)} tokens (--seqlen and one for the last target)"
            raise _bad(f"{source}, token {_n(targets + 1)}", expected, "the end", "add data or lower --seqlen")
        self.epoch_samples = max(1, (targets - seqlen + 1) // seqlen)  # the same number at every offset
        self._offsets = min(seqlen, targets - self.epoch_samples * seqlen + 1)
        self._epoch = -1, 0, torch.empty(0)  # number, offset of the grid, order of the chunks
        self.fingerprint = self.stream.fingerprint
        self.description = f"{words}, {_n(self.epoch_samples)} samples of {_n(seqlen)} an epoch"
        if self.overfit:
            self.description += f", the first {_n(global_batch)} for ever"
            self.fingerprint += f", the first {global_batch}"

    def __next__(self) -> tuple[Tensor, Tensor]:
        first = (0 if self.overfit else self.sample) + self.rank * self.rows
        out = torch.empty(self.rows, self.seqlen + 1, dtype=torch.int64, device="cpu")  # [B, T+1]
        for sample, row in enumerate(out, first):
            if self.stream is None:
                row.random_(0, self.vocab, generator=_generator("random", self.seed, sample))
            else:
                self.stream.read(self.position(sample), row.numpy())
        self.sample += self.global_batch
        return out[:, :-1].contiguous(), out[:, 1:].contiguous()  # [B, T], [B, T]

    def position(self, sample: int) -> int:
        """Index in the stream of the first token of a sample; not for `random`."""
        epoch, index = divmod(sample, self.epoch_samples)
        if self._epoch[0] != epoch:
            generator = _generator("epoch", self.seed, epoch)
            offset = int(torch.randint(self._offsets, (1,), generator=generator, device="cpu"))
            order = torch.randperm(self.epoch_samples, generator=generator, device="cpu")
            self._epoch = epoch, offset, order
        _, offset, order = self._epoch
        return offset + int(order[index]) * self.seqlen
