#!/usr/bin/env bash
# If left truncation reaches the first answer of a chat, its assistant mask is all zeros, although answers remain.
#
# Seen: apply_chat_template(.., return_assistant_tokens_mask=True, truncation=True) with truncation_side="left" marks
#   both answers if the cut is before the first, and no token at all if it is inside or after the first: the second
#   answer, which is wholly there, is not marked either. The loop over the answers ends at the first one whose start
#   is not found. Truncated on the right, the mask covers the answers that remain: that
#   side was mended (transformers#34494, closed).
# Versions: torch 2.13.0, transformers 5.23.0, numpy 2.4.6 on Python 3.11, on a CPU.
# Expected: A mask of the answers that remain.
# Why it matters: truncation_side="left" is what keeps the end of a long chat. An example that is cut inside or after
#   its first answer then has no label.
set -euo pipefail
python=${BASE_PYTHON:+$(realpath -s "$BASE_PYTHON")}
packages=(transformers==5.23.0 numpy==2.4.6 torch==2.13.0)
unset PYTHONOPTIMIZE  # the checks are asserts
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
if [ -z "$python" ]; then
    python3 -m venv venv || exit 3
    python=$folder/venv/bin/python
    install() { "$python" -m pip install -q --no-compile "$@"; }
    # PyPI's torch brings gigabytes of CUDA: the CPU build (+cpu goes to torch, the last package)
    # from where pip looks anyway, else from its own index; then pip's error about the first is no failure
    install "${packages[@]}+cpu" ||
        install --extra-index-url https://download.pytorch.org/whl/cpu "${packages[@]}" || exit 3
fi
export OMP_NUM_THREADS=1 HF_HOME=$folder/cache HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor
"$python" - "${packages[@]}" <<'END'
import importlib.metadata
import sys

for pinned in sys.argv[1:]:
    name, version = pinned.split("==")
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = "not installed"
    print(name, installed)
    if installed.split("+")[0] != version:
        print(f"this program is about {name} {version}", file=sys.stderr)
        sys.exit(3)
END
cat > finding.py <<'END'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
)
core = Tokenizer(models.BPE())
core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=["<pad>", "<|start|>", "<|end|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
core.train_from_iterator(["user assistant question one two answer first second"] * 20, trainer)
chat = [
    {"role": "user", "content": "question one"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "question two"},
    {"role": "assistant", "content": "second answer"},
]


def marked(side, length):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", truncation_side=side)
    tokenizer.chat_template = TEMPLATE
    found = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, truncation=True, max_length=length
    )
    ids, mask = found["input_ids"], found["assistant_masks"]
    return tokenizer.decode(ids), tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


BOTH = "first answer<|end|>second answer<|end|>"
EXPECTED = {
    ("right", 1000): BOTH,
    ("right", 28): "first answer<|end|>second",  # cut inside the second answer
    ("left", 19): BOTH,  # cut before the first answer
    ("left", 18): "",  # cut inside the first answer
    ("left", 15): "",  # cut after the first answer
}
for (side, length), expected in EXPECTED.items():
    text, learned = marked(side, length)
    print(f"truncation_side={side!r}, max_length={length}\n  text   {text!r}\n  marked {learned!r}")
    assert text.endswith("second answer<|end|>") == (length != 28), text
    assert learned == expected, learned
END
"$python" finding.py
