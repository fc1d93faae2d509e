"""Chat data of trainer/finetuning: an answer is learned from where a model that is asked would go on.

    python -m pytest tests/test_chat_seams.py

On a CPU, with a tokenizer that merges across everything but special tokens, over texts that nobody foresaw.
"""

import random
import re

import pytest
from conversations import PROMPT, SPECIAL, TURNS, refuse
from fixtures import byte_level
from test_chat import learned_text

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


@pytest.mark.parametrize("way", [*WAYS, "strings"])
def test_an_answer_begins_after_the_tokens_of_its_prompt_whatever_stands_there(batches, tokenizer, merging, way):
    made = tokenizer(WAYS.get(way))
    made.backend_tokenizer.model, made.backend_tokenizer.pre_tokenizer = merging.model, merging.pre_tokenizer
    ids_of = lambda text: made(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    drawn, merged, natural = random.Random(way), 0, 0
    while min(merged, natural) < 20:
        contents = [f"{text_of(drawn)}{drawn.choice('ab1')}{text_of(drawn)}" for _ in range(4)]
        line = dict(messages=[turn | dict(content=each) for turn, each in zip(TURNS, contents, strict=True)])
        if way == "strings":
            line = dict(prompt=contents[0], completion=contents[1])
        streams = {seam: batches([line], made=made, seqlen=999, vocab=999, seam=seam) for seam in ("split", "say")}
        (split, learned), (plain, _) = (stream.example(0) for stream in streams.values())
        begin = [made.bos_token_id] * (way == "strings")
        whole = made.decode(plain[len(begin) :], clean_up_tokenization_spaces=False)
        assert plain.tolist() == begin + ids_of(whole)
        ends = dict(strings=["<|end|>"], special=["<|im_end|>"] * 2).get(way, ["<|end|>"] * 2)
        answers = [content + end for content, end in zip(contents[1::2], ends, strict=False)]
        assert learned_text(streams["split"]) == answers, (contents, plain)
        edges = (~learned[:-1] & learned[1:]).nonzero()[0] + 1
        prompts = [made.decode(split[len(begin) : edge], clean_up_tokenization_spaces=False) for edge in edges]
        for edge, prompt in zip(edges, prompts, strict=True):  # from the last special token, as none is merged with it
            last = max((i for i in range(edge) if split[i] in made.added_tokens_decoder), default=-1)
            assert split[last + 1 : edge].tolist() == ids_of(SPLIT.split(prompt)[-1])
        across = any(ids_of(whole)[: len(ids_of(prompt))] != ids_of(prompt) for prompt in prompts)
        merged, natural = merged + across, natural + (not across)
        for seam, stream in streams.items():
            assert stream.preview(0, False).endswith(f"start of an answer: --seam {seam}") == across
        words = "1 with tokens across the start of an answer"
        assert (f"{words}, cut there" in streams["split"].description) == across
        assert (f"{words};" in streams["say"].description) == across
        if across:
            refuse("line 1: expected a token that ends where an answer begins, found '",
                batches, [line], made=made, seam="refuse")
        else:
            refusing = batches([line], made=made, seqlen=999, vocab=999, seam="refuse")
            assert refusing.fingerprint == streams["say"].fingerprint and split.tolist() == plain.tolist()


def test_what_is_kept_across_the_start_is_learned_whole(batches, tokenizer):
    line, made = dict(prompt="What is the ans", completion="wer"), tokenizer()
    trained = tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, show_progress=False)
    made.backend_tokenizer.train_from_iterator(["answer"] * 9, trained)
    assert "[[answer<|end|>]]" in batches([line], made=made, seam="say").preview(0, False)
    assert "ans[[wer<|end|>]]" in batches([line], made=made).preview(0, False)
    refuse("found 's the ans' . 'wer'; use --seam split or say", batches, [line], made=made, seam="refuse")


def test_a_tokenizer_that_puts_a_space_before_each_text_is_not_cut(batches, tokenizer):
    made = tokenizer()
    made.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    made.backend_tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    trained = tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, show_progress=False)
    made.backend_tokenizer.train_from_iterator(["answer"] * 9, trained)
    line = dict(prompt="an", completion="swer")
    refuse("a tokenizer that can go on within a text, .* use --seam say or refuse", batches, [line], made=made)
    assert "answer" in batches([line], made=made, seam="say").preview(0, False)
