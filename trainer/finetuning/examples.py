"""Lines of chat data as token ids, and which of them the model learns; made once, then read from disk by every process.

    data = tokenised(check_files("chat.jsonl"), tokenizer, Rules())      # DataError for the first bad line

What sources.py finds in files is a line here, whatever the file, once columns.py has brought it into one of three
forms: {"messages": [..]}, {"prompt": .., "completion": ..} (strings or lists of messages) or {"text": ..}, looked for
in this order; "tools" and "chat_template_kwargs" go to the template, other keys are named in the summary. Of
messages the answers of the assistant are learned, each with the token that ends it, but for those with weight 0; of a
completion and of a text all of it, and the tokenizer's eos after it. What comes after the last answer is cut off and
counted. Anything else that a template does not render makes the line a bad one (templates.py).

What is made goes to disk at once, so that memory does not grow with the tokens. It is kept in one file, named by a hash
of all that it depends on: the content of the data, the tokenizer with its template, versions. A process that makes it
holds a lock, so that the other ranks and jobs wait for it, and writes it as a whole. A damaged file is made again.
Without such a folder or lock, every process tokenises for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import tempfile
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from trainer.data import DataError, readable, reader, unusable
from trainer.distributed.terminal import grouped, one_line, tell
from trainer.finetuning import messages as forms
from trainer.finetuning.columns import Columns
from trainer.finetuning.messages import SKIP, BadLine
from trainer.finetuning.sources import LINE_BYTES, place, records
from trainer.finetuning.templates import OF_CHATS, TEMPLATE, ChatTemplate, Example, Rules, way_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Of the cached file and of the rules by which it is made: a change of either needs another number.
FORMAT = 8
NUMBER = re.compile(r" in message \d+")  # is not part of a reason
CHUNK = 256  # examples that are tokenised together


# (first token, how many) -> [n]; DataError where the file has shrunk.
Read = Callable[[int, int], np.ndarray]


class Tokenised(NamedTuple):  # N tokens of E examples, each of these of int64
    ends: np.ndarray  # [E]: where each example ends
    lines: np.ndarray  # [E]: the line that it is of, counted over all files
    labels: np.ndarray  # [E]: how many tokens of it are learned, but for its first
    seams: np.ndarray  # [E]: 1 if a token of the text lies across the start of an answer
    tokens: Read  # -> [n] int32: ids, doubled, and one more where a token is learned
    # bad: [the first as `told` takes it], reasons and counts: {words: how many}, lines of files, top: the largest id.
    about: dict[str, Any]

    def pieces(self) -> Iterator[np.ndarray]:
        """All tokens, some after the other."""
        count = int(self.ends[-1])
        return (self.tokens(at, min(PIECE, count - at)) for at in range(0, count, PIECE))


PIECE = 1 << 20  # tokens
AGAIN = "the same command makes it again"


def told(files: list[Path], bad: tuple) -> DataError:
    """The error of a bad line. bad: number of its file, number of the line, expected, found, fix."""
    index, number, *why = bad
    return unusable(place(files[index], number), *why)


def _parsed(line: bytes | dict) -> dict:
    if isinstance(line, dict):
        return line
    if len(line) > LINE_BYTES:
        raise BadLine(f"at most {grouped(LINE_BYTES)} bytes", "more", SKIP)
    try:
        found = forms.loaded(line.decode(), "a JSON object")
    except UnicodeDecodeError as error:
        raise BadLine(
            "UTF-8", f"byte 0x{line[error.start]:02x} at {grouped(error.start)} of the line", SKIP
        ) from error
    if not isinstance(found, dict):
        raise BadLine("a JSON object", type(found).__name__, SKIP)
    return found


# ids [n], which of them are learned [n], whether a token of the text lies across the start of an answer.
Encoded = tuple[np.ndarray, np.ndarray, bool]


class _Reader:
    """Turns lines into examples, and these into ids, as one tokenizer wants it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rules: Rules):
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, rules)
        self.counts = self.template.counts
        self.eos = tokenizer.eos_token_id
        self.seam = rules.seam
        self.columns = Columns(rules.format, rules.columns)
        # Mostly the header of an answer.
        self.prompt = lru_cache(CHUNK)(lambda text: self.tokens([text])[0][0])
        self.ends = {*tokenizer.added_tokens_decoder, self.eos}  # tokens that may end a turn
        one = [tokenizer("a", add_special_tokens=each)["input_ids"] for each in (True, False)]
        self.bos = (
            [tokenizer.bos_token_id] if one[0][:1] == [tokenizer.bos_token_id] != one[1][:1] else []
        )

    def examples(self, line: dict) -> list[Example]:
        """Those of a line. Raises BadLine; DataError if the tokenizer cannot do what any such line needs."""
        line, recognised = self.columns.read(line)
        self.counts.update([recognised] if recognised else [])
        prompt = line.get("prompt")
        completion = line.get("completion")
        chat = self.template.examples
        if line.get("messages") is not None:
            used = ["messages", *OF_CHATS]
            made = chat(line["messages"], 0, line)
        elif isinstance(prompt, list) and isinstance(completion, list):
            used = ["prompt", "completion", *OF_CHATS]
            made = chat(prompt + completion, len(prompt), line)
        elif isinstance(prompt, str) and isinstance(completion, str):
            used = ["prompt", "completion"]
            made = [self.plain(completion, len(prompt), prompt + completion)]
        elif "text" in line and prompt is completion is None:
            used = ["text"]
            made = [self.plain(line["text"], -1, line["text"])]
        else:
            keys = ", ".join(line)[:200] or "no key"
            known = "messages, prompt and completion (both strings or both lists), columns of --format, or text"
            raise BadLine(
                known,
                keys,
                f"name its columns (--columns instruction=question output=answer), {SKIP}",
            )
        ignored = [key for key, value in line.items() if key not in used and forms.there(value)]
        self.counts.update(
            f"with {key[:40]!r} beside {used[0]}, which is not read" for key in ignored
        )
        return made

    def plain(self, learned: Any, start: int, text: str) -> Example:
        """A text, which is learned from a character on."""
        if not isinstance(learned, str) or not learned.strip():
            found = "empty content" if isinstance(learned, str) else type(learned).__name__
            raise BadLine("text to learn", found, SKIP)
        if self.eos is None:
            raise unusable(
                self.template.name,
                "an eos token, to end a text with",
                "none",
                "set tokenizer.eos_token",
            )
        return Example(text, [(start, len(text) + 1)], False)

    def tokens(self, texts: list[str]) -> tuple[list[list[int]], list[np.ndarray]]:
        """Of each text its ids and [n, 2], where each of them begins and ends in the text."""
        out = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
        )
        ends = [
            np.fromiter(chain.from_iterable(each), np.int64).reshape(-1, 2)
            for each in out["offset_mapping"]
        ]
        return out["input_ids"], ends

    def begins(
        self, text: str, ids: list[int], at: np.ndarray, special: list[int], start: int
    ) -> bool:
        """Whether the tokens before a character are those of the text before it: what a model is given that shall go on
        from there. special: numbers of the special tokens. No token is merged with one of these, so the last before
        the character is where what is compared begins."""
        before = bisect_right(special, start, key=lambda i: at[i, 1])
        first = special[before - 1] if before else 0
        prompt = self.prompt(text[at[first, 0] if before else 0 : max(start, 0)])
        return ids[first : first + len(prompt)] == prompt

    def cut(self, text: str, ids: list[int], starts: list[int]) -> tuple[list[int], np.ndarray]:
        """A text as the tokens of its parts, and where they lie. Raises BadLine."""
        edges = [0, *starts, len(text)]
        parts, places = self.tokens([text[a:b] for a, b in pairwise(edges)])
        joined = [*chain.from_iterable(parts)]
        # It writes a space before each text.
        if self.tokenizer.decode(joined) != self.tokenizer.decode(ids):
            raise BadLine(
                "a tokenizer that can go on within a text",
                "one that cannot",
                "use --seam say or refuse",
            )
        return joined, np.concatenate(
            [each + edge for each, edge in zip(places, edges, strict=False)]
        )

    def masked(self, example: Example, ids: list[int], at: np.ndarray) -> Encoded:
        """An example with what is learned of it. at [n, 2]: where its tokens lie in its text. Raises BadLine."""
        text = example.text
        starts = sorted(start for start, _ in example.spans)
        special = [i for i, each in enumerate(ids) if each in self.ends and at[i, 0] < at[i, 1]]
        across = [start for start in starts if not self.begins(text, ids, at, special, start)]
        if across:
            if self.seam == "refuse":
                found = (
                    repr(text[max(across[0] - 9, 0) : across[0]])
                    + " + "
                    + repr(text[across[0] : across[0] + 9])
                )
                raise BadLine(
                    "a token that ends where an answer begins", found, "use --seam split or say"
                )
            self.counts[
                "with tokens across the start of an answer" + ", cut there" * (self.seam == "split")
            ] += 1
            if self.seam == "split":
                ids, at = self.cut(text, ids, starts)
        learned = np.zeros(len(ids), dtype=bool)
        for start, end in example.spans:
            learned |= (at[:, 0] < end) & (at[:, 1] > start)
        if not example.chat:
            before = self.bos if ids[:1] != self.bos else []
            after = [self.eos] if ids[-1:] != [self.eos] else []
            learned = np.r_[
                np.zeros(len(before), dtype=bool), learned, np.ones(len(after), dtype=bool)
            ]
            return np.array(before + ids + after, np.int32), learned, bool(across)
        if not learned.any():
            raise BadLine("learned tokens", "none", TEMPLATE)
        for last in np.flatnonzero(learned & ~np.append(learned[1:], False)):
            # A line break after the turn.
            while learned[last] and not text[slice(*at[last])].strip():
                last -= 1
            if not learned[last] or ids[last] not in self.ends:
                found = f"one that ends with {self.tokenizer.decode(ids[max(0, last - 3) : last + 1])!r}"
                raise BadLine(
                    "a special token at the end of each answer, which teaches to stop",
                    found,
                    way_on(self.tokenizer.chat_template),
                )
        return np.array(ids, np.int32), learned, bool(across)


