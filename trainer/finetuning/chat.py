"""Batches of chat data for fine-tuning, with the interface of trainer.data.Batches, the same for any number of ranks.

    batches = ChatBatches("chat.jsonl", tokenizer, global_batch=64, seqlen=2048, vocab=151936, seed=0, rank=rank,
                          world=world, pad="pack", hold_out=True)
    tokens, targets, inputs = next(batches)     # [B, T] int64 on the CPU; targets are the next tokens, or IGNORE
    batches.sample = 6400                       # resume: the counter is the whole state
    print(batches.preview(0, color=True))       # an example, with what is learned of it marked

pad: "fixed" gives an example a row of seqlen tokens; "longest" one as long as the global batch needs, of at most eight
lengths; "pack" puts several examples into a row, each with position ids from 0, by which a model keeps them apart. With
`until` the examples of one line that begin alike (a template that rewrites answers makes one for each answer) have
their common beginning once in a row. The first seqlen + 1 tokens of an example are used, the last as a target alone;
with long_text="chunks" all of a text, in chunks of as many.
What a line may be, and which of its tokens are learned, is described in examples.py.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data import (
    HELD_OUT,
    PROMPT,
    DataError,
    ReadAhead,
    generator,
    rows_of_a_rank,
    unusable,
)
from trainer.finetuning.examples import error_of, tokenised
from trainer.finetuning.messages import LEAVE_OUT
from trainer.finetuning.sources import check_files, weighted
from trainer.finetuning.templates import Rules
from trainer.terminal.output import shown
from trainer.terminal.text import counted, data_lines, fitted
from trainer.terminal.text import grouped as _n

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    Batch = tuple[Tensor, Tensor, dict[str, Tensor]]  # tokens [B, T], targets [B, T], more inputs

Example = tuple[np.ndarray, np.ndarray]  # ids [n], learned [n]
NUMBER = re.compile(r" in message \d+")  # is not part of a reason
LENGTHS = 8  # of rows with pad="longest", at most: each is another shape to compile


def shortest_of(seqlen: int) -> int:
    """Tokens in the shortest rows of pad="longest"; others have multiples of it."""
    return -(-seqlen // LENGTHS)


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Numbers of `lengths` in rows no longer than `capacity`: the longest first, each where the least room is left."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, row), sorted
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        at = bisect_left(free, (length, 0))
        room, row = free.pop(at) if at < len(free) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if room > length:
            insort(free, (room - length, row))
    return rows


class Examples:
    """The examples of sources that have a label, cut to seqlen + 1 tokens. Raises DataError if there is none, or a
    token outside the vocabulary."""

    def __init__(
        self,
        sources: Sequence[str],
        flag: str,
        tokenizer: PreTrainedTokenizerFast,
        seqlen: int,
        vocab: int,
        rules: Rules,
        cache: str | None,
        long_text: str,
    ):
        source = self.source = " ".join(sources)
        files_by_source = [check_files(each, flag) for each in sources]
        self.files = [*chain.from_iterable(files_by_source)]
        if len({*map(Path.resolve, self.files)}) < len(self.files):
            raise unusable(source, "each file once", "one file twice", f"name it once in {flag}")
        data = self.data = tokenised(self.files, tokenizer, rules, cache, flag)
        if data.top >= vocab:
            expected = f"token ids below the model's vocabulary of {_n(vocab)}"
            fix = "name the tokenizer that belongs to the model, or resize the model's embedding"
            raise unusable(source, expected, _n(int(data.top)), fix)
        # What is trained on is a piece [P]: the whole example, or a chunk of a long text. The last token of a chunk is
        # the first of the next one, so that each token but the first is learned once.
        pieces = np.ones_like(data.sizes)
        if long_text == "chunks":
            texts = np.array([form.startswith("text") for form in data.form.to_pylist()])
            pieces = np.where(texts, np.maximum(1, -(-(data.sizes - 1) // seqlen)), pieces)
        self.example = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
        before = np.repeat(np.cumsum(pieces) - pieces, pieces)
        # Where a piece begins in its example.
        self.start = ((np.arange(len(before)) - before) * seqlen).astype(np.int32)
        # Tokens of each but its last, which is a target alone.
        self.inputs = np.clip(data.sizes[self.example] - self.start - 1, 0, seqlen)
        stops = np.minimum(self.start + self.inputs + 1, data.sizes[self.example])
        self.labels = data.labels(self.example, self.start, stops)
        self.chosen = np.flatnonzero(self.labels)
        # Tokens that stand in a row for an example and for others: of none until `families`.
        self.shared = np.zeros_like(self.inputs)
        # The number of its source, of each example.
        self.part = np.repeat(np.arange(len(files_by_source)), [*map(len, files_by_source)])[
            data.file
        ][self.example]
        most = pieces * seqlen + 1
        self.words = self._described(
            int((data.sizes > most).sum()), seqlen, int((pieces > 1).sum())
        )
        self.lost = int(np.clip(data.sizes - most, 0, None).sum())  # tokens
        if not len(self.chosen):
            fix = "raise --seqlen or name other data"
            raise unusable(source, "an example with a token to train on", self.words, fix)

    def _described(self, cut: int, seqlen: int, chunked: int) -> str:
        """How many examples there are, and what became of the lines, for people."""
        data = self.data
        count = int((data.sizes > 0).sum())
        notes = {
            f"cut to {_n(seqlen + 1)} tokens": cut,
            f"in chunks of {_n(seqlen)} tokens": chunked,
            "without a token to train on": count - len(np.unique(self.example[self.chosen])),
            **data.notes,
        }
        words = f"{counted(len(self.files), 'file')}, {counted(count, 'example')}"
        words += "".join(f", {_n(count)} {what}" for what, count in notes.items() if count)
        if data.bad:
            reasons = Counter(NUMBER.sub("", row["bad"][0]) for row in data.bad)
            words += f", {counted(len(data.bad), 'line')} left out as bad ("
            words += "".join(f"expected {what}: {_n(count)}; " for what, count in reasons.items())
            words += f"the first: {error_of(self.files, data.bad[0])}".removesuffix(LEAVE_OUT) + ")"
        return words

    def __getitem__(self, number: int) -> Example:
        return self.piece(number, 0, int(self.inputs[number]))

    def line(self, number: Any) -> Any:
        """The line that a piece is of; of an array of pieces an array."""
        return self.data.lines[self.example[number]]

    def piece(self, number: int, start: int, end: int) -> Example:
        """The inputs from number `start` to `end` of an example, and the target of the last."""
        first = int(self.start[number])
        return self.data.read(int(self.example[number]), first + start, first + end + 1)

    def families(self, chosen: np.ndarray, room: int) -> list[list[int]]:
        """Examples of one line that begin alike and together have room in a row, the last one of them last: the others
        share `shared` tokens with it, and stand by how many."""
        families: list[list[int]] = []
        left = 0
        for number in chosen[::-1].tolist():
            if families and self.line(number) == self.line(last := families[-1][-1]):
                shared = self._alike(number, last)
                if 0 < shared and (own := self.inputs[number] - shared) <= left:
                    self.shared[number] = shared
                    left = left - own
                    families[-1].insert(0, number)
                    continue
            families.append([number])
            left = room - self.inputs[number]
        return [sorted(each, key=lambda i: self.shared[i] or room) for each in reversed(families)]

    def _alike(self, number: int, last: int) -> int:
        """How many inputs of an example are those of another one and have no label in it."""
        ids, learned = self[number]
        others, _ = self[last]
        count = min(len(ids), len(others))
        differ = np.append(ids[:count] != others[:count], True)
        # Its own input predicts the first token that is not shared.
        return max(0, min(differ.argmax(), learned.argmax()) - 1)

    def pieces(self, row: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """A packed row from left to right: (example, its inputs from .. to, how far what follows in the row may see
        them). A branch stands where it leaves what it shares."""
        at = 0
        family = []
        for number in row:
            family.append(number)
            if self.shared[number]:
                continue
            end = at + int((self.inputs - self.shared)[family].sum())
            done = 0
            for branch in family:
                stop = int(self.shared[branch] or self.inputs[number])
                yield number, done, stop, end
                at += stop - done
                if branch != number:
                    size = int(self.inputs[branch]) - stop
                    yield branch, stop, stop + size, at + size
                    at += size
                done = stop
            family = []

    def cut(self, chosen: np.ndarray) -> int:
        """How many of these are trained on if the last are held out. DataError if none would be."""
        lines = self.line(chosen)
        # No line is on both sides.
        first = int(np.searchsorted(lines, lines[-max(1, len(lines) // HELD_OUT)]))
        if not first:
            fix = "add data, name --eval-data, or leave out --eval-every"
            raise unusable(
                self.source, "two lines to train on, of which one is held out", "one", fix
            )
        return first


class ChatBatches(ReadAhead):
    """Infinite iterator over (tokens [B, T], targets [B, T], more inputs of the model), int64 on the CPU; B =
    global_batch / world rows. The inputs are {"position_ids": [B, T]} with pad="pack" or positions, else none: from 0
    on for each example, 0 for padding. Where examples share a beginning also {"until": [B, T]}: the tokens before that
    column, from its own on, see a token. Each epoch has its own seeded order of the same rows, and a batch may
    hold the end of one and the beginning of the next. source: one or several, with weights as sources.weighted has
    them: then an epoch, of as many rows as there are, has exactly these shares of each source, which is passed as often
    as that needs. hold_out: the last 1/64 of the examples (of each weighted source), at least one line, is in no batch,
    but in `held_out`; with eval_source its examples are. rules: of templates.Rules. cache: see `tokenised`. Raises
    ValueError for bad flags, DataError for bad data."""

    bytes = overfit = False  # what Batches may be
    unit = "tokens"

    def __init__(
        self,
        source: str | Sequence[str],
        tokenizer: PreTrainedTokenizerFast,
        *,
        global_batch: int,
        seqlen: int,
        vocab: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        pad: str = "fixed",
        hold_out: bool = False,
        eval_source: str | None = None,
        cache: str | None = None,
        positions: bool = False,
        until: bool = False,
        learned: bool = False,
        long_text: str = "cut",
        **rules: Any,
    ):
        self.global_batch = global_batch
        self.seqlen = seqlen
        self.vocab = vocab
        self.seed = seed
        self.pad = pad
        self.rows = rows_of_a_rank(global_batch, world)
        self.rank = rank
        self.positions = positions or pad == "pack"
        self.may_share = until
        self.sample = 0  # rows consumed so far by all ranks together; set it to resume
        filler = tokenizer.pad_token_id
        # No label, and seen by no token before it.
        self.filler = filler if filler is not None and filler < vocab else 0
        self.tokenizer = tokenizer
        self.rules = Rules(**rules)
        how = tokenizer, seqlen, vocab, self.rules, cache, long_text
        paths, weights = zip(
            *weighted([source] if isinstance(source, str) else source), strict=True
        )
        self.data = self.other = Examples(paths, "--data", *how)
        held = self.data.chosen[:0]
        groups = [self.data.chosen]
        if weights[0] is not None:
            groups = [
                self.data.chosen[self.data.part[self.data.chosen] == part]
                for part in range(len(paths))
            ]
            if empty := [path for path, group in zip(paths, groups, strict=True) if not len(group)]:
                raise unusable(
                    empty[0],
                    "an example with a token to train on",
                    "none",
                    "leave it out, or raise --seqlen",
                )
        if eval_source:
            self.other = Examples([eval_source], "--eval-data", *how)
            if both := {*map(Path.resolve, self.data.files)} & {
                *map(Path.resolve, self.other.files)
            }:
                raise ValueError(
                    f"--eval-data {eval_source}: {min(both)} is also in --data; name other files"
                )
            held = self.other.chosen
        elif hold_out:
            pairs = (np.split(group, [self.data.cut(group)]) for group in groups)
            groups, lasts = zip(*pairs, strict=True)
            held = np.concatenate(lasts)
        chosen = np.concatenate(groups)
        parts = [self._in_rows(self.data, group) for group in groups]
        self._train = parts[0] if len(parts) == 1 else [*chain.from_iterable(parts)]
        self._held = self._in_rows(self.other, held)
        self.epoch_samples = len(self._train)
        self.held = range(len(self._held))
        self.sizes = [*map(len, parts)]
        self.shares = (
            _shares(paths, weights, self.epoch_samples) if weights[0] is not None else None
        )
        self._epoch: tuple[int, Sequence[int]] = -1, ()  # number, order of the rows
        first = (
            chosen
            if self.shares is None
            else np.concatenate([self._train[i] for i in self._order(0)])
        )
        # Whether each batch says how many of its targets are not IGNORE.
        self.learned = learned
        # Whether any row has `until`; then all have.
        self.until = bool(self.data.shared.any() or self.other.shared.any())
        # Of an epoch.
        self.tokens, self.labels = (
            int(n[first].sum()) for n in (self.data.inputs - self.data.shared, self.data.labels)
        )
        # The tokens that end what is learned.
        self.learned_ends = {
            self.tokenizer.convert_ids_to_tokens(i): i for i in self.data.data.ends
        }
        # At which --sample stops. What a run exports may have others: see end_tokens.py.
        self.ends = {*self.learned_ends.values()}
        digests = [each.data.digest for each in (self.data, self.other)]
        same = digests, len(chosen), len(held), seqlen, pad == "pack"
        same += () if self.shares is None else (self.sizes, self.shares)
        same += ("shared",) * self.until
        same += ("chunks",) * (long_text == "chunks")
        self.fingerprint = hashlib.blake2b(repr(same).encode(), digest_size=16).hexdigest()
        self.description = self._described(paths, chosen)
        self.description += f"; {_n(len(held))} held out" * (len(held) > 0)
        self.description += f" of {eval_source}, {self.other.words}" * bool(eval_source)

    def _described(self, paths: Sequence[str], chosen: np.ndarray) -> str:
        """What is trained on, for people."""
        words = f"{self.data.source}, {self.data.words}; {_n(len(chosen))} to train on"
        words += f" in {_n(self.epoch_samples)} rows of {_n(self.seqlen)}" * (self.pad == "pack")
        if self.shares is not None:
            parts = [
                f"{share / self.epoch_samples:.1%} from {path} ({share / size:.2f} passes)"
                for share, size, path in zip(self.shares, self.sizes, paths, strict=True)
            ]
            words += f", in an epoch {', '.join(parts)}"
        words += f"; {_n(self.tokens)} tokens, of which {_n(self.labels)} ({self.labels / self.tokens:.1%}) "
        words += f"are learned, the longest of {_n(self.data.data.sizes[self.data.example[chosen]].max())}"
        self.padding = 0.0  # share of all rows
        if self.pad != "longest":
            self.padding = 1 - self.tokens / (self.epoch_samples * self.seqlen)
            words += f"; {self.padding:.1%} of the rows is padding"
        words += f"; {_n(self.data.lost)} tokens are cut off" * (self.data.lost > 0)
        shared = int(self.data.shared.sum())
        return words + f"; {_n(shared)} tokens are shared by several examples" * (shared > 0)

    def _in_rows(self, examples: Examples, chosen: np.ndarray) -> Sequence[Sequence[int]]:
        if self.pad != "pack":
            return chosen[:, None]
        families = examples.families(chosen, self.seqlen) if self.may_share else chosen[:, None]
        own = examples.inputs - examples.shared
        rows = pack(np.array([own[each].sum() for each in families]), self.seqlen)
        return [np.concatenate([families[i] for i in row]) for row in rows]

    __next__ = ReadAhead.taken

    def _batch(self, sample: int) -> Batch:
        rows = [self._train[self.position(sample + i)] for i in range(self.global_batch)]
        return self._part(self.data, rows)

    def held_examples(self, count: int) -> int:
        """How many examples `held_out` has in so many batches; a packed row has several."""
        return sum(map(len, self._held[: count * self.global_batch]))

    def held_out(self, count: int) -> Iterator[Batch]:
        """The first `count` batches of what is held out, always the same, as `next` gives them. Where less is held out
        there are fewer, and targets that the last one lacks are IGNORE. What cannot be read is left out, too, and noted
        in `error`: the other ranks wait for this one."""
        for first in range(0, min(count * self.global_batch, len(self.held)), self.global_batch):
            rows = self._held[first : first + self.global_batch]
            try:
                yield self._part(self.other, rows)
            except DataError as error:
                self.error = error
                yield self._part(self.other, rows, blank=True)

    def example(self, number: int) -> Example:
        """(ids [n], learned [n]) of an example that is trained on, in the order of the files."""
        return self.data[self.data.chosen[number]]

    def preview(self, number: int, color: bool, most: int | None = None) -> str:
        """The text of that example, what is learned in green or, without color, in double brackets, and whether a token
        lies across the start of an answer. most: characters of each part; more are left out of its middle."""
        ids, learned = self.example(number)
        edges = np.flatnonzero(np.diff(learned)) + 1
        text = ""
        for part, on in zip(np.split(ids, edges), learned[np.r_[0, edges]], strict=True):
            words = self.readable(part.tolist())
            if most is not None and len(words) > most:
                words = f"{words[: most // 2]} .. {words[-most // 2 :]}"
            text += f"\x1b[32m{words}\x1b[0m" if on and color else f"[[{words}]]" if on else words
        note = "\na token of the tokenizer crosses the start of an answer; it is split there"
        return text + note * bool(
            self.data.data.across[self.data.example[self.data.chosen[number]]]
        )

    def report(self, color: bool) -> str:
        """For --preview: what a run prints of the data in short lines, and the first example of each form of lines."""
        text = "\n".join(data_lines(self.description))
        forms = self.data.data.form.take(self.data.example[self.data.chosen]).to_pylist()
        for form, count in Counter(forms).items():
            shown = "\n".join(fitted(self.preview(forms.index(form), color).split("\n")))
            marked = "what is learned in green" if color else "[[what is learned]]"
            head = f"{counted(count, 'example')} of {form}, the first with {marked}:"
            text += f"\n\n{head}\n{shown}"
        return text

    def prompt(self, most: int) -> list[int]:
        """What --sample answers: the last tokens before the first answer of what is held out or, without it, of what is
        trained on; the beginning of a text that is learned as a whole."""
        examples, row = (
            (self.other, self._held[0]) if self.held else (self.data, self._train[self.position(0)])
        )
        ids, learned = examples[row[0]]
        before = ids[: learned.argmax()].tolist()[-most:]
        return before if len(before) > 1 else ids[: min(most, PROMPT)].tolist()

    def readable(self, ids: list[int]) -> str:
        """The text of tokens, special ones too. What would control a terminal is a replacement character."""
        return shown(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def position(self, sample: int) -> int:
        """The number of the row that is sample number `sample`."""
        epoch, index = divmod(sample, self.epoch_samples)
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._order(epoch)
        return self._epoch[1][index]

    def _order(self, epoch: int) -> list[int]:
        """Numbers of the rows of an epoch. Of weighted sources each goes on where the epoch before has left it."""
        order = self._shuffled(self.epoch_samples, "epoch", epoch)
        if self.shares is None:
            return order.tolist()
        part = np.repeat(np.arange(len(self.sizes)), self.shares)[order]
        rows = np.empty_like(order)
        offset = 0
        for number, (size, share) in enumerate(zip(self.sizes, self.shares, strict=True)):
            passes = range(epoch * share // size, ((epoch + 1) * share - 1) // size + 1)
            drawn = np.concatenate(
                [self._shuffled(size, f"source {number}", each) for each in passes]
            )
            begin = epoch * share - passes[0] * size
            rows[part == number] = offset + drawn[begin : begin + share]
            offset += size
        return rows.tolist()

    def _shuffled(self, size: int, what: str, number: int) -> np.ndarray:
        import torch

        return torch.randperm(
            size, generator=generator(what, self.seed, number), device="cpu"
        ).numpy()

    def _part(
        self, examples: Examples, rows: Sequence[Sequence[int]], blank: bool = False
    ) -> Batch:
        """This rank's part of a global batch of `rows`, which may be too few for it; blank: padding alone."""
        if not blank:
            examples.data.check()
        import torch

        from lean import IGNORE

        B = self.rows
        T = self.seqlen
        if self.pad == "longest":
            longest = int(max(examples.inputs[row].sum() for row in rows))
            unit = shortest_of(self.seqlen)
            T = min(self.seqlen, -(-longest // unit) * unit)
        tokens = np.full((B, T), self.filler)
        targets = np.full((B, T), IGNORE)
        positions = np.tile(np.arange(T), (B, 1))
        until = positions + 1
        own = [] if blank else rows[self.rank * B : (self.rank + 1) * B]
        for i, row in enumerate(own):
            at = 0
            for number, first, stop, last in examples.pieces(row):
                ids, learned = examples.piece(number, first, stop)
                end = at + stop - first
                tokens[i, at:end] = ids[:-1]
                targets[i, at:end] = np.where(learned[1:], ids[1:], IGNORE)
                positions[i, at:end] = np.arange(first, stop)
                until[i, at:end] = last
                at = end
            positions[i, at:] = 0  # each token of padding is a document of its own
        inputs = dict(position_ids=torch.from_numpy(positions)) if self.positions else {}
        inputs |= dict(until=torch.from_numpy(until)) if self.until else {}
        if self.learned:
            counts = (targets != IGNORE).sum(1, keepdims=True)
            inputs["learned"] = torch.from_numpy(counts)
        return torch.from_numpy(tokens), torch.from_numpy(targets), inputs


def _shares(paths: Sequence[str], weights: Sequence[float], rows: int) -> list[int]:
    """How many of an epoch's rows come from each source: its share, rounded so that the sum is right. ValueError: none
    from one."""
    ends = np.cumsum(weights) / np.sum(weights) * rows
    shares = np.diff(np.round(ends).astype(int), prepend=0).tolist()
    if none := [path for path, share in zip(paths, shares, strict=True) if not share]:
        raise ValueError(
            f"--data {none[0]}: gives none of the {_n(rows)} rows of an epoch; raise its weight"
        )
    return shares
