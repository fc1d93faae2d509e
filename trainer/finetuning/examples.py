"""Lines of chat data as token ids, and which of them the model learns; made once, then read from disk by every process.

    data = tokenised(check_files("chat.jsonl"), tokenizer, Rules())      # DataError for the first bad line

What sources.py finds in files is a line here, whatever the file, once columns.py has brought it into one of three
forms: {"messages": [..]}, {"prompt": .., "completion": ..} (strings or lists of messages) or {"text": ..}, looked for
in this order; "tools" and "chat_template_kwargs" go to the template, other keys are named in the summary. Of
messages the answers of the assistant are learned, each with the token that ends it, but for those with weight 0; of a
completion and of a text all of it, and the tokenizer's eos after it. What comes after the last answer is cut off and
counted. Anything else that a template does not render makes the line a bad one (templates.py).

`datasets` writes the examples to Arrow files as they are made, and maps these into memory, so that memory does not grow
with the tokens. Their folder is named by a hash of all that they depend on: the content of the data, the tokenizer with
its template, versions. A process that makes it holds a lock, so that the other ranks and jobs wait for it. A damaged
folder is made again. Without a place for it, every process tokenises for itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import unicodedata
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data import DataError, readable, unusable
from trainer.finetuning import messages as forms
from trainer.finetuning.columns import OF_OTHERS, Columns
from trainer.finetuning.messages import BadLine
from trainer.finetuning.sources import parsed, place, records, without_room
from trainer.finetuning.templates import OF_CHATS, TEMPLATE, ChatTemplate, Example, Rules, way_on
from trainer.terminal.output import regular, tell
from trainer.terminal.text import grouped, one_line

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import ChunkedArray
    from transformers import PreTrainedTokenizerFast

# Of the rules by which examples are made: a change of them needs another number.
FORMAT = 16
# Numbers of a file and of a line in it, an example of the line or what is wrong with it, notes for people.
Waiting = tuple[int, int, Example | BadLine, list[str]]
CHUNK = 256  # examples that are tokenised together
BLOCK = 1 << 14  # tokens of an example that have a checksum, and are read, together
ACROSS = "with tokens across the start of an answer, cut there"
# Of the first CHUNK examples, since it takes as long as tokenising them.
DROPPED = f"of the first {CHUNK} with text that the tokenizer drops (--preview shows what is left)"


class Encoder:
    """Turns lines into examples, and these into ids, as one tokenizer wants it."""

    def __init__(self, files: list[Path], tokenizer: PreTrainedTokenizerFast, rules: Rules):
        self.files = files
        self.tokenizer = tokenizer
        self.rules = rules
        self.template = ChatTemplate(tokenizer, rules)
        self.columns = Columns(rules.format, rules.columns)
        self.compared = 0  # examples with what their tokens decode to
        self.eos = tokenizer.eos_token_id
        self.ends = {*tokenizer.added_tokens_decoder, self.eos}  # tokens that may end a turn
        with_bos, without = (
            tokenizer("a", add_special_tokens=each)["input_ids"] for each in (True, False)
        )
        bos = [tokenizer.bos_token_id]
        self.bos = bos if with_bos[:1] == bos != without[:1] else []

    def rows(self, flag: str, scratch: Path) -> Iterator[dict[str, Any]]:
        """For `datasets`: a row for each example, and one without ids for each bad line. DataError: the first bad line,
        if they are not skipped; a file that cannot be read. scratch: a folder for copies of tables."""
        lines = self.lines(flag, scratch)
        waiting = [*islice(lines, CHUNK)]
        if not waiting:
            fix = "name other files"
            raise unusable(str(self.files[0]), "lines of JSON", "blank ones", fix)
        while waiting:
            yield from self.encoded(waiting)
            waiting = [*islice(lines, CHUNK)]

    def lines(self, flag: str, scratch: Path) -> Iterator[Waiting]:
        for number, file in enumerate(self.files):
            with readable(str(file), flag):
                for line, record in records(file, scratch):
                    self.template.notes = []
                    try:
                        made = self.examples(record)
                    except BadLine as why:
                        made = [why]
                    for example in made:
                        yield number, line, example, self.template.notes
                        self.template.notes = []  # the first example of a line has its notes

    def examples(self, record: bytes | dict) -> list[Example]:
        """Those of a line. Raises BadLine; DataError if the tokenizer cannot do what any such line needs."""
        try:
            line = parsed(record) if isinstance(record, bytes) else record
        except UnicodeDecodeError as error:
            byte, at = error.object[error.start], error.start
            raise BadLine("UTF-8", f"byte 0x{byte:02x} at {at} of the line") from error
        except (ValueError, RecursionError) as error:
            raise BadLine("a JSON object", one_line(error, kind=False)) from error
        if not isinstance(line, dict):
            raise BadLine("a JSON object", type(line).__name__)
        try:
            plain = forms.without_nulls(line)
            if self.calls(plain) != self.calls(line):
                self.template.notes += ["with nulls in tools or calls of them, which are left out"]
            made = self.of_line(plain)
            for example in made:
                example.text.encode()
        except UnicodeEncodeError as error:
            raise BadLine("text", "half of a surrogate pair (\\ud800 to \\udfff)") from error
        except RecursionError as error:
            raise BadLine("values that are nested less deeply", "too many levels") from error
        return made

    @staticmethod
    def calls(line: dict) -> list:
        """The tools of a line, and what its messages call."""
        messages = line.get("messages")
        turns = messages if isinstance(messages, list) else []
        calls = [turn.get("tool_calls") for turn in turns if isinstance(turn, dict)]
        return [line.get("tools"), *calls]

    def of_line(self, line: dict) -> list[Example]:
        """Those of an object of JSON, in whichever form it is."""
        line, recognised = self.columns.read(line)
        self.template.notes += [recognised] if recognised else []
        chat = self.template.examples
        prompt, completion = line.get("prompt"), line.get("completion")
        if line.get("messages") is not None:
            used = ["messages", *OF_CHATS]
            made = chat(line["messages"], 0, line)
        elif isinstance(prompt, list) and isinstance(completion, list):
            used = ["prompt", "completion", *OF_CHATS]
            made = chat(prompt + completion, len(prompt), line)
        elif isinstance(prompt, str) and isinstance(completion, str):
            used = ["prompt", "completion"]
            made = [self.plain(prompt, completion)]
        elif "text" in line and prompt is completion is None:
            used = ["text"]
            made = [self.plain("", line["text"])]
        else:
            known = "messages, prompt and completion (both strings or both lists), columns of --format, or text"
            fix = f"name its columns (--columns instruction=question output=answer), {forms.SKIP}"
            raise BadLine(known, ", ".join(line)[:200] or "no key", fix)
        self.template.notes += [
            f"with {key[:40]!r} beside {used[0]}, which is not read"
            for key, value in line.items()
            if key not in used and key not in OF_OTHERS and forms.there(value)
        ]
        tools = " with tools" * any(map(forms.there, self.calls(line)))
        form = recognised.removeprefix("read as ").partition(":")[0]
        if used == ["text"]:  # by which --long-text knows it, whatever --format says
            form = "text"
        form = form or ("prompt and completion" if "prompt" in used else used[0])
        return [example._replace(form=form + tools) for example in made]

    def plain(self, prompt: str, learned: Any) -> Example:
        """A text, of which what comes after a prompt is learned."""
        if not isinstance(learned, str) or not learned.strip():
            found = "empty content" if isinstance(learned, str) else type(learned).__name__
            raise BadLine("text to train on", found)
        if self.eos is None:
            fix = "set tokenizer.eos_token"
            raise unusable(self.template.name, "an eos token, which ends each text", "none", fix)
        text = prompt + learned
        return Example(text, [(len(prompt), len(text))], False)

    def tokens(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        how = dict(add_special_tokens=False, return_attention_mask=False, verbose=False)
        return self.tokenizer(texts, padding=False, truncation=False, **how)["input_ids"]

    def encoded(self, waiting: list[Waiting]) -> Iterator[dict[str, Any]]:
        """The rows of these examples. Their texts are tokenised whole and in parts, together."""
        examples = [example for *_, example, _ in waiting if isinstance(example, Example)]
        wholes = iter(self.tokens([example.text for example in examples]))
        parts = iter(self.tokens([part for example in examples for part in example.parts]))
        for file, line, example, notes in waiting:
            row = dict(file=file, line=line, ids=[], learned=[], across=False, ends=[], form="")
            row |= dict(notes=notes, bad=[], checksums=[])
            try:
                if isinstance(example, BadLine):
                    raise example
                whole, own = next(wholes), [*islice(parts, len(example.parts))]
                ids, learned, row["across"], row["ends"] = self.marked(example, whole, own)
                ids, learned = np.array(ids, np.int32), np.array(learned)
                row |= dict(ids=ids, learned=learned, checksums=[*_checksums(ids, learned)])
                row["form"] = example.form
                dropped = self.compared < CHUNK and self.drops(example.text, whole)
                self.compared += 1
                row["notes"] = notes + [ACROSS] * row["across"] + [DROPPED] * dropped
            except BadLine as why:
                row |= dict(notes=[], bad=why.args)
                if self.rules.bad_lines == "stop":
                    raise error_of(self.files, row) from None
            yield row

    def drops(self, text: str, ids: list[int]) -> bool:
        """Whether tokens decode to fewer characters than their text has, as where a normalizer removes some, or where
        the vocabulary lacks them. Spaces, and what Unicode writes in several ways, do not count."""
        left = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        sizes = [
            sum(not each.isspace() for each in unicodedata.normalize("NFKC", words))
            for words in (left, text)
        ]
        return sizes[0] < sizes[1]

    def prefixes(
        self, text: str, whole: list[int], edges: list[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Of a text up to each edge: where its last ids begin, and these. Those before are of `whole`, of all the text:
        nothing is merged across a special token, and to tokenise them again for each turn would take time that grows
        with the square of the turns."""
        starts = [0, *(found.start() for found in self.template.special.finditer(text, 1))]
        segments = self.tokens([text[a:b] for a, b in pairwise([*starts, len(text)])])
        if [*chain.from_iterable(segments)] != whole:  # a special token that takes spaces beside it
            starts, segments = [0], []
        before = [0, *accumulate(map(len, segments))]
        at = [bisect_left(starts, edge, 1) - 1 for edge in edges]
        last = self.tokens([text[starts[i] : edge] for i, edge in zip(at, edges, strict=True)])
        return zip(map(before.__getitem__, at), last, strict=True)

    def marked(
        self, example: Example, whole: list[int], parts: list[list[int]]
    ) -> tuple[list[int], list[bool], bool, list[int]]:
        """The ids of an example, which of them are learned, whether a token of the whole text lies across the start of
        an answer (there a model that is asked goes on from the tokens of the prompt alone), and the tokens that end
        what is learned. Raises BadLine."""
        joined = [*chain.from_iterable(parts)]
        across = False
        if whole != joined:
            edges = [*accumulate(map(len, example.parts))]
            prefixes = [*self.prefixes(example.text, whole, edges[:-1])]
            across = any(whole[at : at + len(ids)] != ids for at, ids in prefixes[::2])
            if across and self.tokenizer.decode(joined) != self.tokenizer.decode(whole):
                expected = "a tokenizer that can encode a text in parts"
                raise BadLine(expected, "one that puts a space before each part")
            if not across:
                ends = [0, *(at + len(ids) for at, ids in prefixes), len(whole)]
                parts = [whole[a:b] for a, b in pairwise(ends)]
                joined = whole
        learned = [i % 2 == 1 for i, part in enumerate(parts) for _ in part]
        if not example.chat:
            before = self.bos if joined[:1] != self.bos else []
            after = [self.eos] if joined[-1:] != [self.eos] else []
            learned = [False] * len(before) + learned + [True] * len(after)
            return before + joined + after, learned, across, [self.eos]
        answers = [part for part in parts[1::2] if part]
        if not answers:
            raise BadLine("tokens to train on", "none", TEMPLATE)
        ends = set()
        for answer in answers:
            last = len(answer)
            # A line break after the turn.
            while last and not self.tokenizer.decode(answer[last - 1 : last]).strip():
                last -= 1
            if not last or answer[last - 1] not in self.ends:
                expected = (
                    "a special token at the end of each answer, so that the model learns to stop"
                )
                found = f"an answer that ends with {self.tokenizer.decode(answer[:last][-4:])!r}"
                raise BadLine(expected, found, way_on(self.tokenizer.chat_template))
            ends.add(answer[last - 1])
        return joined, learned, across, sorted(ends)