class _Made:
    """Examples as they are made. Their tokens go to a file: memory holds 32 bytes of an example."""

    def __init__(self, folder: str, file: BinaryIO):
        self.folder = folder
        self.file = file
        self.table = array("q")
        self.top = 0

    def add(self, line: int, ids: np.ndarray, learned: np.ndarray, across: bool) -> None:
        with self.room():
            self.file.write(2 * ids + learned)
        end = len(ids) + (self.table[-4] if self.table else 0)
        self.table.extend((end, line, int(learned[1:].sum()), across))
        self.top = max(self.top, int(ids.max()))

    @contextmanager
    def room(self) -> Iterator[None]:
        """Inside it an OSError is a DataError about the folder of the file."""
        try:
            yield
        except OSError as error:
            fix = "free some, or name another folder by XDG_CACHE_HOME"
            found = one_line(error, kind=False)
            raise unusable(self.folder, "room for the token ids", found, fix) from error


def read(
    files: list[Path], tokenizer: PreTrainedTokenizerFast, rules: Rules, folder: Path | None
) -> Tokenised:
    """All examples of the files. folder: where their tokens are put, None: where temporary files are. DataError: the
    first bad line or, where these are skipped, no line is good."""
    with tempfile.TemporaryFile(dir=folder) as file:
        made = _Made(str(folder or tempfile.gettempdir()), file)
        about = _read(files, _Reader(tokenizer, rules), rules, made)
        with made.room():
            file.flush()
        return _of_table(made.table, made.folder, file, 0, about)


