"""A base model that is trained on chats stops where its answers end: stop tokens of what is exported, and of --sample.

pytest tests/test_end_tokens.py        # one rank; no GPU, no network
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from conversations import jsonl
from outcomes import fine, later

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from tiny_hf import edit_json, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.finetuning import end_tokens
from trainer.finetuning.model import blank_model

pytestmark = pytest.mark.usefixtures("isolated")
USUAL = "--steps", 30, "--lr", "1e-2", "--seqlen", 32, "--save", "a", "--keep", 1
START = "answers end with <|im_end|> (1), at which generation of --model does not stop (eos_token_id [0]); "
SAID = "; <|im_end|> (1) ends trained turns and is now a stop token, too"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of which documents end with token 0 and, as the tokenizer's template has it, answers with token 1."""
    folder = write_model(tmp_path_factory.mktemp("hf") / "base", eos_token_id=0)
    chats = [
        dict(messages=[dict(role="user", content=f"{i}?"), dict(role="assistant", content="Yes.")])
        for i in range(16)
    ]
    jsonl(folder.parent / "chat.jsonl", chats)
    return folder


@pytest.fixture
def teach(tune, base):
    return lambda *argv: tune(*USUAL, *argv, model=base, data=base.parent / "chat.jsonl")


def answer(folder, tokenizer_of=None, **how):
    """The tokens that generate() adds to a question."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of or folder)
    question = [dict(role="user", content="3?")]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = folder if tokenizer_of else AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        made = model.generate(**ids, max_new_tokens=24, do_sample=False, **how)
    return made[0, ids["input_ids"].shape[1] :].tolist()


def ends_of(folder):
    """eos_token_id of both files."""
    return [
        json.loads(Path(folder, name).read_text()).get("eos_token_id")
        for name in ("config.json", "generation_config.json")
    ]


@pytest.mark.long
def test_a_model_that_was_trained_on_chats_stops_where_its_answers_end(teach, base, capfd):
    done = fine(teach("--export", "out", "--sample", 12, "--eval-every", 30))
    assert START + "--export writes eos_token_id [0, 1]" in done.err + done.out and SAID in done.out
    assert ends_of(base) == [0, 0] and ends_of("out") == [[0, 1], [0, 1]]
    written = answer("out")
    assert written[-1] == 1 and len(written) < 8 and written.count(1) == 1
    # What was asked for is kept, and the model as it was would go on.
    assert SAID not in fine(teach("--export", "kept", "--keep-eos", "--eval-every", 30)).out
    assert ends_of("kept") == [0, 0] and len(answer("kept")) == 24
    for name in ("config.json", "generation_config.json"):
        assert Path("kept", name).read_bytes() == (base / name).read_bytes()
    # A checkpoint knows it, without the data.
    assert SAID in fine(later(capfd, "a", "later", "--model", base)).out and ends_of("later") == [
        [0, 1],
        [0, 1],
    ]
    assert SAID not in fine(later(capfd, "a", "later-kept", "--model", base, "--keep-eos")).out
    assert ends_of("later-kept") == [0, 0]


@pytest.mark.long
def test_adapters_say_what_stops_them_and_a_merged_model_stops(teach, base, capfd):
    peft = pytest.importorskip("peft")
    lora = "--lora", 8, "--steps", 60
    done = fine(teach(*lora, "--export", "out"))
    call = "generate(eos_token_id=[0, 1])"
    assert START + f"adapters cannot change that: {call}, or --merge" in done.err + done.out
    assert f"<|im_end|> (1), at which the base model does not stop; call {call}" in done.out
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "out").eval()
    assert len(answer(model, base)) == 24 and answer(model, base, eos_token_id=[0, 1])[-1] == 1
    assert SAID in fine(later(capfd, "a", "merged", "--model", base, "--merge")).out
    written = answer("merged")
    assert ends_of("merged") == [[0, 1], [0, 1]] and written[-1] == 1 and len(written) < 8
    assert call in fine(later(capfd, "a", "again", "--model", base)).out


@pytest.mark.long
def test_sample_stops_where_the_export_does(teach):
    """Not at every special token, such as that which begins a turn."""
    kept = fine(teach("--keep-eos", "--sample", 12, "--eval-every", 30))
    assert "--keep-eos leaves that so: generate(eos_token_id=[0, 1])" in kept.err + kept.out
    stops = fine(teach("--sample", 12, "--eval-every", 30, "--save", "b"))
    lengths = [
        [*map(int, re.findall(r"\| (\d+) that the model wrote", each.out))]
        for each in (kept, stops)
    ]
    assert lengths[0][-1] == 12 and lengths[1][-1] < 8


def test_a_model_that_stops_there_keeps_its_files_and_hears_nothing(tune, qwen):
    done = fine(tune("--steps", 1, "--export", "out"))
    assert "does not stop" not in done.err + done.out and SAID not in done.out
    for name in ("config.json", "generation_config.json"):
        assert Path("out", name).read_bytes() == (qwen / name).read_bytes()


@pytest.mark.long
def test_the_template_that_is_trained_with_decides(tune, qwen, tmp_path):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|pad|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    Path("other.jinja").write_text(template)
    done = fine(tune("--steps", 1, "--template", "other.jinja", "--export", "out"))
    assert "<|pad|> (0) ends trained turns and is now a stop token" in done.out and ends_of("out") == [[1, 0], [1, 0]]
    # A text ends with the tokenizer's own.
    data = jsonl(tmp_path / "text.jsonl", [dict(text="one two"), dict(text="three")])
    assert "stop token" not in fine(tune("--steps", 1, "--export", "text", data=data)).out


@pytest.mark.parametrize("kind", ["qwen2.5", "xglm"])
@pytest.mark.parametrize("file", [True, False])
def test_the_files_that_decide_are_changed_and_transformers_reads_them(kind, file, tmp_path):
    folder = write_model(tmp_path / "m", kind, eos_token_id=5)
    if not file:
        os.remove(folder / "generation_config.json")
    config = blank_model(str(folder)).model.config
    stops = end_tokens.stop_tokens(str(folder), config)
    assert stops == [5] and end_tokens.not_stopping(stops, {"a": 5, "b": 7}) == {"b": 7}
    end_tokens.write(str(folder), config, stops, {"b": 7})
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [5, 7]
    assert model.config.eos_token_id in ([5, 7], 5)


def test_a_file_of_generation_decides_over_the_configuration(tmp_path):
    folder = write_model(tmp_path / "m", eos_token_id=5)
    config = blank_model(str(folder)).model.config
    for told, stops in (([5, 7], [5, 7]), (None, []), (7, [7])):
        edit_json(folder / "generation_config.json", eos_token_id=told)
        assert end_tokens.stop_tokens(str(folder), config) == stops
