"""Chat data of trainer/finetuning: rows and packing, order and ranks, what is held out, the cache.

    python -m pytest tests/test_chat_batches.py

On a CPU, with the tokenizer and the templates of tests/test_chat.py.
"""

import errno
import hashlib
import json
import re
import threading
import tracemalloc
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conversations import TURNS, chats, jsonl, long_chats, refuse, steps_of

from model import IGNORE
from trainer.evaluation import sample
from trainer.finetuning import examples
from trainer.finetuning.chat import pack
from trainer.finetuning.templates import Rules

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
pytestmark = pytest.mark.filterwarnings("error")
PADS = "fixed", "longest", "pack"


def pairs(stream, steps):
    """All (tokens of the document so far, label) of so many batches, sorted."""
    found = []
    for _, (tokens, targets, inputs) in zip(range(steps), stream, strict=False):
        positions = inputs.get("position_ids", torch.arange(tokens.shape[1]).expand_as(tokens))
        for row, column in (targets != IGNORE).nonzero().tolist():
            if "until" in inputs:
                seen = (inputs["until"][row, : column + 1] > column).nonzero()[:, 0]
            else:
                seen = torch.arange(column - int(positions[row, column]), column + 1)
            assert positions[row, seen].tolist() == [*range(len(seen))]
            found.append((tokens[row, seen].tolist(), int(targets[row, column])))
    return sorted(found)


# Rows


def test_packed_rows_hold_the_same_contexts_and_labels_as_rows_of_one_example(batches):
    lines = [*chats(30), dict(text="Some text."), dict(messages=TURNS)]
    plain, packed, longest = (batches(lines, pad=pad) for pad in ("fixed", "pack", "longest"))
    assert packed.epoch_samples < plain.epoch_samples == 32
    expected = pairs(plain, 32)
    assert pairs(packed, packed.epoch_samples) == pairs(longest, 32) == expected and len(expected) == plain.labels
    assert (packed.labels, packed.tokens) == (plain.labels, plain.tokens)
    for tokens, targets, inputs in steps_of(packed, packed.epoch_samples):
        positions = inputs["position_ids"]
        starts = (positions[0] == 0).nonzero()[:, 0]
        assert starts[0] == 0 and tokens.shape == targets.shape == positions.shape == (1, 128)
        assert int((positions[0].diff() != 1).sum()) == len(starts) - 1  # they count on within a document
        for start in starts[1:]:  # what stands before the first token does not predict it
            assert targets[0, start - 1] != tokens[0, start]


def test_packing_fills_rows_and_loses_nothing():
    lengths = np.random.default_rng(0).integers(1, 65, 2000)
    rows = pack(lengths, 64)
    assert sorted(sum(rows, [])) == [*range(2000)] and max(lengths[row].sum() for row in rows) <= 64
    assert len(rows) <= 1.02 * lengths.sum() / 64 + 1