def _of_table(
    table: array | bytes, path: str, file: BinaryIO, begin: int, about: dict
) -> Tokenised:
    """Examples of which the tokens begin at a byte of a file."""
    tokens = reader(path, os.dup(file.fileno()), np.dtype(np.int32), begin, AGAIN)
    return Tokenised(*np.frombuffer(table, np.int64).reshape(-1, 4).T, tokens, about)


def _read(files: list[Path], reader: _Reader, rules: Rules, made: _Made) -> dict[str, Any]:
    """Adds all examples of the files to `made`; returns what is told about them."""
    waiting = []
    bad, reasons = [], Counter()  # the first one, and how many for each reason
    numbers = [0] * len(files)  # of lines in each

    def refuse(index: int, number: int, why: BadLine) -> None:
        bad.append((index, number, *why.args))
        if rules.bad_lines == "stop":
            raise told(files, bad[-1])
        del bad[1:]
        reasons[NUMBER.sub("", why.args[0])] += 1

    def encode() -> None:
        coded = reader.tokens([example.text for *_, example in waiting]) if waiting else ([], [])
        for (line, index, number, example), ids, at in zip(waiting, *coded, strict=True):
            try:
                made.add(line, *reader.masked(example, ids, at))
            except BadLine as why:
                refuse(index, number, why)
        waiting.clear()

    for line, (index, number, text) in enumerate(records(files)):
        numbers[index] += 1
        try:
            for example in reader.examples(_parsed(text)):
                example.text.encode()
                waiting.append((line, index, number, example))
        except BadLine as why:
            refuse(index, number, why)
        except UnicodeEncodeError:
            refuse(
                index,
                number,
                BadLine("text", "half of a surrogate pair (\\ud800 to \\udfff)", SKIP),
            )
        except RecursionError:
            refuse(index, number, BadLine("values that Python can nest", "deeper ones", SKIP))
        if len(waiting) >= CHUNK:
            encode()
    encode()
    if not made.table:
        raise (
            told(files, bad[0])
            if bad
            else unusable(str(files[0]), "lines of JSON", "blank ones", "name other files")
        )
    return dict(bad=bad, lines=numbers, reasons=reasons, counts=reader.counts, top=made.top)


