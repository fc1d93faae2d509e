"""From the command to its first step and to its result: with no compile cache, with a warm one, with a copy of one.

    python -m lab.benchmarks.first_step --results results/first_step.jsonl
    python -m lab.benchmarks.first_step --only blocks finetune

Each program runs three times. "cold": the folder of Inductor's cache is empty. "warm": that folder again. "copied": a
copy of the folder under another name, as another node or machine would get it. A row is the run's own with `name`,
`cache`, `command_s` (wall seconds of the whole process) and `command_cpu_s` (its CPU seconds and those of its children,
the C++ compiler among them). Wall seconds mean something on an idle machine alone. On a CPU one process is one rank.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer.logging import append_jsonl, check_writable, read_jsonl
from trainer.terminal.output import Parser, fail, put

ROOT = Path(__file__).resolve().parents[2]
CACHES = "cold", "warm", "copied"
QWEN2 = dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=256,
)
# What each program is told; "{model}" and "{data}" are files of a folder that this program makes.
PROGRAMS = {
    "main": "main.py --device cpu --compile fwdbwd",
    "16 layers": "main.py --device cpu --compile fwdbwd --depth 16 --steps 4",
    "16 layers, blocks": "main.py --device cpu --compile blocks --depth 16 --steps 4",
    "finetune": "finetune.py --device cpu --model {model} --random --data {data} --compile blocks "
    "--batch 2 --seqlen 128 --steps 4",
}


def write_model(folder: Path) -> dict[str, str]:
    """A Hugging Face folder without weights, with a tokenizer of bytes, and texts for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = folder / "model"
    model.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])
    whole.save_pretrained(model)
    (model / "config.json").write_text(json.dumps(QWEN2))
    data = folder / "data.jsonl"
    texts = (" ".join(str(i * k % 97) for k in range(64)) for i in range(32))
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"model": str(model), "data": str(data)}


def run_once(words: list[str], cache: Path, folder: Path) -> dict:
    """The row of one process with this folder of caches: compiled code, tokens. ValueError with its last line where it
    fails."""
    results = folder / "rows.jsonl"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words, "--results", str(results)],
        cwd=ROOT,
        env=os.environ
        | dict(
            TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor",
            XDG_CACHE_HOME=f"{cache}/home",
            HF_DATASETS_CACHE=f"{cache}/datasets",
        ),
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise ValueError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr[-300:]}")
    cpu = sum(after[:2]) - sum(before[:2])  # user, system
    return read_jsonl(results)[-1] | dict(command_s=round(seconds, 1), command_cpu_s=round(cpu, 1))


def measure(names: list[str], results: str) -> list[dict]:
    """Runs the programs of these names, each with three states of the cache, and appends their rows."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        paths = write_model(folder)
        for number, name in enumerate(names):
            words = PROGRAMS[name].format(**paths).split()
            first = folder / f"cache-{number}"
            other = folder / f"copy-{number}"
            for cache in CACHES:
                if cache == "copied":
                    shutil.copytree(first, other)
                row = run_once(words, other if cache == "copied" else first, folder)
                row |= dict(study="first_step", name=name, cache=cache, command=PROGRAMS[name])
                append_jsonl(results, row)
                rows.append(row)
                put(
                    f"{name:<20} {cache:<7} {row['command_s']:>7.1f} s, CPU {row['command_cpu_s']:>7.1f} s; "
                    f"first step CPU {row['first_step_cpu_s']:>6.1f} s"
                )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Exit codes: 0, 1 a program failed, 2 bad flags."""
    parser = Parser(prog="first_step", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", default="runs/first_step.jsonl", help="rows are appended")
    parser.add_argument(
        "--only", nargs="+", choices=[*PROGRAMS], default=[*PROGRAMS], metavar="NAME"
    )
    arguments = parser.parse_args(argv)
    try:
        check_writable(arguments.results)
    except ValueError as error:
        fail(str(error), 0)
    try:
        measure(arguments.only, arguments.results)
    except ValueError as error:
        fail(str(error), 0, code=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
