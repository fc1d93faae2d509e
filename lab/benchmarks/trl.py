"""The step of finetune.py beside TRL's SFTTrainer: the same tiny Qwen2, chats, batches, loss and optimizer, on a CPU.

    pip install -e '.[trl]'
    python -m lab.benchmarks.trl --results results/trl.jsonl
    python -m lab.benchmarks.trl --pad pack --compile none --steps 20

The trainer runs its own loop; between two of its steps one of finetune.py's runs, so that a busy machine slows both
alike. Ours is without the loop around it: checks for signals and slow ranks, its log. A step is all from its batch to
the updated weights, the host's reading of the loss among it. `ratio`: the median
over steps of (tokens of answers per second of ours) / (those of TRL's step before it); `ratio_cpu`: the same by CPU
seconds. With `--pad fixed` and `longest` each step has the same batch for both; `pack` packs by best fit in both,
but in another order, and TRL lays the rows of a batch end to end. Before the first update both have the same loss of
the same batch, or nothing is measured. Then each runs three steps in a process of its own, with empty caches:
`process_cpu_s` (its CPU seconds from the command to its end) and `peak_mib` (resident, of which most is imports).

What differs: finetune.py gives attention no mask where rows are padded at their end alone, reads loss and gradient
norm, and refuses updates that are not finite. TRL gives a mask, and reads an entropy, an accuracy and a count of
tokens. Its recomputation and bf16, both on by default, are off. It compiles by `torch_compile` of its arguments.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from lab.benchmarks import first_step
from trainer.logging import append_jsonl, check_writable
from trainer.terminal.output import Parser, fail, put

PADS = "fixed", "longest", "pack"
MODES = "none", "fwdbwd"
CHATS = 200
SEQLEN = first_step.QWEN2["max_position_embeddings"]  # tokens of a row; no chat has more
WARMUP = 5  # steps of the interleaved run that do not count
ALONE = 3  # steps of a process of its own: the second is the first with all moments
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chats(number: int = CHATS) -> list[dict]:
    """Chats of sums, of some 60 to 230 tokens of a byte each."""
    made = []
    for i in range(number):
        turns = []
        for k in range(1 + i % 2):
            a, b = divmod(7 * i + 11 * k, 60)
            answer = " ".join(f"{a + j} plus {b} is {a + b + j}." for j in range(1 + i * 5 % 4))
            turns += [dict(role="user", content=f"{a} plus {b}?")]
            turns += [dict(role="assistant", content=answer)]
        made.append(dict(messages=turns))
    return made


def write_files(folder: Path) -> None:
    """model, with random weights in fp32, and chats.jsonl."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    special = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[1]
    )
    whole.chat_template = TEMPLATE
    torch.manual_seed(0)
    ids = dict(bos_token_id=None, pad_token_id=0, eos_token_id=1)
    config = AutoConfig.for_model(**first_step.QWEN2 | ids)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    whole.save_pretrained(folder / "model")
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats()))


def our_flags(folder: Path, pad: str, mode: str, arguments: argparse.Namespace) -> list[str]:
    """Of finetune.py, without --steps: `trainer_of` has the same settings."""
    fixed = "--device cpu --lr 1e-4 --schedule constant --warmup 0 --weight-decay 0 --clip 1"
    sizes = f"--batch {arguments.batch} --seqlen {SEQLEN} --pad {pad} --compile {mode}"
    paths = ["--model", str(folder / "model"), "--data", str(folder / "chats.jsonl")]
    return [*paths, *fixed.split(), *sizes.split()]


