"""Chat data of trainer/finetuning: rows and packing, order and ranks, what is held out, the cache.

    python -m pytest tests/test_chat_batches.py

On a CPU, with the tokenizer and the templates of tests/test_chat.py.
"""

import errno
import json
import re
import threading
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conversations import TURNS, chats, jsonl, long_chats, refuse, steps_of

from model import IGNORE
from trainer.evaluation import sample
from trainer.finetuning import examples
from trainer.finetuning.chat import ChatBatches, pack
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


@pytest.mark.parametrize("pad", PADS)
def test_a_batch_says_how_many_tokens_of_each_row_are_learned(pad, batches):
    stream = batches([*chats(12), dict(text="Some text.")], pad=pad, learned=True, global_batch=2, hold_out=True)
    for tokens, targets, inputs in (*steps_of(stream, 4), *stream.held_out(1)):
        assert inputs["learned"].tolist() == (targets != IGNORE).sum(1, keepdim=True).tolist() != [[0], [0]]
        assert len(tokens) == 2


def test_packing_fills_rows_and_loses_nothing():
    lengths = np.random.default_rng(0).integers(1, 65, 2000)
    rows = pack(lengths, 64)
    assert sorted(sum(rows, [])) == [*range(2000)] and max(lengths[row].sum() for row in rows) <= 64
    assert len(rows) <= 1.02 * lengths.sum() / 64 + 1


