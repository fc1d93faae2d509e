"""Conversations as a chat template writes them, and which characters of that are learned.

    template = ChatTemplate(tokenizer, Rules())
    examples = template.examples(messages, 0, line)     # BadLine, or DataError where no line could be used

An answer is what the template has in {% generation %}. In a template without, it is what the conversation up to it has
more than the conversation before it with add_generation_prompt, if the one text begins with the other. Templates that
write an answer otherwise once another follows (Qwen3's drops its thinking) give one example for each such answer: what
the model sees when it is asked for it. Templates that write the current date are given DATE.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from contextlib import suppress
from datetime import date
from itertools import chain, pairwise, product
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data import DataError, unusable
from trainer.finetuning import messages as forms
from trainer.finetuning.messages import LEAVE_OUT, BadLine
from trainer.terminal.output import regular
from trainer.terminal.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATE = date(2024, 7, 26)  # that which Llama's templates have by themselves
NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
OF_CHATS = "tools", "chat_template_kwargs"  # keys of a line beside its messages
# Names that no template argument may have.
OWN = "messages", "tools", "documents", "add_generation_prompt", "chat_template"
# Names of arguments that open or close <think> in the generation prompt.
SWITCHES = "enable_thinking", "thinking"
# Messages of a line. Without {% generation %} it is rendered once for each answer, with it transformers joins the text
# so far at each: time grows with the square of their number.
MOST_MESSAGES = 2000
MOST_MARKED = 10_000
RENDER = f"use a role and a key that the template renders, or leave the key out{LEAVE_OUT}"
TEMPLATE = (
    "put {% generation %} and {% endgeneration %} into a copy of the template, around answers with their "
    "end-of-turn token, and name it by --template"
)
# --template NAME, of families whose own template is refused: {name: (words by which their own is known, the template)};
# OWN_TEXT stands for their own one.
OWN_TEXT = "{{ own }}"
NAMED = {
    # The last answer begins with its thoughts, as a model that is asked goes on; those before have lost them.
    "deepseek-r1": (
        "<｜Assistant｜>",
        """{%- set asked = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor -%}
{{- bos_token + messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\n\n') -}}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}
        {{- '<｜User｜>' + m.content -}}
    {%- elif m.role == 'assistant' -%}
        {%- set thoughts, _, answer = ('</think>' + m.content).rpartition('</think>') -%}
        {{- '<｜Assistant｜>' -}}
        {%- if loop.index0 > asked.last -%}
            {%- set thoughts = thoughts[8:].removeprefix('<think>').strip('\n') -%}
            {{- '<think>\n' + (m.reasoning_content or thoughts) + '\n</think>\n\n' -}}
            {%- set answer = answer.lstrip('\n') -%}
        {%- endif -%}
        {{- answer + '<｜end▁of▁sentence｜>' -}}
    {%- elif m.role != 'system' -%}
        {{- raise_exception('a template without the role ' + m.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif -%}""",
    ),
    # A turn ends where the next one begins, with a token at which generation stops.
    "glm-4.5": (
        "[gMASK]",
        OWN_TEXT
        + """{%- set last = messages[-1] -%}
{%- if last.role == 'assistant' and not add_generation_prompt -%}
    {{- '<|observation|>' if last.tool_calls else '<|user|>' -}}
{%- endif -%}""",
    ),
}


def way_on(template: str) -> str:
    """What to do where this one is refused."""
    names = [name for name, (sign, _) in NAMED.items() if sign in template]
    return f"add --template {names[0]}" if names else TEMPLATE


class Rules(NamedTuple):
    """How lines are read."""

    bad_lines: str = "stop"  # at the first, or "skip" them and count
    # For the chat template; those of a line go before.
    template_args: dict[str, Any] = {}
    format: str = "auto"  # of columns.FORMATS: what a line is
    columns: dict[str, str] = {}  # {name here: name in the data}
    mask_history: bool = False  # of a chat the last answer alone is learned


class Example(NamedTuple):
    text: str
    spans: list[tuple[int, int]]  # characters that are learned
    chat: bool  # False: bos and eos are put around the tokens
    form: str = ""  # what its line was, for people

    @property
    def parts(self) -> list[str]:
        """The text cut where what is learned begins and ends: every other part is learned, from the second on."""
        edges = [0, *chain.from_iterable(self.spans), len(self.text)]
        return [self.text[begin:end] for begin, end in pairwise(edges)]


def render(turns: list[dict], how: dict, **more: bool) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as the template writes it, and what it has in {% generation %}. BadLine: the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), spans = render_jinja_template([turns], **how, **more)
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # whatever a template does with what it is given
        raise BadLine("messages that the chat template accepts", one_line(error)) from error
    counts = Counter(chain(*chain.from_iterable(spans)))
    # Not where a span ends and another begins.
    edges = sorted(edge for edge, count in counts.items() if count % 2)
    return text, [*zip(edges[::2], edges[1::2], strict=True)]


def asked(turns: list[dict], how: dict) -> tuple[str, str]:
    """What a model is given that shall say the last message, and the conversation with that message."""
    return render(turns[:-1], how, add_generation_prompt=True)[0], render(turns, how)[0]


def replace_template(tokenizer: PreTrainedTokenizerFast, file: str) -> str:
    """Gives a tokenizer the chat template in a file, or of a name in NAMED. Returns where that writes an ordinary
    conversation in another way than its own does, for people, or nothing. ValueError: the file is no text, or the name
    is of another family."""
    turns = [
        dict(role=role, content=f"{role} speaks.")
        for role in ("user", "assistant", "user", "assistant")
    ]
    texts = []
    try:
        for template in (tokenizer.chat_template, _template_of(file, tokenizer.chat_template)):
            tokenizer.chat_template = template
            text = ""
            with suppress(BadLine, DataError):  # without one of its own nothing is compared
                how = ChatTemplate(tokenizer, Rules()).arguments({})
                text = "".join(map("".join, asked(turns, how)))
            texts.append(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--template {file}: {one_line(error, kind=False)}") from error
    own, new = texts
    if not own or own == new:
        return ""
    at = max(0, len(commonprefix(texts)) - 20)
    return (
        f"--template {file}: writes {new[at : at + 40]!r} where the model's own template writes "
        f"{own[at : at + 40]!r}; --export keeps the model's own"
    )


def _template_of(file: str, own: str | None) -> str:
    if file not in NAMED:
        return regular(file).read_text(encoding="utf-8")
    sign, text = NAMED[file]
    if sign not in (own or ""):
        raise ValueError(
            f"--template {file}: needs a model whose own template has {sign}, and this one's has not; name a file"
        )
    return text.replace(OWN_TEXT, own)


class ChatTemplate:
    """That of a tokenizer. notes: what it did with the last line beside rendering, for people."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rules: Rules):
        self.tokenizer = tokenizer
        self.rules = rules
        self.notes: list[str] = []
        self.name = tokenizer.name_or_path or "the tokenizer"
        added = tokenizer.added_tokens_decoder.values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def examples(self, messages: Any, first: int, line: dict) -> list[Example]:
        """Those of a conversation, of which the answers from message number `first` on are learned."""
        messages = forms.objects(messages, "messages, a list of {role, content}")
        turns, answers = [], []
        for i, message in enumerate(messages):
            where = f" in message {i + 1}"
            turns.append(forms.cleaned(message, where))
            if token := self.special.search("\n".join(forms.strings([*turns[i].values()]))):
                raise BadLine("content without the tokenizer's special tokens", token[0] + where)
            if forms.is_learned(message, where) and i >= first:
                answers.append(i)
        if not answers:
            raise BadLine("an answer (role assistant) to train on", "none")
        how = self.arguments(line)
        spoken = [i for i in range(answers[-1] + 1) if turns[i]["role"] == "assistant"]
        marked = bool(MARKER.search(how["chat_template"])) and not first and spoken == answers
        marked = marked and not self.rules.mask_history  # an answer may have several markers
        try:
            made = self.rendered(turns, answers, how, marked)
        except BadLine as error:
            try:
                made = self.rendered([*map(forms.as_sent, turns)], answers, how, marked)
            except BadLine:
                raise error from None
        if answers[-1] < len(messages) - 1:
            self.notes.append("with messages after the last answer, which are left out")
        if self.rules.mask_history:
            return [made[-1]._replace(spans=made[-1].spans[-1:])]
        if len(made) > 1:
            self.notes.append("split, as the template rewrites answers")
        return made

    def arguments(self, line: dict) -> dict[str, Any]:
        """What a conversation is rendered with. Raises DataError and, if the line asks for more than that, BadLine."""
        tools = line.get("tools")
        if not forms.there(tools):
            tools = None
        else:
            tools = forms.objects(tools, "tools as a list of objects or as JSON")
        own = line.get("chat_template_kwargs") or {}
        own = forms.loaded(own, "chat_template_kwargs as an object")
        if not isinstance(own, dict):
            raise BadLine("chat_template_kwargs as an object", type(own).__name__)
        if self.tokenizer.chat_template is None:
            fix = "name the tokenizer of an instruction-tuned model, or set tokenizer.chat_template"
            raise unusable(self.name, "a chat template, which messages need", "none", fix)
        text = self.tokenizer.get_chat_template(tools=tools)
        text = NOW.sub(lambda call: repr(DATE.strftime(call[2])), text)
        if "strftime_now(" in text:
            expected = "a chat template without today's date"
            fix = "put a date into it: examples must be the same on every day"
            raise unusable(self.name, expected, "strftime_now of a variable", fix)
        args = self.rules.template_args | own
        for name in [*args, "tools"] if tools else args:
            if not re.search(rf"\b{re.escape(name)}\b", text) or (name in args and name in OWN):
                found = f"{name[:40]}, which it does not use"
                raise BadLine("arguments that the chat template uses", found)
        return self.tokenizer.special_tokens_map | args | dict(chat_template=text, tools=tools)

    def rendered(
        self, turns: list[dict], answers: list[int], how: dict, marked: bool
    ) -> list[Example]:
        """The examples of messages in one form. marked: by what the template has in {% generation %}, else prefix by
        prefix. Raises BadLine for a text that is in no example, and what a template raises."""
        most = MOST_MARKED if marked else MOST_MESSAGES
        if answers[-1] >= most:
            expected = f"at most {most} messages" + ", or {% generation %} in the template" * (
                not marked
            )
            fix = f"cut the line in two{LEAVE_OUT}" + f"; or {TEMPLATE}" * (not marked)
            raise BadLine(expected, f"{len(turns)} messages", fix)
        if marked:
            text, spans = render(turns[: answers[-1] + 1], how, return_assistant_tokens_mask=True)
            made = {answers[-1]: Example(text, spans, True)}
        else:
            made = self.by_prefix(turns, answers, how)
        self.check_texts(turns[: answers[-1] + 1], made, how)
        return [made[i] for i in sorted(made)]

    def by_prefix(self, turns: list[dict], answers: list[int], how: dict) -> dict[int, Example]:
        """{number of its last answer: example}."""
        made: dict[int, Example] = {}
        for i in reversed(answers):
            before, whole = asked(turns[: i + 1], how)
            fits = whole.startswith(before)
            content = (turns[i]["content"] or "").strip()
            # A header would count as part of the answer.
            if "add_generation_prompt" not in how["chat_template"]:
                fits &= whole[len(before) :].lstrip().startswith(content)
            if not fits:
                raise self.why(turns[: i + 1], how, before, whole)
            span = (len(before), max(len(before), len(whole.rstrip())))
            later = next(reversed(made.values()), None)
            if later and later.text.startswith(whole):
                later.spans.insert(0, span)
            else:
                made[i] = Example(whole, [span], True)
        return made

    def why(self, turns: list[dict], how: dict, before: str, whole: str) -> BadLine:
        """What is wrong with a template that asks for the last message with `before` and then writes `whole`."""
        number = len(turns)
        history, _ = render(turns[:-1], how)
        if commonprefix((history, before, whole)) != history or whole.startswith(before):
            expected = "a template that appends an answer to the text before it"
            return BadLine(expected, f"another text before or around message {number}", TEMPLATE)
        prompt, answer = before[len(history) :], whole[len(history) :]
        expected = "an answer that begins like the generation prompt"
        if "think>" in prompt:
            expected += f", which {'closes' if '</think>' in prompt else 'opens'} <think>"
        fix = way_on(how["chat_template"])
        for name, value in product(SWITCHES, (True, False)):
            before, whole = asked(turns, how | {name: value})
            if name in how["chat_template"] and whole.startswith(before):
                fix = f"""add "chat_template_kwargs": {{"{name}": {str(value).lower()}}} to the line"""
        return BadLine(
            expected, f"{prompt!r}, then {answer[: len(prompt) + 20]!r} as message {number}", fix
        )

    def check_texts(self, turns: list[dict], made: dict[int, Example], how: dict) -> None:
        """Raises BadLine for a text of a message that is in no example."""
        marked, texts = forms.with_marks(turns)
        pages = []  # (rendering, where each mark is, or None for one without)
        for last, example in made.items():
            page = ""
            with suppress(BadLine):
                page, _ = render(marked[: last + 1], how)
            faithful = forms.MARK.sub("", page) == forms.MARK.sub("", example.text)
            places = defaultdict(list)
            for found in forms.MARK.finditer(page):
                places[found[0]].append(found.start())
            pages.append((page, places) if faithful else (example.text, None))
        for text in texts:
            if not any(text.is_in(*page) for page in pages):
                role = turns[text.number]["role"]
                found = f"no {text.text[:60]!r} of the {text.key[:40]} in message {text.number + 1} ({role})"
                raise BadLine("a chat template that renders all texts", found, RENDER)