def _digests(data: Tokenised) -> dict[str, str]:
    """digest: of the examples, by which a checkpoint knows its data. whole: of all that a file of the cache holds."""
    made = hashlib.blake2b(digest_size=16)
    # These bytes stay, whatever a file of the cache looks like: without that, older checkpoints are refused.
    for part in chain(
        (each >> 1 for each in data.pieces()),
        (each & 1 == 1 for each in data.pieces()),
        (data.ends, data.lines, data.seams == 1),
    ):
        made.update(part.tobytes())
    digest = made.hexdigest()
    made.update(np.stack(data[:4]).tobytes())
    about = {
        name: each for name, each in data.about.items() if name not in ("name", "digest", "whole")
    }
    made.update(json.dumps(about, sort_keys=True).encode())
    return dict(digest=digest, whole=made.hexdigest())


def _key(files: list[Path], tokenizer: PreTrainedTokenizerFast, rules: Rules) -> str:
    import tokenizers
    import transformers

    about = (
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        transformers.__version__,
        tokenizers.__version__,
        rules._replace(bad_lines=""),
        [file.suffix for file in files],
    )
    made = hashlib.blake2b(repr((FORMAT, *about)).encode(), digest_size=16)
    made.update(tokenizer.backend_tokenizer.to_str().encode())
    for file in files:
        with open(file, "rb") as opened:
            made.update(hashlib.file_digest(opened, "blake2b").digest())
    return made.hexdigest()


def _load(path: Path) -> Tokenised | None:
    """What is in the file; None if it is not there or is not as it was written."""
    if not path.exists():
        return None
    with suppress(Exception):  # whatever strange bytes lead to
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, os.fstat(file.fileno()).st_size)))
            table = file.read(header["examples"]["data_offsets"][1])
            about = json.loads(header["__metadata__"]["about"])
            data = _of_table(table, str(path), file, file.tell(), about)
        if about == about | _digests(data) | dict(name=path.name):
            return data
    tell(f"cache: {path} is damaged and is made again")
    return None


def _save(path: Path, data: Tokenised) -> None:
    """Writes a file of safetensors, whose own function would copy all into memory first."""
    about = json.dumps(data.about | dict(name=path.name))
    shape = (len(data.ends), 4)
    count = int(data.ends[-1])
    begin = 8 * math.prod(shape)
    header = dict(
        __metadata__=dict(about=about),
        examples=dict(dtype="I64", shape=shape, data_offsets=(0, begin)),
        tokens=dict(dtype="I32", shape=[count], data_offsets=(begin, begin + 4 * count)),
    )
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        with open(f"{folder}/data", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(np.stack(data[:4], 1))
            for part in data.pieces():
                file.write(part)
        os.replace(f"{folder}/data", path)


def tokenised(
    files: list[Path],
    tokenizer: PreTrainedTokenizerFast,
    rules: Rules,
    cache: str | None = None,
    flag: str = "--data",
) -> Tokenised:
    """The examples of files, with `digest` in what is told about them. cache: a folder (None: simple_fsdp in
    $XDG_CACHE_HOME or ~/.cache). flag: that of the files, for messages. Raises DataError for what cannot be used."""
    source = str(files[0])
    found = None
    if not getattr(tokenizer, "is_fast", False):
        fix = "name a model with a tokenizer.json"
        raise unusable(
            source,
            "a fast tokenizer, which tells where its tokens lie",
            type(tokenizer).__name__,
            fix,
        )

    def make(where: Path | None = None) -> Tokenised:
        with readable(source, flag):
            made = read(files, tokenizer, rules, where)
        return made._replace(about=made.about | _digests(made))

    with readable(source, flag):
        name = f"chat-{_key(files, tokenizer, rules)}"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache or f"{caches}/simple_fsdp")
    try:
        if folder.parts[0] == "~":
            raise OSError("no home is known; set HOME or XDG_CACHE_HOME")
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{name}.lock", "w") as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            path = folder / f"{name}.safetensors"
            found = _load(path)
            if found is None or (rules.bad_lines == "stop" and found.about["bad"]):
                found = make(folder)
                _save(path, found)
                found = _load(path) or found
    except OSError as error:
        tell(f"cache: {folder}: {one_line(error)}; every process tokenises the data for itself")
        found = found or make()
    return found
