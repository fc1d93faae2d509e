"""Chat data of trainer/finetuning: an answer is learned from where a model that is asked would go on.

    python -m pytest tests/test_chat_seams.py

On a CPU, with a tokenizer that merges across everything but special tokens, over texts that nobody foresaw.
"""

import random
import re
from itertools import accumulate

import pytest
from conversations import PROMPT, SPECIAL, TURNS, refuse
from fixtures import byte_level
from test_chat import learned_text

from trainer.finetuning import examples
from trainer.finetuning.templates import Rules

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("error")

PIECES = ["\n", "\n\n", " ", "  ", "an", "ans", "swer", "answer", ":", "é", "→", "\t", "1", "12", "3", ". ", "</", "b>"]
SPLIT = re.compile("|".join(map(re.escape, SPECIAL)))
EACH = "{% for m in messages %}%s{% endfor %}"
ASKED = {  # how a template begins an answer, with and without a special token before it
    "special": ("{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}", "<|im_start|>assistant\n"),
    "words": ("{{ m.role + ': ' + m.content + eos_token }}", "assistant: "),
    "nothing": ("{{ m.role + m.content + eos_token }}", "assistant"),
    "marked": ("{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content[:1] }}{% endgeneration %}"
               "{% generation %}{{ m.content[1:] + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
               "assistant:"),
}  # fmt: skip
WAYS = {name: EACH.replace("%s", each) + PROMPT.replace("%s", begin) for name, (each, begin) in ASKED.items()}


@pytest.fixture(scope="module")
def merging():
    """A byte-level BPE that was trained on texts without a cut at words."""
    drawn = random.Random(0)
    texts = ["".join(drawn.choices(PIECES, k=12)) for _ in range(900)]
    roles = [f"{role}{between}{text[:9]}" for role in ("user", "assistant") for between in ("", ":", ": ", "\n")
             for text in texts]  # fmt: skip
    return byte_level(texts + roles, 700, use_regex=False)


def text_of(drawn):
    return "".join(drawn.choices(PIECES, k=drawn.randrange(1, 6))) + drawn.choice(["", "", "\n", " ", "x"])


@pytest.mark.long
@pytest.mark.parametrize("way", [*WAYS, "strings"])
def test_an_answer_begins_after_the_tokens_of_its_prompt_whatever_stands_there(batches, tokenizer, merging, way):
    made = tokenizer(WAYS.get(way))
    made.backend_tokenizer.model, made.backend_tokenizer.pre_tokenizer = merging.model, merging.pre_tokenizer
    ids_of = lambda text: made(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    text = lambda ids: made.decode(ids, clean_up_tokenization_spaces=False)  # noqa: E731
    drawn, merged, natural = random.Random(way), 0, 0
    ends = dict(strings=["<|end|>"], special=["<|im_end|>"] * 2).get(way, ["<|end|>"] * 2)
    while min(merged, natural) < 20:
        contents = [f"{text_of(drawn)}{drawn.choice('ab1')}{text_of(drawn)}" for _ in range(4)]
        line = dict(messages=[turn | dict(content=each) for turn, each in zip(TURNS, contents, strict=True)])
        if way == "strings":
            line = dict(prompt=contents[0], completion=contents[1])
        stream = batches([line], made=made, seqlen=999, vocab=999)
        ids, learned = stream.example(0)
        begin = int(way == "strings")  # for bos
        assert learned_text(stream) == [x + end for x, end in zip(contents[1::2], ends, strict=False)], contents
        starts = (~learned[:-1] & learned[1:]).nonzero()[0] + 1
        for start in starts:  # from the last special token, as none is merged with it
            last = max((i for i in range(start) if ids[i] in made.added_tokens_decoder), default=-1)
            assert ids[last + 1 : start].tolist() == ids_of(SPLIT.split(text(ids[begin:start]))[-1])
        whole = ids_of(text(ids[begin:]))
        prompts = [ids_of(text(ids[begin:start])) for start in starts]
        across = any(whole[: len(prompt)] != prompt for prompt in prompts)
        merged, natural = merged + across, natural + (not across)
        assert across or ids[begin:].tolist() == whole
        assert stream.preview(0, False).endswith("start of an answer; it is split there") == across
        assert ("1 with tokens across the start of an answer, cut there" in stream.description) == across


def drawn_texts(drawn, count):
    """Texts with special tokens in them, and where they could be cut: not within one."""
    for _ in range(count):
        pieces = [drawn.choice(SPECIAL if drawn.random() < 0.3 else PIECES) for _ in range(drawn.randrange(2, 30))]
        ends = [*accumulate(map(len, pieces))]
        yield "".join(pieces), sorted(drawn.sample(ends, drawn.randrange(1, len(ends))))


@pytest.mark.parametrize("strips", [False, True])
def test_tokens_of_a_text_up_to_any_cut_are_those_of_that_text_alone(tokenizer, merging, strips):
    """strips: of special tokens one takes the spaces before it, which are then no tokens."""
    made = tokenizer()
    made.backend_tokenizer.model, made.backend_tokenizer.pre_tokenizer = merging.model, merging.pre_tokenizer
    if strips:
        made.add_tokens([tokenizers.AddedToken("<|im_end|>", lstrip=True, special=True)], special_tokens=True)
    encoder = examples.Encoder([], made, Rules())
    assert (encoder.tokens(["1 <|im_end|>"]) == encoder.tokens(["1<|im_end|>"])) == strips
    unlike = 0
    for text, edges in drawn_texts(random.Random(1), 150):
        (whole,) = encoder.tokens([text])
        alone = encoder.tokens([text[:edge] for edge in edges])
        found = [(at + len(ids), whole[at : at + len(ids)] == ids) for at, ids in encoder.prefixes(text, whole, edges)]
        assert found == [(len(ids), whole[: len(ids)] == ids) for ids in alone], (text, edges)
        unlike += not all(alike for _, alike in found)
    assert unlike > 20


def test_what_is_tokenised_of_a_chat_grows_as_its_turns_do(batches, tokenizer, merging, monkeypatch):
    made = tokenizer(WAYS["words"])
    made.backend_tokenizer.model, made.backend_tokenizer.pre_tokenizer = merging.model, merging.pre_tokenizer
    sizes, real = [], examples.Encoder.tokens
    counted = lambda self, texts: sizes.extend(map(len, texts)) or real(self, texts)  # noqa: E731
    monkeypatch.setattr(examples.Encoder, "tokens", counted)
    shares = []
    for count in (5, 50):
        turns = [turn | dict(content=f"\nanswer {i}") for i in range(count) for turn in TURNS[:2]]
        sizes.clear()
        stream = batches([dict(messages=turns)], made=made, seqlen=9999, vocab=999)
        assert "1 with tokens across the start of an answer" in stream.description
        shares.append(sum(sizes) / len(stream.readable(stream.example(0)[0].tolist())))
    assert shares[1] < 1.1 * shares[0] < 6, shares


@pytest.mark.parametrize("prompt, refused", [("an", True), ("an ", False)])
def test_a_tokenizer_that_puts_a_space_before_each_text_is_not_cut(batches, tokenizer, prompt, refused):
    made = tokenizer()
    made.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    made.backend_tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    trained = tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, show_progress=False)
    made.backend_tokenizer.train_from_iterator(["answer"] * 9, trained)
    line = dict(prompt=prompt, completion="swer")
    if refused:
        refuse("a tokenizer that can encode a text in parts, found one that puts a space", batches, [line], made=made)
    else:  # no token lies across
        assert "an [[swer" in batches([line], made=made).preview(0, False)