def test_rows_that_are_as_long_as_needed_have_one_length_on_all_ranks_and_eight_in_all(batches):
    lines = [dict(text="word" * (i // 2 + 1)) for i in range(60)]
    lengths = set()
    ranks = [batches(lines, pad="longest", seqlen=100, global_batch=4, rank=rank, world=2) for rank in range(2)]
    whole = batches(lines, pad="fixed", seqlen=100, global_batch=4)
    for _ in range(30):
        (a, x, _), (b, y, _), (tokens, targets, _) = (next(each) for each in (*ranks, whole))
        assert a.shape == b.shape == x.shape == y.shape and a.shape[1] in {*range(13, 100, 13), 100}
        assert torch.equal(torch.cat((a, b)), tokens[:, : a.shape[1]])
        assert torch.equal(torch.cat((x, y)), targets[:, : a.shape[1]])
        assert not (targets[:, a.shape[1] :] != IGNORE).any()
        assert (targets[:, a.shape[1] // 13 * 13 - 13 :] != IGNORE).any()  # not longer than needed
        lengths.add(a.shape[1])
    assert len(lengths) > 2


def test_examples_are_cut_to_the_row_and_dropped_without_a_label_and_counted(batches):
    lines = [*chats(3), dict(prompt="long " * 100, completion="yes"), dict(text="long " * 100)]
    whole, stream = batches(lines, seqlen=600), batches(lines, seqlen=80)
    assert "5 examples; 5 to train on" in whole.description
    assert "5 examples, 2 cut to 81 tokens, 1 dropped for want of a label; 4 to train on" in stream.description
    ids, learned = whole.example(4)
    assert [each.tolist() for each in stream.example(3)] == [ids[:81].tolist(), learned[:81].tolist()]
    found = [next(stream) for _ in range(4)]
    assert sum(int((targets != IGNORE).sum()) for _, targets, _ in found) == stream.labels
    refuse("an example with a label, found .*1 cut to 41 .*1 dropped.*; raise --seqlen", batches, lines[3:4], seqlen=40)


@pytest.mark.parametrize("pad", PADS)
def test_the_summary_tells_the_learned_share_the_longest_and_the_padding(batches, pad):
    lines = [dict(prompt="p" * (i % 11), completion="word" * (i % 7 + 1)) for i in range(39)]
    lines.append(dict(prompt="p" * 120, completion="a"))  # has no label within the row
    lines.append(dict(prompt="p" * 20, completion="a" * 120))
    stream = batches(lines, pad=pad, seqlen=100, global_batch=4)
    told = re.search(r" \((.*)%\) are learned, the longest of (\d+); (.*)% of the rows is padding", stream.description)
    tokens = room = learned = 0
    for rows in range(0, stream.epoch_samples, 4):
        batch, targets, inputs = next(stream)
        last = min(4, stream.epoch_samples - rows)  # other rows are of the next epoch
        room += batch.shape[1] * last
    for number in range(40):
        ids, mask = stream.example(number)
        tokens, learned = tokens + len(ids) - 1, learned + mask[1:].sum()
    assert told.groups() == (f"{learned / tokens:.1%}"[:-1], "142", f"{1 - tokens / room:.1%}"[:-1])


def test_examples_of_one_line_that_begin_alike_share_their_beginnings_in_packed_rows(batches):
    lines = [*chats(9), *long_chats(6), dict(text="Some text.")]
    how = dict(template="qwen3", pad="pack")
    for seqlen in (300, 900):  # of a long chat not all examples have room in a short row
        apart, shared = (batches(lines, seqlen=seqlen, until=until, **how) for until in (False, True))
        examples = len(apart.data.chosen)
        assert examples == 9 + sum(range(1, 7)) + 1  # two answers around a tool's result are one
        expected = pairs(apart, apart.epoch_samples)
        assert pairs(shared, shared.epoch_samples) == expected and len(expected) == apart.labels == shared.labels
        assert shared.tokens < apart.tokens and shared.epoch_samples < apart.epoch_samples
        words = r"what is split has (.*) tokens in place of (.*) \((.*) times\), (.*) in rows that share"
        many, whole, times, left = re.search(words, shared.description).groups()
        number = {name: int(each.replace("'", "")) for name, each in dict(many=many, whole=whole, left=left).items()}
        assert number["many"] - number["left"] == apart.tokens - shared.tokens
        assert number["whole"] < number["left"] and times == f"{number['many'] / number['whole']:.1f}"
        assert f"{many} tokens in place of {whole} ({times} times)" in apart.description
        assert "share beginnings" not in apart.description and apart.fingerprint != shared.fingerprint
        ranks = [batches(None, seqlen=seqlen, until=True, global_batch=2, rank=i, world=2, **how) for i in range(2)]
        both = batches(None, seqlen=seqlen, until=True, global_batch=2, **how)
        for _ in range(3):
            halves, whole_batch = [next(each)[2] for each in ranks], next(both)[2]
            for name, each in whole_batch.items():
                assert torch.equal(torch.cat([half[name] for half in halves]), each)


def test_rows_of_examples_that_share_nothing_are_as_they_were(batches):
    one, other = (batches([*chats(9), dict(text="Some text.")], pad="pack", until=until) for until in (False, True))
    assert one.description == other.description and one.fingerprint == other.fingerprint
    for (a, b, c), (x, y, z) in zip(steps_of(one, 4), steps_of(other, 4), strict=True):
        assert torch.equal(a, x) and torch.equal(b, y) and c.keys() == z.keys()


# Order


def test_ranks_share_each_global_batch_and_epochs_run_on(batches):
    lines = chats(10)
    whole = batches(lines, global_batch=4)
    steps = steps_of(whole, 10)  # four epochs, of which two end within a batch
    for world in (2, 4):
        ranks = [batches(None, global_batch=4, rank=rank, world=world) for rank in range(world)]
        assert len({each.fingerprint for each in ranks}) == len({each.description for each in ranks}) == 1
        for tokens, targets, _ in steps:
            parts = [next(each) for each in ranks]
            assert torch.equal(torch.cat([part[0] for part in parts]), tokens)
            assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    rows = [tuple(row) for tokens, *_ in steps for row in tokens.tolist()]
    epochs = [rows[i : i + 10] for i in range(0, 40, 10)]
    assert len({*rows}) == 10 and all(sorted(each) == sorted(epochs[0]) for each in epochs)
    assert len({*map(tuple, epochs)}) == 4  # each in its own order
    assert whole.epoch_samples == 10 and whole.sample == 40
    assert not torch.equal(next(batches(None, global_batch=4, seed=4))[0], steps[0][0])
    with pytest.raises(ValueError, match="--batch"):
        batches(None, global_batch=4, world=3)


@pytest.mark.parametrize("pad", PADS)
def test_a_jump_by_sample_equals_iterating(batches, pad):
    lines = chats(40)
    stream = batches(lines, pad=pad, global_batch=3)
    steps = steps_of(stream, 20)
    other = batches(None, pad=pad, global_batch=3)
    for step in (11, 0, 19, 7):
        other.sample = 3 * step
        for one, two in zip(next(other)[:2], steps[step][:2], strict=True):
            assert torch.equal(one, two)


# What is held out


@pytest.mark.parametrize("pad", PADS)
def test_what_is_held_out_is_never_trained_on_and_the_same_for_any_number_of_ranks(batches, pad):
    lines = chats(200)
    everything = batches(lines, pad=pad)
    stream = batches(None, pad=pad, hold_out=True, global_batch=4)
    assert "197 to train on" in stream.description and "; 3 held out" in stream.description
    trained = pairs(stream, -(-stream.epoch_samples // 4))
    held = list(stream.held_out(9))
    assert len(held) == -(-len(stream.held) // 4) == 1 and (held[0][1][len(stream.held) :] == IGNORE).all()
    apart = pairs(iter(held), 1)
    assert apart and not {str(each) for each in apart if len(each[0]) > 20} & {str(each) for each in trained}
    assert len(apart) + stream.labels == everything.labels
    for rank in range(4):
        mine = batches(None, pad=pad, hold_out=True, global_batch=4, rank=rank, world=4)
        for (tokens, targets, _), (whole, all_targets, _) in zip(mine.held_out(9), held, strict=True):
            assert torch.equal(tokens, whole[rank : rank + 1]) and torch.equal(targets, all_targets[rank : rank + 1])
    assert stream.fingerprint != everything.fingerprint
    assert not everything.held and not list(everything.held_out(9))
    for each, first in ((stream, held[0]), (everything, next(everything))):  # --sample has what is before an answer
        tokens, targets, _ = first
        given = int((targets[0] != IGNORE).nonzero()[0]) + 1
        assert each.prompt(99) == tokens[0, :given].tolist() and each.prompt(3) == each.prompt(99)[-3:]


class Says(torch.nn.Module):
    """A model that says a word of two tokens and then ends, whatever it is asked."""

    def __init__(self, given, words):
        super().__init__()
        self.given, self.words = given, words

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, 512)
        for i, word in enumerate(self.words):
            logits[0, self.given + i - 1, word] = 99.0
        return logits


def test_a_sample_answers_a_prompt_and_stops_where_the_answer_ends(batches, tokenizer):
    stream, end = batches(chats(200), hold_out=True), tokenizer().convert_tokens_to_ids("<|im_end|>")
    prompt = stream.prompt(64)
    c = SimpleNamespace(seqlen=128, seed=0, sample=9, vocab=512, attn="sdpa")
    step = SimpleNamespace(model=Says(len(prompt), [60, 61, end, 62, 63, 64, 65, 66, 67]), phase="fwd")
    head, text = sample(c, step, stream, torch.device("cpu"))
    assert head == f"sample   {len(prompt)} tokens of held-out data, then after | 3 that the model wrote:"
    assert text.startswith("<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nQuestion 197?<|im_end|>\n")
    assert text.endswith(f"<|im_start|>assistant\n|{stream.tokenizer.decode([60, 61])}<|im_end|>")
    whole = batches([dict(text="One. " * 9)] * 9)  # which is learned from its beginning
    assert whole.prompt(5) == whole.example(0)[0][:5].tolist()


def test_a_line_is_never_on_both_sides(batches):
    lines = [*chats(5), dict(messages=TURNS)]
    stream = batches(lines, "qwen3", hold_out=True)  # the last line is two examples
    assert "7 examples" in stream.description and "5 to train on" in stream.description and len(stream.held) == 2
    refuse("two lines with a label", batches, lines[-1:], "qwen3", hold_out=True)


def test_a_second_source_is_held_out(batches, tokenizer, tmp_path):
    other = jsonl(tmp_path / "eval.jsonl", chats(3, "No. "))
    stream = batches(chats(9), eval_source=str(other), hold_out=True, global_batch=2)
    assert stream.epoch_samples == 9 and len(stream.held) == 3 and f"3 held out of {other}" in stream.description
    one, two = stream.held_out(5)
    assert "Answer 0: No." in tokenizer().decode(one[0][0]) and (two[1][1] == IGNORE).all()
    with pytest.raises(ValueError, match="--eval-data .*: .*chat.jsonl is also in --data"):
        batches(None, eval_source=f"{tmp_path}/*.jsonl")
    other.write_text("nothing\n")
    refuse("eval.jsonl, line 1", batches, None, eval_source=str(other))


# The cache


@pytest.fixture
def reads(monkeypatch):
    """One entry for each time that data is tokenised."""
    calls, real = [], examples.read
    monkeypatch.setattr(examples, "read", lambda *given, **how: calls.append(given) or real(*given, **how))
    return calls


def test_the_cache_is_used_until_something_changes(batches, tokenizer, tmp_path, monkeypatch, reads):
    first, made = batches(chats(9)), tokenizer("qwen2.5")
    with monkeypatch.context() as patch:
        patch.setattr(type(made), "__call__", None)  # the tokenizer is not called again
        patch.setattr(type(made), "apply_chat_template", None)
        again = batches(None, made=made, seqlen=127, pad="pack", hold_out=True)
    assert len(reads) == 1 and again.labels + again.data.labels[-1] == first.labels
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    batches(None, template="llama3")
    batches(None, made=tokenizer("qwen2.5", eos="<|im_end|>"))
    larger = tokenizer("qwen2.5")
    larger.add_tokens(["Answer"])
    batches(None, made=larger)
    batches(chats(10))
    assert len(reads) == 5
    assert {each.suffix for each in (tmp_path / "cache").iterdir()} == {".safetensors", ".lock"}


def test_memory_while_tokenising_does_not_grow_with_the_tokens(tokenizer, tmp_path):
    def made(number):
        """(most bytes that Python held, bytes of tokens)"""
        path = jsonl(tmp_path / f"{number}.jsonl", [dict(text="What is two and two? " * 60)] * number)
        tracemalloc.start()
        data = examples.tokenised([path], tokenizer(), Rules(), str(tmp_path / "cache"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(data.ends) == number and data.ends[-1] > 300 * number
        return peak, 4 * data.ends[-1]

    made(3)  # what is imported and kept
    (peak, size), (higher, more) = made(examples.CHUNK), made(4 * examples.CHUNK)
    assert higher - peak < (more - size) / 4, (higher - peak, more - size)


def test_a_disk_without_room_for_tokens_is_told_in_one_line(batches, monkeypatch):
    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(examples.tempfile, "TemporaryFile", lambda dir: nullcontext(SimpleNamespace(write=full)))
    refuse("cache: expected room for the token ids, found .*No space left on device; fre", batches, chats(3))


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_cache_is_made_again(batches, tmp_path, capsys, damage):
    stream = batches(chats(9))
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    whole = path.read_bytes()
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    del stream
    path.unlink()  # a process that has it mapped keeps what it has
    path.write_bytes(dict(cut=whole[:-9], flipped=flipped, emptied=b"")[damage])
    capsys.readouterr()
    batches(None)
    assert "damaged" in capsys.readouterr().out and path.read_bytes() == whole
    batches(None)
    assert capsys.readouterr().out == ""


def test_of_several_at_once_one_tokenises_and_the_others_wait(batches, tmp_path, reads):
    batches(chats(50))
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    made = []
    threads = [threading.Thread(target=lambda: made.append(batches(None))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(reads) == 2 and len(made) == 4 and len({each.fingerprint for each in made}) == 1


def test_a_cache_with_bad_lines_is_no_way_around_them(batches):
    lines = [*chats(3), b"broken"]
    skipped = batches(lines, bad_lines="skip")
    assert batches(None, bad_lines="skip").description == skipped.description
    refuse("line 4", batches, None)


def test_without_a_cache_the_data_is_the_same(batches, tmp_path, capsys):
    stream = batches(chats(9))
    (tmp_path / "file").touch()
    other = batches(None, cache=str(tmp_path / "file"))
    assert "tokenises the data for itself" in capsys.readouterr().out
    assert other.fingerprint == stream.fingerprint and pairs(other, 9) == pairs(stream, 9)


def test_the_digest_by_which_a_checkpoint_knows_its_data_does_not_change_with_the_cache(monkeypatch):
    monkeypatch.setattr(examples, "PIECE", 2)
    ids, learned, seams = np.array([5, 6, 7, 8, 9], np.int32), np.array([0, 1, 0, 1, 1], bool), np.array([0, 1], bool)
    table = ends, lines, labels, _ = np.array([[2, 0, 1, 0], [5, 3, 2, 1]]).T
    data = examples.Tokenised(*table, lambda at, count: (2 * ids + learned)[at : at + count], {})
    bytes = b"".join(each.tobytes() for each in (ids, learned, ends, lines, seams))
    found = examples._digests(data)
    assert found["digest"] == hashlib.blake2b(bytes, digest_size=16).hexdigest()
    other = examples._digests(data._replace(labels=labels + 1))
    assert other["digest"] == found["digest"] and other["whole"] != found["whole"]


def test_the_fingerprint_is_that_of_the_tokens(batches):
    stream = batches(chats(9))
    same = batches([json.dumps(each, indent=None, separators=(",", ":")).encode() for each in chats(9)])
    assert same.fingerprint == stream.fingerprint  # white space alone has changed
    assert batches(chats(10)).fingerprint != stream.fingerprint
    assert batches(chats(9, "Yep. ")).fingerprint != stream.fingerprint
    assert batches(chats(9), pad="pack").fingerprint != stream.fingerprint