def error_of(files: list[Path], row: dict[str, Any]) -> DataError:
    """The error of a bad line. row: as Encoder makes it."""
    return unusable(place(files[row["file"]], row["line"]), *row["bad"])


class Tokenised:
    """E examples of files; of a bad line one without ids."""

    def __init__(self, files: list[Path], data: Dataset, digest: str):
        column = data.data.column
        self.files = files
        self.digest = digest  # of the examples, by which a checkpoint knows its data
        self.file = np.array(column("file"))  # [E]: the number of its file
        self.across = np.array(column("across"))  # [E]: as of Encoder.marked
        self.sizes = _sizes(column("ids"))  # [E]: of tokens
        # Of each chunk: ids and which are learned, of all its examples. They are mapped: what is read later must have
        # the checksum that the file had at the start.
        self.ids = [chunk.flatten().to_numpy() for chunk in column("ids").chunks]
        self.learned = [chunk.flatten() for chunk in column("learned").chunks]
        counts = [len(chunk) for chunk in column("ids").chunks]
        # [E]: the number of its chunk
        self.chunks = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        ends = np.cumsum(self.sizes)
        before = np.append(0, np.cumsum([len(ids) for ids in self.ids]))
        starts = ends - self.sizes - before[self.chunks]
        self.starts = starts.astype(np.int32)  # [E]: in its chunk
        # Of all blocks of all examples, and [E]: which is the first of each.
        self.checksums = column("checksums").combine_chunks().flatten().to_numpy().copy()
        blocks = -(-self.sizes // BLOCK)
        self.blocks = np.cumsum(blocks) - blocks
        changes = (np.diff(column(name).to_numpy(), prepend=-1) for name in ("file", "line"))
        self.lines = np.cumsum(np.any([*changes], 0))  # [E]: that it is of, counted over all files
        self.top = max(ids.max(initial=0) for ids in self.ids)
        notes = column("notes").combine_chunks().flatten().value_counts().to_pylist()
        self.notes = {note["values"]: note["counts"] for note in notes}  # how many lines have each
        self.form = column("form")  # [E]
        # Tokens that end what is learned.
        self.ends = sorted(column("ends").combine_chunks().flatten().unique().to_pylist())
        self.bad = data.select(np.flatnonzero(_sizes(column("bad")))).to_list()
        self.stored = [
            (file["filename"], os.path.getsize(file["filename"])) for file in data.cache_files
        ]

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """ids [n] of an example, and which of them are learned [n]. Raises as `read`."""
        return self.read(number, 0, int(self.sizes[number]))

    def read(self, number: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of an example from `start` to `stop`, and which of them are learned. Only the blocks around them are
        read. DataError where these are not those of the start."""
        chunk, at = self.chunks[number], int(self.starts[number])
        first = start // BLOCK
        begin, end = first * BLOCK, min(int(self.sizes[number]), -(-stop // BLOCK) * BLOCK)
        # A copy, of which the checksum is, whatever is written meanwhile.
        ids = self.ids[chunk][at + begin : at + end].copy()
        learned = self.learned[chunk].slice(at + begin, end - begin).to_numpy(zero_copy_only=False)
        first += self.blocks[number]
        expected = self.checksums[first : first + -(-len(ids) // BLOCK)]
        if [*_checksums(ids, learned)] != expected.tolist():
            where = f"{self.stored[0][0]}, example {grouped(number + 1)}"
            fix = "the file was overwritten: run the same command again, which rebuilds it"
            raise unusable(where, "the tokens of when the run began", "other tokens", fix)
        return ids[start - begin : stop - begin], learned[start - begin : stop - begin]

    def labels(self, examples: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """[P]: how many tokens are learned from each start to stop in these examples, sorted, but for the first."""
        counts = []
        chunks = self.chunks[examples]
        edges = np.searchsorted(chunks, np.arange(len(self.learned) + 1))
        for chunk, own in zip(self.learned, map(slice, edges, edges[1:]), strict=False):
            learned = chunk.to_numpy(zero_copy_only=False)
            before = np.append(0, np.cumsum(learned))  # how many are learned before each
            at = self.starts[examples[own]]
            first = np.minimum(starts[own] + 1, stops[own])
            counts.append(before[at + stops[own]] - before[at + first])
        return np.concatenate(counts)

    def check(self) -> None:
        """DataError where a file has shrunk: a mapped page that is no longer there ends the process with SIGBUS."""
        for path, size in self.stored:
            with suppress(FileNotFoundError):  # what is mapped stays
                if os.path.getsize(path) < size:
                    fix = "the file has shrunk: run the same command again, which rebuilds it"
                    raise unusable(
                        path, "as many bytes as when the run began", "the end of the file", fix
                    )


def _checksums(ids: np.ndarray, learned: np.ndarray) -> Iterator[int]:
    """Of each block of an example."""
    for first in range(0, len(ids), BLOCK):
        part = slice(first, first + BLOCK)
        yield zlib.crc32(learned[part], zlib.crc32(ids[part]))


def _sizes(lists: ChunkedArray) -> np.ndarray:
    return np.concatenate([chunk.value_lengths().to_numpy() for chunk in lists.chunks])


def _digest(examples: Tokenised) -> str:
    """Of the examples, whatever files they are from."""
    made = hashlib.blake2b(digest_size=16)
    for ids in examples.ids:
        made.update(ids)
    for learned in examples.learned:
        made.update(learned.to_numpy(zero_copy_only=False))
    for numbers in (examples.sizes, examples.lines, examples.across):
        made.update(numbers[examples.sizes > 0].tobytes())
    return made.hexdigest()


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


def _opened(folder: Path, encoder: Encoder, flag: str) -> Dataset:
    """What `datasets` has in a folder; made there if it has nothing. DataError: bad data, or a disk that is full."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    number, texts = Value("int64"), List(Value("string"))
    columns = Features(
        file=number,
        line=number,
        ids=List(Value("int32")),
        learned=List(Value("bool")),
        across=Value("bool"),
        ends=List(Value("int32")),
        form=Value("string"),
        notes=texts,
        bad=texts,
        checksums=List(Value("uint32")),
    )
    folder.mkdir(exist_ok=True)
    rows = lambda: encoder.rows(flag, folder)  # noqa: E731
    how = dict(cache_dir=str(folder), fingerprint="examples", writer_batch_size=CHUNK)
    try:
        return Dataset.from_generator(rows, columns, **how)
    except DatasetGenerationError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise cause or error from None
        raise without_room(folder, "the token ids", cause) from error


def _seal(folder: Path, digest: str) -> str:
    """What the file beside those of `datasets` in a folder holds if they and the digest are as they were written."""
    # A checksum finds accidents, at twice the speed of a digest.
    crc = zlib.crc32(f"{folder.name} {digest}".encode())
    # The second kind says how many examples are in the first.
    for file in sorted([*folder.rglob("*.arrow"), *folder.rglob("dataset_info.json")]):
        with open(file, "rb") as opened:
            while content := opened.read(1 << 20):
                crc = zlib.crc32(content, crc)
    return f"{digest} {crc:08x}"


def _cached(folder: Path, encoder: Encoder, flag: str) -> Tokenised:
    """The examples in a folder of the cache, made again if they are not as they were written."""
    seal = regular(folder) / "seal"
    if folder.exists():
        with suppress(Exception):  # whatever strange bytes lead to
            for path in folder.rglob("*"):
                regular(path)  # a pipe or device would be read for ever
            digest = seal.read_text().split()[0]
            if seal.read_text() == _seal(folder, digest):
                return Tokenised(encoder.files, _opened(folder, encoder, flag), digest)
        tell(f"cache: {folder} is damaged and is built again")
        shutil.rmtree(folder)
    try:
        data = _opened(folder, encoder, flag)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    made = Tokenised(encoder.files, data, "")
    made.digest = _digest(made)
    seal.write_text(_seal(folder, made.digest))
    return made


def tokenised(
    files: list[Path],
    tokenizer: PreTrainedTokenizerFast,
    rules: Rules,
    cache: str | None = None,
    flag: str = "--data",
) -> Tokenised:
    """The examples of files. cache: a folder (None: simple_fsdp in $XDG_CACHE_HOME or ~/.cache). flag: that of the
    files, for messages. Raises DataError for what cannot be used."""
    from filelock import FileLock

    if not getattr(tokenizer, "is_fast", False):
        fix = "name a model with a tokenizer.json"
        raise unusable(str(files[0]), "a fast tokenizer", type(tokenizer).__name__, fix)
    with readable(str(files[0]), flag):
        name = f"chat-{_key(files, tokenizer, rules)}"
    encoder = Encoder(files, tokenizer, rules)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache or f"{caches}/simple_fsdp")
    try:
        if folder.parts[0] == "~":
            raise OSError("the home directory is not known; set HOME or XDG_CACHE_HOME")
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock"):
            made = _cached(folder / name, encoder, flag)
    except (OSError, NotImplementedError) as error:  # the latter of a file system without locks
        tell(f"cache: {folder}: {one_line(error)}; every process tokenises the data for itself")
        with tempfile.TemporaryDirectory() as scratch:
            made = _cached(Path(scratch, name), encoder, flag)
    if made.bad and (rules.bad_lines == "stop" or not made.sizes.any()):
        raise error_of(files, made.bad[0])
    return made
