"""Lines of chat data as token ids, and which of them the model learns; made once, then mapped by every process.

    check_files("chat.jsonl")                             # DataError for files that are not there or empty; no torch
    data, files = tokenised("chat.jsonl", tokenizer)      # DataError for the first bad line

A line is {"messages": [..]}, {"prompt": .., "completion": ..} (strings or lists of messages) or {"text": ..}, looked
for in this order; other keys but "tools" are ignored. Of messages the answers of the assistant are learned, each with
the token that ends it; of a completion and of a text all of it, and the tokenizer's eos after it. What comes after the
last answer is cut off.

An answer is what the tokenizer's template has in {% generation %}. In a template without, it is what the conversation
up to it has more than the conversation before it with add_generation_prompt, if the one text begins with the other.
Templates that write an answer otherwise once another follows (Qwen3's drops its thinking) give one example for each
such answer: what the model sees when it is asked for it. Templates that write the current date are given DATE.

What is made is kept in one file, named by a hash of all that it depends on: the content of the data, the tokenizer with
its template, versions. A process that makes it holds a lock, so that the other ranks and jobs wait for it, and writes
it as a whole. A damaged file is made again. Without such a folder or lock, every process tokenises for itself.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.data import DataError, files_below, readable, unusable
from trainer.distributed.terminal import grouped, one_line, tell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 2  # of the cached file and of the rules by which it is made: a change of either needs another number
LINE_BYTES = 10 << 20  # of a line at most
CHUNK = 256  # examples that are tokenised together
ROLES = "system", "developer", "user", "assistant", "tool"
DATE = date(2024, 7, 26)  # that which Llama's templates have by themselves
NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
SKIP = "mend the line, or leave such lines out with --bad-lines skip"
TEMPLATE = "put {% generation %} and {% endgeneration %} into the template, around answers with their end-of-turn token"


class Tokenised(NamedTuple):  # N tokens of E examples
    tokens: np.ndarray  # [N] int32
    learned: np.ndarray  # [N] bool
    ends: np.ndarray  # [E] int64: where each example ends
    lines: np.ndarray  # [E] int64: the line that it is of, counted over all files
    about: dict[str, Any]  # bad: [how many, the first as `told` takes it]; of how many lines `split`, `unanswered`


ARRAYS = Tokenised._fields[:-1]


class BadLine(Exception):
    """(expected, found, fix): what DataError says of a line."""


class Example(NamedTuple):
    text: str
    spans: list[tuple[int, int]]  # characters that are learned
    chat: bool  # False: bos and eos are put around the tokens


def check_files(source: str, flag: str = "--data") -> list[Path]:
    """The .jsonl files of a path, a folder or a pattern. Raises DataError if there is none, or one that is empty or
    cannot be read. Reads no line, imports no torch. flag: for the message."""
    root = os.path.expanduser(source)
    with readable(source, flag):
        found = files_below(root, ".jsonl") if os.path.exists(root) else map(Path, glob.glob(root, recursive=True))
        if not (files := sorted(found)):
            raise unusable(root, "a .jsonl file, or a folder or pattern of them", "none", f"check {flag}")
        for file in files:
            if not file.is_file():
                raise unusable(str(file), "a file", "a folder, pipe or device", f"name files in {flag}")
            with open(file, "rb") as opened:
                if not opened.read(1):
                    raise unusable(str(file), "lines of JSON", "an empty file", f"leave it out of {flag}")
    return files


def told(files: list[Path], bad: tuple) -> DataError:
    """The error of a bad line. bad: number of its file, number of the line, expected, found, fix."""
    index, number, *why = bad
    return unusable(f"{files[index]}, line {grouped(number)}", *why)


def _lines(files: list[Path]) -> Iterator[tuple[int, int, bytes]]:
    """(number of the file, number of the line from 1, its bytes) without blank lines. A line that is too long comes as
    its first LINE_BYTES + 1 bytes."""
    for index, path in enumerate(files):
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES + 1):
                number, rest = number + 1, line
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line  # as Windows begins files
                while len(rest) > LINE_BYTES and not rest.endswith(b"\n"):
                    rest = file.readline(LINE_BYTES + 1)
                if line.strip():
                    yield index, number, line


def _parsed(line: bytes) -> dict:
    if len(line) > LINE_BYTES:
        raise BadLine(f"at most {grouped(LINE_BYTES)} bytes", "more", SKIP)
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadLine("UTF-8", f"byte 0x{line[error.start]:02x} at {grouped(error.start)} of the line", SKIP) from error
    except (ValueError, RecursionError) as error:
        raise BadLine("a JSON object", one_line(error, kind=False), SKIP) from error
    if not isinstance(found, dict):
        raise BadLine("a JSON object", type(found).__name__, SKIP)
    return found


class _Reader:
    """Turns lines into examples, and these into ids, as one tokenizer wants it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer, self.unanswered, self.split = tokenizer, 0, 0
        self.name, self.eos = tokenizer.name_or_path or "the tokenizer", tokenizer.eos_token_id
        added = tokenizer.added_tokens_decoder
        self.ends = {*added, self.eos}  # tokens that may end a turn
        control = sorted((t.content for t in added.values() if t.special), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, control)) or "(?!)")
        one = [tokenizer("a", add_special_tokens=each)["input_ids"] for each in (True, False)]
        self.bos = [tokenizer.bos_token_id] if one[0][:1] == [tokenizer.bos_token_id] != one[1][:1] else []

    def examples(self, line: dict) -> list[Example]:
        """Those of a line. Raises BadLine; DataError if the tokenizer cannot do what any such line needs."""
        prompt, completion = line.get("prompt"), line.get("completion")
        if line.get("messages") is not None:
            return self.chat(line["messages"], 0, line.get("tools"))
        if isinstance(prompt, list) and isinstance(completion, list):
            return self.chat(prompt + completion, len(prompt), line.get("tools"))
        if isinstance(prompt, str) and isinstance(completion, str):
            what, start, text = completion, len(prompt), prompt + completion
        elif "text" in line and prompt is completion is None:
            what, start, text = line["text"], -1, line["text"]
        else:
            keys = ", ".join(line)[:200] or "no key"
            raise BadLine("messages, prompt and completion (both strings or both lists), or text", keys, SKIP)
        if not isinstance(what, str) or not what.strip():
            raise BadLine("text to learn", "empty content" if isinstance(what, str) else type(what).__name__, SKIP)
        if self.eos is None:
            raise unusable(self.name, "an eos token, to end a text with", "none", "set tokenizer.eos_token")
        return [Example(text, [(start, len(text) + 1)], False)]

    def check(self, messages: Any, first: int) -> None:
        """Raises BadLine for messages that are no conversation with an answer from number `first` on."""
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise BadLine("messages, a list of {role, content}", "none or something else", SKIP)
        for number, each in enumerate(messages, 1):
            role, content, where = each.get("role"), each.get("content"), f" in message {number}"
            if role not in ROLES:
                raise BadLine(f"a role of {', '.join(ROLES)}", f"{str(role)[:40]!r}{where}", SKIP)
            if content and not isinstance(content, str):
                raise BadLine("text as content", type(content).__name__ + where, SKIP)
            if not (content or "").strip() and not each.get("tool_calls"):
                raise BadLine("text as content", "empty content" + where, SKIP)
            if held := self.control.search(content or ""):
                raise BadLine("content without the tokenizer's special tokens", held[0] + where, SKIP)
            if each.get("weight") not in (None, 1):
                raise BadLine("weight 1, as no other is known here", f"{each['weight']}{where}", SKIP)
        if not any(each["role"] == "assistant" for each in messages[first:]):
            raise BadLine("an answer (role assistant)", "none", SKIP)

    def chat(self, messages: Any, first: int, tools: list | None) -> list[Example]:
        """Those of a conversation, of which the answers from message number `first` on are learned."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self.check(messages, first)
        if self.tokenizer.chat_template is None:
            fix = "name the tokenizer of an instruction-tuned model, or set tokenizer.chat_template"
            raise unusable(self.name, "a chat template, which messages need", "none", fix)
        template = self.tokenizer.get_chat_template(tools=tools)
        template = NOW.sub(lambda call: repr(DATE.strftime(call[2])), template)
        if "strftime_now(" in template:
            fix = "put a date into it: examples must be the same on every day"
            raise unusable(self.name, "a chat template without today's date", "strftime_now of a variable", fix)
        used = dict(tools=tools, tool_calls=any(each.get("tool_calls") for each in messages))
        if ignored := [name for name, there in used.items() if there and name not in template]:
            raise BadLine("what the chat template knows", f"{ignored[0]}, which it does not", SKIP)
        answers = [i for i, each in enumerate(messages) if i >= first and each["role"] == "assistant"]
        self.unanswered += answers[-1] < len(messages) - 1
        if MARKER.search(template) and not first:
            how = dict(chat_template=template, return_assistant_tokens_mask=True, tools=tools)
            how |= self.tokenizer.special_tokens_map
            (text,), (spans,) = render_jinja_template([messages[: answers[-1] + 1]], **how)
            return [Example(text, spans, True)]
        made: list[Example] = []
        for i in reversed(answers):
            how = dict(chat_template=template, tools=tools, tokenize=False)
            before = self.tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, **how)
            whole = self.tokenizer.apply_chat_template(messages[: i + 1], **how)
            good, content = whole.startswith(before), (messages[i].get("content") or "").strip()
            if "add_generation_prompt" not in template:  # a header would count as part of the answer
                good &= whole[len(before) :].lstrip().startswith(content)
            if not good:
                found = f"another text before or around message {i + 1}"
                raise BadLine("a template that only adds an answer to what comes before it", found, TEMPLATE)
            span = len(before), len(whole.rstrip())
            if made and made[-1].text.startswith(whole):
                made[-1].spans.append(span)
            else:
                made.append(Example(whole, [span], True))
        self.split += len(made) > 1
        return made[::-1]

    def encode(self, examples: list[Example]) -> list[tuple[np.ndarray, np.ndarray] | BadLine]:
        """(ids [n] int32, learned [n] bool) of each, or what is wrong with it."""
        out = self.tokenizer([each.text for each in examples], add_special_tokens=False, return_offsets_mapping=True,
                             padding=False, truncation=False, return_attention_mask=False, verbose=False)  # fmt: skip
        return list(map(self.masked, examples, out["input_ids"], out["offset_mapping"]))

    def masked(self, example: Example, ids: list[int], offsets: list) -> tuple[np.ndarray, np.ndarray] | BadLine:
        """The same of one. offsets: (start, end) of each token in the text."""
        at = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(ids)).reshape(-1, 2)  # [n, 2]
        learned = np.zeros(len(ids), dtype=bool)
        for start, end in example.spans:
            learned |= (at[:, 0] < end) & (at[:, 1] > start)
        if not example.chat:
            before, after = self.bos if ids[:1] != self.bos else [], [self.eos] if ids[-1:] != [self.eos] else []
            learned = np.r_[np.zeros(len(before), dtype=bool), learned, np.ones(len(after), dtype=bool)]
            return np.array(before + ids + after, dtype=np.int32), learned
        if not learned.any():
            return BadLine("learned tokens", "none", TEMPLATE)
        for last in np.flatnonzero(learned & ~np.append(learned[1:], False)):
            while learned[last] and not example.text[slice(*at[last])].strip():  # a line break after the turn
                last -= 1
            if not learned[last] or ids[last] not in self.ends:
                found = repr(self.tokenizer.decode(ids[max(0, last - 3) : last + 1]))
                return BadLine("a special token at the end of each answer, which teaches to stop", found, TEMPLATE)
        return np.array(ids, dtype=np.int32), learned


def read(files: list[Path], tokenizer: PreTrainedTokenizerFast, stop: bool) -> Tokenised:
    """All examples of the files. With `stop`, the first bad line raises DataError, else only if no line is good."""
    from jinja2 import TemplateError

    reader, bad, done, waiting = _Reader(tokenizer), [], [], []

    def refuse(index: int, number: int, why: BadLine) -> None:
        bad.append((index, number, *why.args))
        if stop:
            raise told(files, bad[-1])

    def encode() -> None:
        found = reader.encode([each for *_, each in waiting]) if waiting else []
        for (line, index, number, _), each in zip(waiting, found, strict=True):
            refuse(index, number, each) if isinstance(each, BadLine) else done.append((line, *each))
        waiting.clear()

    for line, (index, number, text) in enumerate(_lines(files)):
        try:
            for example in reader.examples(_parsed(text)):
                example.text.encode()
                waiting.append((line, index, number, example))
        except BadLine as why:
            refuse(index, number, why)
        except UnicodeEncodeError:
            refuse(index, number, BadLine("text", "half of a surrogate pair (\\ud800 to \\udfff)", SKIP))
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            refuse(index, number, BadLine("what the chat template takes", one_line(error), SKIP))
        if len(waiting) >= CHUNK:
            encode()
    encode()
    if not done:
        raise told(files, bad[0]) if bad else unusable(str(files[0]), "lines of JSON", "blank ones", "name other files")
    lines, tokens, learned = zip(*done, strict=True)
    ends = np.cumsum(list(map(len, tokens)))
    about = dict(bad=[len(bad), bad[0] if bad else None], split=reader.split, unanswered=reader.unanswered)
    return Tokenised(np.concatenate(tokens), np.concatenate(learned), ends, np.array(lines), about)


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