def trainer_of(
    folder: Path,
    lines: list[dict],
    pad: str,
    mode: str,
    steps: int,
    arguments: argparse.Namespace,
    callback=None,
    before=None,
):
    """An SFTTrainer of these chats, in their order. before: called with the inputs of each step. Its `seen` has the
    inputs and the loss of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class Recorded(SFTTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            labels = inputs["labels"]
            if before is not None:
                before(inputs)
            loss = super().training_step(model, inputs, *args, **kwargs)
            self.seen.append((labels, loss))
            return loss

    multiple = {"fixed": SEQLEN, "longest": -(-SEQLEN // 8), "pack": None}[pad]
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=arguments.batch,
        max_steps=steps,
        max_length=SEQLEN,
        pad_to_multiple_of=multiple,
        packing=pad == "pack",
        assistant_only_loss=True,
        gradient_checkpointing=False,
        torch_compile=mode != "none",
        train_sampling_strategy="sequential",
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Recorded(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(lines),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[callback] if callback else None,
    )
    trainer.seen = []
    return trainer


def interleave(folder: Path, pad: str, mode: str, arguments: argparse.Namespace) -> dict:
    """Figures of both, step by step in turns. ValueError where they do not learn the same."""
    import torch
    from transformers import TrainerCallback

    from model import IGNORE
    from trainer import config as flags
    from trainer.distributed.launch import connect, shutdown
    from trainer.finetuning import config as finetuning
    from trainer.finetuning.load import load_weights
    from trainer.finetuning.run import open_data, open_model
    from trainer.optimizer import learning_rate
    from trainer.parallelize import build

    steps = arguments.steps + WARMUP
    words = [*our_flags(folder, pad, mode, arguments), "--steps", str(steps)]
    config = flags.resolve(finetuning.parse(words), "cpu", 1)
    device = connect(config, 0, 0, 1)
    torch.set_num_threads(arguments.threads)
    model, vocab = open_model(config)
    data = open_data(config, vocab)
    shape = model.model.config
    config = config.completed(shape.num_hidden_layers, shape.hidden_size, vocab, data.epoch_samples)
    model.random_init = False  # the weights are the files'
    step = build(config, device, 1, model=model)
    step.dynamic = pad == "longest"
    load_weights(config, model, None)
    model.probe(device)

    ours, theirs, first = [], [], {}  # ours: (seconds, CPU seconds, targets, loss) of a step

    def loss_of_ours(inputs) -> None:
        """Of the trainer's first batch, before any update."""
        if first:
            return
        tokens, labels = inputs["input_ids"], inputs["labels"]
        targets = torch.full_like(labels, IGNORE)
        targets[:, :-1] = torch.where(labels[:, 1:] == -100, IGNORE, labels[:, 1:])
        extra = dict(position_ids=inputs["position_ids"]) if pad == "pack" else {}
        with torch.no_grad():
            divisor = step.loss_divisor(targets)
            loss = step.micro_batch_loss(tokens, targets, divisor, **extra)
        first.update(ours=loss.item(), labels=labels.clone())

    class Turns(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, *args, **kwargs):
            now = time.perf_counter(), time.process_time()
            theirs.append([b - a for a, b in zip(self.began, now, strict=True)])
            step.optimizer.lr.fill_(learning_rate(config, len(ours)))
            tokens, targets, inputs = next(data)
            loss = step(tokens, targets, **inputs).item()
            step.grad_norm.item()
            end = time.perf_counter(), time.process_time()
            ours.append([*(b - a for a, b in zip(now, end, strict=True)), targets, loss])
            self.began = time.perf_counter(), time.process_time()

    lines = chats()
    if pad != "pack":  # in the order in which finetune.py takes them
        lines = [lines[data.position(k)] for k in range(steps * arguments.batch)]
    trainer = trainer_of(folder, lines, pad, mode, steps, arguments, Turns(), loss_of_ours)
    try:
        trainer.train()
    finally:
        shutdown()
    losses = [(one[3], loss.item()) for one, (_, loss) in zip(ours, trainer.seen, strict=True)]
    first["trl"] = losses[0][1]
    if abs(first["ours"] - first["trl"]) > 1e-4 * first["trl"]:
        raise ValueError(f"--pad {pad}: losses of one batch differ: {first}")
    if pad != "pack":
        for (*_, targets, _), (labels, _) in zip(ours, trainer.seen, strict=True):
            moved = torch.where(labels[:, 1:] == -100, IGNORE, labels[:, 1:])
            if not torch.equal(targets[:, :-1], moved):
                raise ValueError(f"--pad {pad}: the two have other tokens to learn")
    figures = dict(n=arguments.steps, first_loss=round(first["ours"], 6))
    figures |= dict(first_loss_trl=round(first["trl"], 6))
    figures |= dict(last_loss=round(losses[-1][0], 4), last_loss_trl=round(losses[-1][1], 4))
    if pad != "pack":
        figures["loss_apart"] = max(abs(a - b) / b for a, b in losses)
        if figures["loss_apart"] > 1e-3:
            raise ValueError(
                f"--pad {pad}: losses differ by {figures['loss_apart']:.1e} after updates"
            )
    learned = [int((one[2] != IGNORE).sum()) for one in ours]
    learned_trl = [int((labels != -100).sum()) for labels, _ in trainer.seen]
    for clock, name in enumerate(("", "_cpu")):
        rates = [n / one[clock] for n, one in zip(learned, ours, strict=True)][WARMUP:]
        others = [n / one[clock] for n, one in zip(learned_trl, theirs, strict=True)][WARMUP:]
        ratio = statistics.median(a / b for a, b in zip(rates, others, strict=True))
        figures[f"ratio{name}"] = round(ratio, 4)
        figures[f"tok{name}_s"] = round(statistics.median(rates), 1)
        figures[f"tok{name}_s_trl"] = round(statistics.median(others), 1)
        figures[f"step{name}_ms"] = round(
            1e3 * statistics.median(one[clock] for one in ours[WARMUP:]), 2
        )
        figures[f"step{name}_ms_trl"] = round(
            1e3 * statistics.median(one[clock] for one in theirs[WARMUP:]), 2
        )
    return figures


