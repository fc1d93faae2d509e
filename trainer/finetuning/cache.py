"""Tokenised data as one file, which is made once and then mapped into memory by every process of a host.

    data = tokenised("chat.jsonl", tokenizer)      # DataError as `read` raises it

The file's name is a hash of all that it depends on: the content of the data, the tokenizer with its template, versions.
A process that makes it holds a lock, so that the other ranks and jobs wait for it, and writes it as a whole. A file
that is damaged is made again. Where there is no such folder or lock, every process tokenises for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.data import readable, unusable
from trainer.distributed.terminal import one_line, tell
from trainer.finetuning.examples import Tokenised, check_files, read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1  # of the file and of the rules by which it is made: a change of either needs another number
ARRAYS = Tokenised._fields[:-1]


def _digest(data: Tokenised) -> str:
    made = hashlib.blake2b(digest_size=16)
    for name in ARRAYS:
        made.update(np.ascontiguousarray(getattr(data, name)))
    return made.hexdigest()


def _key(files: list[Path], tokenizer: PreTrainedTokenizerFast) -> str:
    import tokenizers
    import transformers

    about = tokenizer.chat_template, tokenizer.special_tokens_map, transformers.__version__, tokenizers.__version__
    made = hashlib.blake2b(repr((FORMAT, *about)).encode(), digest_size=16)
    made.update(tokenizer.backend_tokenizer.to_str().encode())
    for file in files:
        with open(file, "rb") as opened:
            made.update(hashlib.file_digest(opened, "blake2b").digest())
    return made.hexdigest()


def _load(path: Path) -> Tokenised | None:
    """What is in the file, mapped into memory; None if it is not there or is not as it was written."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    with suppress(SafetensorError, OSError, ValueError, KeyError, TypeError):
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
            found = Tokenised(*(file.get_tensor(name).numpy() for name in ARRAYS), about)
        if _digest(found) == about["digest"]:
            return found
    tell(f"cache: {path} is damaged and is made again")
    return None


def _save(path: Path, data: Tokenised) -> None:
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        about = dict(about=json.dumps(data.about))
        save_file({name: getattr(data, name) for name in ARRAYS}, f"{folder}/data", metadata=about)
        os.replace(f"{folder}/data", path)


def tokenised(source: str, tokenizer: PreTrainedTokenizerFast, bad_lines: str = "stop", cache: str | None = None,
              flag: str = "--data") -> tuple[Tokenised, list[Path]]:  # fmt: skip
    """The examples of a source, with `digest` in what is told about them, and its files. bad_lines: "stop" at the first
    or "skip" and count them. cache: a folder (None: simple_fsdp in $XDG_CACHE_HOME or ~/.cache). flag: that of the
    source, for messages. Raises ValueError for another bad_lines, and DataError for what cannot be used."""
    from safetensors import SafetensorError

    if bad_lines not in ("stop", "skip"):
        raise ValueError(f"--bad-lines {bad_lines}: expected stop or skip")
    files, found = check_files(source, flag), None
    if not getattr(tokenizer, "is_fast", False):
        fix = "name a model with a tokenizer.json"
        raise unusable(source, "a fast tokenizer, which tells where its tokens lie", type(tokenizer).__name__, fix)

    def make() -> Tokenised:
        with readable(source, flag):
            made = read(files, tokenizer, stop=bad_lines == "stop")
        return made._replace(about=made.about | dict(digest=_digest(made)))

    with readable(source, flag):
        name = f"chat-{_key(files, tokenizer)}"
    folder = Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "simple_fsdp"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{name}.lock", "w") as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            path = folder / f"{name}.safetensors"
            found = _load(path)
            if found is None or (bad_lines == "stop" and found.about["bad"][0]):
                found = make()
                _save(path, found)
                found = _load(path) or found
    except (OSError, SafetensorError) as error:
        tell(f"cache: {folder}: {one_line(error)}; every process tokenises the data for itself")
        found = found or make()
    return found, files