def test_rows_that_are_as_long_as_needed_have_one_of_eight_lengths(batches):
    lines = [dict(text="word" * (i // 2 + 1)) for i in range(60)]
    longest, whole = (batches(lines, pad=pad, seqlen=100, global_batch=4) for pad in ("longest", "fixed"))
    lengths = set()
    for (tokens, targets, _), (all_tokens, all_targets, _) in zip(steps_of(longest, 30), whole, strict=False):
        T = tokens.shape[1]
        lengths.add(T)
        assert T in {*range(13, 100, 13), 100} and torch.equal(tokens, all_tokens[:, :T])
        assert torch.equal(targets, all_targets[:, :T]) and not (all_targets[:, T:] != IGNORE).any()
        assert (all_targets[:, (T - 1) // 13 * 13 :] != IGNORE).any()  # not longer than needed
    assert len(lengths) > 2


def test_examples_are_cut_to_the_row_and_dropped_without_a_label_and_counted(batches):
    lines = [*chats(3), dict(prompt="long " * 100, completion="yes"), dict(text="long " * 100)]
    whole, stream = batches(lines, seqlen=600), batches(lines, seqlen=80)
    assert "5 examples; 5 to train on" in whole.description
    assert "5 examples, 2 cut to 81 tokens, 1 without a token to train on; 4 to train on" in stream.description
    ids, learned = whole.example(4)
    assert [each.tolist() for each in stream.example(3)] == [ids[:81].tolist(), learned[:81].tolist()]
    found = [next(stream) for _ in range(4)]
    assert sum(int((targets != IGNORE).sum()) for _, targets, _ in found) == stream.labels
    words = "an example with a token to train on, found .*1 cut to 41 .*1 without a token.*; raise --seqlen"
    refuse(words, batches, lines[3:4], seqlen=40)


@pytest.mark.parametrize("pad", PADS)
def test_the_summary_tells_the_learned_share_the_longest_and_the_padding(batches, pad):
    lines = [dict(prompt="p" * (i % 11), completion="word" * (i % 7 + 1)) for i in range(39)]
    lines.append(dict(prompt="p" * 120, completion="a"))  # has no label within the row
    lines.append(dict(prompt="p" * 20, completion="a" * 120))
    stream = batches(lines, pad=pad, seqlen=100, global_batch=4)
    told = re.search(r" \((.*)%\) are learned, the longest of 142(; (.*)% of the rows is padding)?", stream.description)
    examples = [stream.example(number) for number in range(40)]
    tokens = sum(len(ids) - 1 for ids, _ in examples)
    assert told[1] == f"{sum(mask[1:].sum() for _, mask in examples) / tokens:.1%}"[:-1]
    assert told[3] == (None if pad == "longest" else f"{1 - tokens / (100 * stream.epoch_samples):.1%}"[:-1])
    assert f"{stream.padding:.1%}" == f"{told[3] or '0.0'}%"


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
        saved = int(re.search("; ([0-9']*) tokens are shared by several", shared.description)[1].replace("'", ""))
        assert saved == apart.tokens - shared.tokens and apart.fingerprint != shared.fingerprint
        assert "are shared by several" not in apart.description


# Order, ranks and what is held out


SETTINGS = [dict(pad="fixed", template="qwen2.5", weights=""), dict(pad="longest", template="qwen3", weights=":0.7"),
            dict(pad="pack", template="qwen3", weights=""), dict(pad="pack", template="qwen3", weights=":0.7")]


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(setting.values()))
def test_batches_are_the_same_on_any_number_of_ranks_and_after_a_resume(setting, tokenizer, tmp_path):
    pad, template, weight = setting.values()
    files = [jsonl(tmp_path / "a.jsonl", chats(70)), jsonl(tmp_path / "b.jsonl", [*long_chats(6), *chats(70)])]
    how = dict(global_batch=4, seqlen=300, vocab=512, seed=3, cache=str(tmp_path), pad=pad, hold_out=True, until=True)
    make = lambda **more: ChatBatches([f"{file}{weight}" for file in files], tokenizer(template), **how | more)  # noqa: E731
    whole = make()
    steps, held = steps_of(whole, 70), [*whole.held_out(9)]
    assert whole.sample == 280 > whole.epoch_samples and len(held) == -(-len(whole.held) // 4)
    assert not torch.equal(next(make(seed=4))[0], steps[0][0])
    for world in (1, 2, 4):
        ranks = [make(rank=rank, world=world) for rank in range(world)]
        assert {(each.fingerprint, each.description) for each in ranks} == {(whole.fingerprint, whole.description)}
        for each in ranks:
            each.sample = 4 * 60
        parts = [(steps[60:], [steps_of(each, 10) for each in ranks]), (held, [[*each.held_out(9)] for each in ranks])]
        for batches, own in parts:
            for (tokens, targets, inputs), *mine in zip(batches, *own, strict=True):
                assert torch.equal(torch.cat([part[0] for part in mine]), tokens)
                assert torch.equal(torch.cat([part[1] for part in mine]), targets)
                for name, each in inputs.items():
                    assert torch.equal(torch.cat([part[2][name] for part in mine]), each)


def test_epochs_run_on_each_in_its_own_order(batches):
    whole = batches(chats(10), global_batch=4)
    rows = [tuple(row) for tokens, *_ in steps_of(whole, 10) for row in tokens.tolist()]
    epochs = [rows[i : i + 10] for i in range(0, 40, 10)]  # of which two end within a batch
    assert len({*rows}) == 10 and all(sorted(each) == sorted(epochs[0]) for each in epochs)
    assert len({*map(tuple, epochs)}) == 4 and whole.epoch_samples == 10
    with pytest.raises(ValueError, match="--batch"):
        batches(None, global_batch=4, world=3)


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize(("block", "form"), [(1 << 14, "auto"), (7, "auto"), (7, "text")])
def test_of_a_long_text_in_chunks_each_token_is_learned_once(batches, pad, block, form, monkeypatch, tmp_path):
    monkeypatch.setattr("trainer.finetuning.examples.BLOCK", block)
    others = chats(3) if form == "auto" else []
    texts = [" ".join(f"word{i * j}" for j in range(n)) for i, n in enumerate([1, 9, 200, 31])]
    lines = [*(dict(text=text) for text in texts), *others]
    how = dict(seqlen=32, pad=pad, cache=str(tmp_path / "c"), format=form)
    stream, cut = batches(lines, long_text="chunks", **how), batches(None, **how)
    sizes = stream.data.data.sizes
    assert stream.labels - sum(sizes[:4] - 1) == cut.labels - sum(np.minimum(sizes[:4], 33) - 1)
    targets = torch.cat([targets.flatten() for _, targets, *_ in steps_of(stream, stream.epoch_samples)])
    learned = sorted(targets[targets >= 0].tolist())
    expected = [t for i in range(4) for t in stream.data.data[i][0][1:].tolist()]
    for i in range(4, 4 + len(others)):
        ids, on = (part[:33] for part in stream.data.data[i])
        expected += ids[1:][on[1:]].tolist()
    assert learned == sorted(expected) and "3 in chunks of 32 tokens" in stream.description
    assert "cut" not in stream.description and "3 cut to 33 tokens" in cut.description
    assert stream.fingerprint != cut.fingerprint and max(stream.data.inputs) == 32


@pytest.mark.long
@pytest.mark.parametrize("pad", PADS)
def test_what_is_held_out_is_never_trained_on(batches, pad):
    everything, stream = batches(chats(200), pad=pad), batches(None, pad=pad, hold_out=True, global_batch=4)
    assert "197 to train on" in stream.description and "; 3 held out" in stream.description
    trained = pairs(stream, -(-stream.epoch_samples // 4))
    held = list(stream.held_out(9))
    assert (held[0][1][len(stream.held) :] == IGNORE).all()
    apart = pairs(iter(held), 1)
    assert apart and not {str(each) for each in apart if len(each[0]) > 20} & {str(each) for each in trained}
    assert len(apart) + stream.labels == everything.labels and stream.fingerprint != everything.fingerprint
    assert stream.held_examples(9) == 3 and everything.held_examples(9) == 0
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
    refuse("two lines to train on, of which one is held out, found one", batches, lines[-1:], "qwen3", hold_out=True)


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
    calls, real = [], examples.Encoder.rows
    monkeypatch.setattr(examples.Encoder, "rows", lambda *given: calls.append(given) or real(*given))
    return calls


def test_the_cache_is_used_until_something_changes(batches, tokenizer, tmp_path, reads):
    first = batches(chats(9))
    again = batches(None, seqlen=127, pad="pack", hold_out=True)
    assert len(reads) == 1 and again.labels + again.data.labels[-1] == first.labels
    larger = tokenizer("qwen2.5")
    larger.add_tokens(["Answer"])
    for made in (tokenizer("llama3"), tokenizer("qwen2.5", eos="<|im_end|>"), larger):
        batches(None, made=made)
    batches(chats(10))
    assert len(reads) == 5 and len([*(tmp_path / "cache").glob("chat-*[!k]")]) == 5


@pytest.mark.long
def test_memory_while_tokenising_does_not_grow_with_the_tokens(tokenizer, tmp_path):
    def made(number):
        """(most bytes that Python held, bytes of tokens)"""
        path = jsonl(tmp_path / f"{number}.jsonl", [dict(text="What is two and two? " * 60)] * number)
        tracemalloc.start()
        data = examples.tokenised([path], tokenizer(), Rules(), str(tmp_path / "cache"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(data.sizes) == number and data.sizes.sum() > 300 * number
        return peak, 4 * data.sizes.sum()

    made(3)  # what is imported and kept
    (peak, size), (higher, more) = made(examples.CHUNK), made(4 * examples.CHUNK)
    assert higher - peak < (more - size) / 4, (higher - peak, more - size)


@pytest.mark.long
def test_a_process_holds_some_eighty_bytes_per_example(batches):
    stream = batches(chats(2000))
    arrays = [array for each in (stream.data, stream.data.data) for array in vars(each).values()]
    assert 60 < sum(array.nbytes for array in arrays if isinstance(array, np.ndarray)) / 2000 < 90


def test_a_disk_without_room_for_tokens_is_told_in_one_line(batches, monkeypatch):
    def full(*_, **how):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.write_table", full)
    monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.write_batch", full)
    refuse("chat-.*: expected room for the token ids, found .*No space left on device; fre", batches, chats(3))


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_cache_is_made_again(batches, tmp_path, capsys, damage):
    fingerprint = batches(chats(9)).fingerprint
    (path,) = (tmp_path / "cache").rglob("*.arrow")
    whole = path.read_bytes()
    flipped = whole[:-99] + bytes([whole[-99] ^ 1]) + whole[-98:]
    path.unlink()  # a process that has it mapped keeps what it has
    path.write_bytes(dict(cut=whole[:-9], flipped=flipped, emptied=b"")[damage])
    capsys.readouterr()
    assert batches(None).fingerprint == fingerprint
    assert "damaged" in capsys.readouterr().out and path.read_bytes() == whole
    batches(None)
    assert capsys.readouterr().out == ""


def test_of_several_at_once_one_tokenises_and_the_others_wait(batches, tmp_path, reads):
    jsonl(tmp_path / "chat.jsonl", chats(50))
    made = []
    threads = [threading.Thread(target=lambda: made.append(batches(None))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(reads) == 1 and len(made) == 4 and len({each.fingerprint for each in made}) == 1


def test_a_cache_with_bad_lines_is_no_way_around_them(batches):
    skipped = batches([*chats(3), b"broken"], bad_lines="skip")
    assert batches(None, bad_lines="skip").description == skipped.description
    refuse("line 4", batches, None)


def test_without_a_cache_the_data_is_the_same(batches, tmp_path, capsys):
    stream = batches(chats(9))
    (tmp_path / "file").touch()
    other = batches(None, cache=str(tmp_path / "file"))
    assert "tokenises the data for itself" in capsys.readouterr().out
    assert other.fingerprint == stream.fingerprint and pairs(other, 9) == pairs(stream, 9)


def test_the_fingerprint_is_that_of_the_tokens(batches):
    stream = batches(chats(9))
    same = batches([json.dumps(each, indent=None, separators=(",", ":")).encode() + b"\n" for each in chats(9)])
    assert same.fingerprint == stream.fingerprint  # white space alone has changed
    for lines, changes in ((chats(10), {}), (chats(9, "Yep. "), {}), (chats(9), dict(pad="pack"))):
        assert batches(lines, **changes).fingerprint != stream.fingerprint