def run_alone(folder: Path, pad: str, mode: str, arguments: argparse.Namespace) -> None:
    """TRL's few steps in this process; appends its row."""
    import torch

    from trainer.measuring.memory import peak

    torch.set_num_threads(arguments.threads)
    trainer_of(folder, chats(), pad, mode, ALONE, arguments).train()
    append_jsonl(arguments.results, peak("cpu"))


def measure_alone(folder: Path, pad: str, mode: str, arguments: argparse.Namespace) -> dict:
    """CPU seconds and peak of both, each in a process of its own with empty caches."""
    same = f"--batch {arguments.batch} --threads {arguments.threads}"
    programs = dict(
        ours=["finetune.py", *our_flags(folder, pad, mode, arguments), "--steps", str(ALONE)],
        trl=["-m", "lab.benchmarks.trl", "--alone", str(folder), "--pad", pad, "--compile", mode]
        + same.split(),
    )
    figures = {}
    for name, words in programs.items():
        with tempfile.TemporaryDirectory() as place:
            row = first_step.run_once(words, Path(place, "caches"), Path(place))
        # finetune.py counts its peak anew after the first step.
        peaks = row["peak_rss_mib"], row.get("first_step_peak_mib") or 0
        end = "" if name == "ours" else "_trl"
        figures |= {f"process_cpu_s{end}": row["command_cpu_s"], f"peak_mib{end}": max(peaks)}
    return figures


def measure(arguments: argparse.Namespace) -> None:
    """Appends and prints a row of each setting. ValueError, one line, where one cannot be measured."""
    from importlib.metadata import version

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["XDG_CACHE_HOME"] = os.environ["HF_DATASETS_CACHE"] = place
        write_files(folder)
        import torch

        from trainer.measuring import timing

        torch.set_num_threads(arguments.threads)
        for mode in arguments.compile:
            for pad in arguments.pad:
                load = os.getloadavg()[0]
                row = timing.environment(torch.device("cpu"))
                row |= dict(study="trl", pad=pad, compile=mode, batch=arguments.batch)
                row |= dict(seqlen=SEQLEN, threads=arguments.threads, chats=CHATS)
                row |= {name: version(name) for name in ("trl", "transformers")}
                row |= interleave(folder, pad, mode, arguments)
                if not arguments.only_turns:
                    row |= measure_alone(folder, pad, mode, arguments)
                row["load"] = [round(load, 1), round(os.getloadavg()[0], 1)]
                append_jsonl(arguments.results, row)
                put(
                    f"{pad:<8} {mode:<7} {row['tok_s']:>8.0f} tok/s, TRL {row['tok_s_trl']:>8.0f}: "
                    f"{row['ratio']:.3f} times, by CPU seconds {row['ratio_cpu']:.3f}; peak "
                    f"{row.get('peak_mib')} and {row.get('peak_mib_trl')} MiB; CPU s "
                    f"{row.get('process_cpu_s')} and {row.get('process_cpu_s_trl')}"
                )


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Exit codes: 0, 1 a program failed or the two do not learn the same, 2 bad flags, no TRL."""
    parser = Parser(prog="trl", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", default="runs/trl.jsonl", help="rows are appended")
    parser.add_argument("--pad", nargs="+", choices=PADS, default=[*PADS])
    parser.add_argument("--compile", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--steps", type=int, default=45, help="timed steps of each")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step")
    parser.add_argument("--threads", type=int, default=1, help="of each, on CPU cores")
    parser.add_argument("--only-turns", action="store_true", help="without processes of their own")
    parser.add_argument("--alone", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("trl") is None:
        fail("trl is not installed; pip install -e '.[trl]'", 0)
    for variable, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("OMP_NUM_THREADS", str(arguments.threads)),
        ("TORCHINDUCTOR_COMPILE_THREADS", "1"),  # the compiler's CPU seconds are the process's
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"),
        ("TRANSFORMERS_VERBOSITY", "error"),
    ):
        os.environ[variable] = value
    try:
        check_writable(arguments.results)
    except ValueError as error:
        fail(str(error), 0)
    try:
        if arguments.alone:
            run_alone(Path(arguments.alone), *arguments.pad, *arguments.compile, arguments)
        else:
            measure(arguments)
    except ValueError as error:
        fail(str(error), 0, code=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
