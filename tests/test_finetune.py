"""finetune.py: models of Hugging Face are loaded by slices, trained, resumed and exported, bit-equal.

    pytest tests/test_finetune.py        # one rank here, two in one spawn; no GPU, no network

The data has tests of its own: tests/test_chat.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import Job
from harness import spawn
from running import ROOT, read

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from tiny_hf import KINDS, write_data, write_model, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

import finetune
from trainer import config as flags
from trainer.data import DataError
from trainer.finetuning import checks, config, export, load
from trainer.finetuning.chat import ChatBatches
from trainer.finetuning.model import HuggingFaceModel, blank_model
from trainer.finetuning.run import FineTune
from trainer.parallelize import build
from trainer.run import execute

pytestmark = pytest.mark.usefixtures("isolated")
CPU = torch.device("cpu")
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 400
hf_logging.set_verbosity_error()
hf_logging.disable_progress_bar()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A tiny Qwen2.5 in bf16 with its tokenizer, and data beside it; not to be changed."""
    folder = tmp_path_factory.mktemp("hf")
    write_model(folder / "qwen")
    write_tokenizer(folder / "qwen")
    write_data(folder / "chat.jsonl")
    return folder / "qwen"


@pytest.fixture
def tune(qwen, capfd, tmp_path, monkeypatch):
    """Runs finetune.py on one rank in this process: its exit code, both outputs, its row and steps if it has them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(qwen.parent / "cache"))

    def tune(*argv, model=qwen, data=qwen.parent / "chat.jsonl"):
        results = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        usual = ["--model", model, "--data", data, "--compile", "none", "--seqlen", 48, "--batch", 4, "--lr", "1e-3",
                 "--warmup", 0, "--results", results]  # fmt: skip
        capfd.readouterr()
        try:
            c = config.parse([*map(str, usual), *map(str, argv)], 0, 1)
            checks.check_at_once(c, 1)
            code = execute(FineTune, c, 0, 0, 1)
        except SystemExit as exit:
            code = exit.code
        if dist.is_initialized():
            dist.destroy_process_group()
        out, err = capfd.readouterr()
        row, steps = read(results) if results.is_file() and results.stat().st_size else (None, [])
        return SimpleNamespace(code=code, out=out, err=err, row=row, steps=steps)

    return tune


def logits(folder, **how):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **how).eval()(input_ids=TOKENS).logits


# ------------------------------------------------------------------------------------------------- loading and saving


def load_and_export_every_kind(mesh):
    """Largest difference from from_pretrained()'s logits, whether what is exported has the same, bits and dtypes."""
    told = {}
    for kind in KINDS:
        folder, out = f"{os.environ['MODELS']}/{kind}", f"{os.environ['MODELS']}/out-{kind}"
        argv = ["--model", folder, "--data", "x", "--compile", "none", "--seqlen", "12", "--export", out]
        c = flags.resolve(config.parse(argv), "cpu", 2)
        model = blank_model(folder)
        model.drawn = False
        step = build(c, CPU, 2, model=model)
        row = load.load_weights(c, step.model, None)
        with torch.no_grad():
            found = step.model(TOKENS)
            rows = TOKENS.reshape(1, -1), torch.arange(12).repeat(1, 2)
            packed = (step.model(rows[0], position_ids=rows[1])[0] - found.flatten(0, 1)).abs().max().item()
        step.model.check_packed(CPU)
        line = export.export(c, step.model, None)
        if dist.get_rank() == 0:
            apart = (found - logits(folder, dtype=torch.float32)).abs().max().item()
            same = torch.equal(logits(out), logits(folder)), logits(out).dtype == logits(folder).dtype
            names = [sorted(load.weights.table(load.weights_in(each))) for each in (folder, out)]
            told[kind] = max(apart, packed), same, names[0] == names[1], row["loaded_from"], line
        dtypes = {p.dtype for p in step.model.parameters()}
        assert dtypes == {torch.float32}, dtypes
        dist.barrier()
    return told


def fail_on_one_rank(mesh):
    """What both ranks raise where rank 1 alone finds a damaged file, and where rank 0 alone cannot write."""
    folder, told = f"{os.environ['MODELS']}/llama", []
    for out, broken in ((None, dist.get_rank() == 1), ("nowhere/out", False)):
        argv = ["--model", folder, "--data", "x", "--compile", "none", *(["--export", out] if out else [])]
        c = flags.resolve(config.parse(argv), "cpu", 2)
        step = build(c, CPU, 2, model=blank_model(folder))
        fill = load.weights.fill
        if broken:
            load.weights.fill = lambda *_, **__: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        try:
            load.load_weights(c, step.model, None)
            export.export(c, step.model, None)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        load.weights.fill = fill
    return told


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        write_model(folder / kind, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELS", str(folder))
        return spawn(2, [load_and_export_every_kind, fail_on_one_rank])


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_load_by_slices_what_from_pretrained_loads_pack_it_and_export_it_bit_equal(kind, two_ranks):
    apart, same, names, source, line = two_ranks["load_and_export_every_kind"][0][kind]
    assert apart < 1e-5 and source == "slices"
    assert same == (True, True) and names, line


def test_what_one_rank_cannot_read_or_write_is_raised_on_both(two_ranks):
    first, second = two_ranks["fail_on_one_rank"]
    assert first == second
    assert "DataError" in first[0] and "Input/output error" in first[0]
    assert "CheckpointError: nowhere/out: No such file or directory" in first[1]


def test_a_run_learns_saves_resumes_bit_equal_and_exports(tune, qwen, tmp_path, capfd):
    whole = tune("--steps", 8, "--save", "a", "--save-every", 4, "--eval-every", 4, "--export", "out", "--log-every", 1)
    assert whole.code == 0, whole.err
    assert whole.steps[-1]["loss"] < whole.steps[0]["loss"] - 0.25
    row = whole.row
    assert row["outcome"] == "ok" and row["loaded_from"] == "slices" and row["load_s"] > 0
    assert row["eval_ppl"] == pytest.approx(torch.tensor(row["eval_loss"]).exp().item())
    assert row["flags"]["model"] == "qwen" and row["depth"] == 2 and row["flags"]["effective_batch"] == 4
    assert "26 tensors of bfloat16, each rank its rows" in whole.out
    os.makedirs("b")
    shutil.copytree("a/step-00000004", "b/step-00000004")
    again = tune("--steps", 8, "--save", "b", "--eval-every", 4, "--export", "again", "--log-every", 1)
    assert again.code == 0 and again.row["resumed_after"] == 4 and "loaded_from" not in again.row
    losses = {step["step"]: step["loss"] for step in whole.steps}
    assert {s["step"]: s["loss"] for s in again.steps} == {k: losses[k] for k in losses if k > 4}
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()
    assert not torch.equal(logits("out"), logits(qwen)) and logits("out").dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {*os.listdir("out")}
    assert export.main(["a", "later", "--model", str(qwen), "--max-shard-gb", "1e-5"]) == 0
    assert torch.equal(logits("later"), logits("out")) and "model.safetensors.index.json" in os.listdir("later")
    other = shutil.copytree(qwen, tmp_path / "other")
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    with pytest.raises(SystemExit, match="4"):
        export.main(["a", "never", "--model", str(other)])
    assert "a model with rms_norm_eps 1e-06 (" in capfd.readouterr().err and not os.path.exists("never")


def test_a_signal_ends_a_later_export_and_nothing_is_left(tune, qwen, monkeypatch, capfd):
    assert tune("--steps", 1, "--save", "a").code == 0
    real = export.checkpoint.read
    monkeypatch.setattr(export.checkpoint, "read", lambda *_: (os.kill(os.getpid(), signal.SIGTERM), real(*_))[1])
    with pytest.raises(SystemExit, match="143"):
        export.main(["a", "out", "--model", str(qwen)])
    assert "stopped by SIGTERM; out was not written" in capfd.readouterr().err
    assert not [name for name in os.listdir() if name.startswith("out")]


def test_an_export_that_failed_is_made_by_the_same_command(tune, monkeypatch):
    argv = "--steps", 2, "--save", "a", "--export", "out"
    with monkeypatch.context() as patch:
        patch.setattr(export.weights, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for _ in range(2):  # after training, and again
            failed = tune(*argv)
            assert failed.code == 4 and "out: No space left" in failed.err and not os.path.exists("out")
    again = tune(*argv)
    assert again.code == 0 and "already done" in again.out and "export   out: 26 tensors" in again.out
    assert tune("--steps", 2, "--export", "straight").code == 0
    assert Path("out/model.safetensors").read_bytes() == Path("straight/model.safetensors").read_bytes()


def test_a_run_is_not_resumed_with_a_value_of_config_json_back_at_its_default(tune, qwen, tmp_path):
    other = shutil.copytree(qwen, tmp_path / "other")
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    assert tune("--steps", 1, "--save", "a", model=other).code == 0
    refused = tune("--steps", 2, "--save", "a")
    assert refused.code == 4 and "was saved with rms_norm_eps 0.001 (now " in refused.err


def test_the_first_loss_is_that_of_transformers(tune, qwen):
    done = tune("--steps", 1, "--grad-accum", 2, "--log-every", 1)
    batches = ChatBatches(str(qwen.parent / "chat.jsonl"), AutoTokenizer.from_pretrained(qwen), global_batch=8,
                          seqlen=48, vocab=400, seed=0)  # fmt: skip
    tokens, targets, _ = next(batches)
    model = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).eval()
    labels = torch.cat([torch.full((8, 1), -100), targets[:, :-1]], 1)  # transformers moves them on itself
    tail = targets[:, -1] == -100
    assert tail.all(), "else the last target would be lost"
    expected = model(input_ids=tokens, labels=labels).loss.item()
    assert done.steps[0]["loss"] == pytest.approx(expected, abs=1e-6)


def test_packed_padded_and_shorter_rows_have_the_same_loss(tune):
    """The same examples in one step, whatever rows they lie in."""
    whole = "--steps", 1, "--log-every", 1, "--batch", 64, "--pad"
    found = {pad: tune(*whole, pad) for pad in ("fixed", "longest")}
    packed = tune("--steps", 1, "--pad", "pack", "--seqlen", 96, "--log-every", 1, "--batch", 1)
    rows = int(re.search(r"in (\d+) rows of 96", packed.out)[1])
    packed = tune("--steps", 1, "--pad", "pack", "--seqlen", 96, "--log-every", 1, "--batch", rows)
    losses = [each.steps[0]["loss"] for each in (*found.values(), packed)]
    assert rows < 64 and max(losses) - min(losses) < 2e-6, losses
    assert found["longest"].row["tok_s"] is None and "tok_s" in found["fixed"].steps[0]


def test_recomputed_blocks_and_the_chunked_loss_change_nothing(tune):
    plain = tune("--steps", 2, "--log-every", 1)
    for more in (["--remat-ratio", 0.5], ["--remat-ratio", 1, "--loss", "chunked", "--chunk", 32]):
        other = tune("--steps", 2, "--log-every", 1, *more)
        assert [s["loss"] for s in other.steps] == pytest.approx([s["loss"] for s in plain.steps], abs=2e-6)


def test_the_share_of_blocks_that_is_recomputed_is_spread_evenly(tmp_path):
    folder = write_model(tmp_path / "six", num_hidden_layers=6)
    for ratio, expected in ((0, []), (0.5, [1, 3, 5]), (0.34, [2, 5]), (1, [0, 1, 2, 3, 4, 5])):
        layers = blank_model(str(folder), ratio).model.model.layers
        assert [i for i, layer in enumerate(layers) if "forward" in vars(layer)] == expected


def test_a_prepared_model_is_loaded_the_second_time_and_refused_for_another(tune, qwen, tmp_path):
    first, second = (tune("--steps", 2, "--prepared", "ready", "--log-every", 1) for _ in range(2))
    assert (first.code, second.code) == (0, 0), second.err
    assert (first.row["loaded_from"], second.row["loaded_from"]) == ("slices", "prepared")
    assert [s["loss"] for s in first.steps] == [s["loss"] for s in second.steps]
    other = shutil.copytree(qwen, tmp_path / "other")
    name, region = max(load.weights.table(f"{other}/model.safetensors").items(), key=lambda item: item[1].like.nbytes)
    with open(other / "model.safetensors", "r+b") as file:  # all of a tensor but its first 4096 bytes
        file.seek(region.offset + 4096)
        file.write(bytes(region.like.nbytes - 4096))
    assert load.weights.glimpse(f"{other}/model.safetensors") != load.weights.glimpse(f"{qwen}/model.safetensors")
    refused = tune("--steps", 2, "--prepared", "ready", model=other)
    assert refused.code == 4 and "--prepared ready: was made of another --model" in refused.err, name
    (tmp_path / "ready/step-00000000/__0_0.distcp").write_bytes(b"")
    damaged = tune("--steps", 2, "--prepared", "ready")
    assert damaged.code == 4 and "delete step-00000000 in it to make it again" in damaged.err


def test_a_prepared_model_touches_no_checkpoint_of_a_run(tune):
    assert tune("--steps", 2, "--save", "a", "--save-every", 1).code == 0
    refused = tune("--steps", 1, "--prepared", "a")
    assert refused.code == 4 and "--prepared a: holds step-00000002, a checkpoint of a run" in refused.err
    assert sorted(name for name in os.listdir("a") if name != "lock") == ["step-00000001", "step-00000002"]
    same = tune("--prepared", "a", "--save", "./a")
    assert same.code == 2 and "--prepared a: is --save, too; name another folder" in same.err


@pytest.mark.parametrize("when", ["saving", "saved"])
def test_a_start_goes_on_where_another_one_prepares_the_model_meanwhile(when, tune, monkeypatch):
    def take(folder):
        if when == "saving":
            raise load.Refused("--save ready: pid 1 on host a is writing there")
        os.makedirs(f"{folder}/step-00000000")

    monkeypatch.setattr(load, "take", take)
    done = tune("--steps", 1, "--prepared", "ready")
    assert done.code == 0 and f"not saved, another start {'is' if when == 'saving' else 'has'} sav" in done.out


def test_random_weights_need_no_files_of_weights_and_an_export_is_that_of_the_config(tune, qwen, tmp_path):
    bare = shutil.copytree(qwen, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    (bare / "additional_chat_templates").mkdir()
    for name in ("additional_chat_templates/tools.jinja", "LICENSE", "rust_model.ot", "model.tflite"):
        (bare / name).touch()
    assert "add --random" in tune("--steps", 1, model=bare).err
    done = tune("--steps", 1, "--random", "--log-every", 1, "--export", "out/", model=bare)
    assert done.code == 0 and done.steps[0]["loss"] == pytest.approx(torch.tensor(400.0).log().item(), abs=0.1)
    assert logits("out").shape == (2, 12, 400) and logits("out").dtype == torch.bfloat16
    kept = {"additional_chat_templates", "LICENSE", "model.safetensors", "tokenizer.json"}
    assert kept <= {*os.listdir("out")} and not {"rust_model.ot", "model.tflite"} & {*os.listdir("out")}
    assert os.listdir("out/additional_chat_templates") == ["tools.jinja"]


def test_noise_of_the_config_is_off_and_said(tune, tmp_path):
    folder = write_model(tmp_path / "noisy", "mixtral", attention_dropout=0.25)
    write_tokenizer(folder)
    argv = "--steps", 4, "--log-every", 1, "--save", "a", "--remat-ratio", 1
    done = tune(*argv, "--save-every", 2, model=folder)
    assert done.code == 0 and "noise is off: attention_dropout 0.25, router_jitter_noise 0.1 of" in done.out
    shutil.rmtree("a/step-00000004")
    again = tune(*argv, model=folder)
    assert [s["loss"] for s in again.steps] == [s["loss"] for s in done.steps[2:]]
    kept = tune(*argv[:4], "--remat-ratio", 0, model=folder)
    assert [s["grad_norm"] for s in kept.steps] == pytest.approx([s["grad_norm"] for s in done.steps], rel=1e-4)


@pytest.mark.parametrize("kind", ["gpt-oss", "falcon", "lfm2"])
def test_packing_is_refused_where_an_example_would_see_the_one_before(kind, tmp_path):
    config = AutoConfig.from_pretrained(write_model(tmp_path / "m", kind))
    with pytest.raises(DataError, match="--pad pack: .* does not keep apart the examples of a row; use --pad longest"):
        HuggingFaceModel(AutoModelForCausalLM.from_config(config)).check_packed(CPU)


@pytest.mark.parametrize(("kind", "message"), [("mamba", "with sharded"), ("falcon", "use --pad longest")])
def test_a_model_that_cannot_be_trained_so_is_refused_before_the_first_step(kind, message, tune, tmp_path):
    folder = write_model(tmp_path / "m", kind)
    write_tokenizer(folder)
    done = tune("--steps", 1, "--pad", "pack", *["--random"] * (kind == "mamba"), model=folder)
    assert done.code == 3 and message in done.err and done.err.count("error: ") == 1 and not done.steps


def test_ranks_of_a_mixture_of_experts_are_simulated_and_its_products_counted(tune, tmp_path):
    folder = write_model(tmp_path / "m", "qwen3-moe")
    write_tokenizer(folder)
    done = tune("--world", 4, "--link", "none", "--steps", 1, model=folder)
    assert done.code == 0 and done.row["world"] == "4(sim none)" and done.row["collectives"]
    # A token's products: attention 4 D^2 with half as many keys and values, the router, two experts of three, the head.
    D, V = 32, 400
    linear = 2 * (2 * D * D + 2 * D * D // 2 + 4 * D + 2 * 3 * 16 * D) + V * D
    attention = 2 * 2 * D * (48 + 1) / 2  # two products a block, with half of the 48 tokens each
    assert f"{6 * (linear + attention) / 1e6:.3f} MFLOP per token" in done.out


def test_data_of_its_own_is_evaluated_and_not_trained_on(tune, tmp_path):
    write_data(tmp_path / "eval.jsonl", 6)
    done = tune("--steps", 2, "--eval-every", 1, "--eval-data", "eval.jsonl", "--log-every", 1)
    assert done.code == 0 and "64 to train on" in done.out and "6 held out of eval.jsonl" in done.out
    found = [s["eval_loss"] for s in done.steps if "eval_loss" in s]
    assert len(found) == 2 and done.row["eval_loss"] == found[1] == done.row["best_eval_loss"] < found[0]


# ------------------------------------------------------------------------------------------------- what cannot be used


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_a_shard(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    os.remove(folder / "model.safetensors")
    model.save_pretrained(folder, max_shard_size="50KB")
    os.remove(folder / sorted(name for name in os.listdir(folder) if name.startswith("model-"))[1])


def retensor(change):
    def edit(folder):
        state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        state = {name: t.contiguous() for name, t in state.items() if name != "lm_head.weight"}
        change(state)
        load.weights.write(str(folder / "model.safetensors"), {n: t.to("meta") for n, t in state.items()},
                           state.__getitem__, {})  # fmt: skip
    return edit


UP = "model.layers.1.mlp.up_proj.weight"
FOLDERS = [  # what is done to a good folder, the exit code, what the message names
    (lambda f: os.remove(f / "config.json"), 3, ["config.json", "No such file"]),
    (lambda f: (f / "config.json").write_text("{"), 3, ["config.json", "no JSON"]),
    (lambda f: edit_json(f / "config.json", model_type="nonsense"), 3, ["config.json", "nonsense"]),
    (lambda f: os.remove(f / "model.safetensors"), 3, ["model.safetensors or pytorch_model.bin", "--random"]),
    (lambda f: os.truncate(f / "model.safetensors", 999), 3, ["model.safetensors", "is damaged"]),
    (without_a_shard, 3, ["index.json: names 1 files that are not there: model-00002-of"]),
    (lambda f: os.remove(f / "tokenizer.json"), 3, ["expected a tokenizer"]),
    (retensor(lambda s: s.pop(UP)), 3, ["1 tensors missing", UP]),
    (retensor(lambda s: s.update(extra=torch.zeros(2))), 3, ["1 tensors unexpected: extra"]),
    (retensor(lambda s: s.update({UP: s[UP][:, :3].contiguous()})), 3, [f"{UP} [48, 3] (the model: [48, 32])"]),
    (retensor(lambda s: s[UP].fill_(float("nan"))), 3, [f"{UP} is not finite"]),
    (retensor(lambda s: s.update({"lm_head.weight": s[UP].new_zeros(400, 32)})), 3, ["differ, but are one parameter"]),
    (lambda f: edit_json(f / "config.json", tie_word_embeddings=False), 3, ["1 tensors missing: lm_head.weight"]),
    (lambda f: edit_json(f / "config.json", vocab_size=200), 3, ["200"]),
    (lambda f: edit_json(f / "config.json", max_position_embeddings=16), 2, ["--seqlen 48: the model knows 16"]),
    (lambda f: edit_json(f / "config.json", model_type="gemma3"), 3, ["a multimodal one, gemma3; use another model"]),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "code", "names"), FOLDERS)
def test_a_folder_that_cannot_be_used_is_told_in_one_line(spoil, code, names, tune, qwen, tmp_path):
    folder = shutil.copytree(qwen, tmp_path / "copy")
    spoil(folder)
    done = tune("--steps", 1, model=folder)
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == code and len(errors) == 1, done.err
    assert all(name in errors[0] for name in names), errors[0]


def test_pickles_are_read_without_running_code(tune, qwen, tmp_path):
    folder = shutil.copytree(qwen, tmp_path / "copy")
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    os.remove(folder / "model.safetensors")
    torch.save(state, folder / "pytorch_model.bin")
    good = tune("--steps", 1, "--log-every", 1, model=folder)
    assert good.code == 0 and good.steps[0]["loss"] == tune("--steps", 1, "--log-every", 1).steps[0]["loss"]

    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "planted"),)

    torch.save(state | dict(more=Planted()), folder / "pytorch_model.bin")
    bad = tune("--steps", 1, model=folder)
    assert bad.code == 3 and "nothing of it was run" in bad.err and not (tmp_path / "planted").exists()


LINES = [
    ("--model nowhere", "--model nowhere: is no folder"), ("--export .", "--export .: is there already"),
    ("--effective-batch 6", "--effective-batch 6: must be 1 rank x --batch 4 x a whole number"),
    ("--effective-batch 8 --grad-accum 3", "must be 1 rank x --batch 4 x a whole number (--grad-accum 3)"),
    ("--eval-data x.jsonl", "--eval-data x.jsonl: needs --eval-every"), ("--depth 3", "--depth: no such flag"),
    ("--world 4 --export out", "--export out: simulated ranks hold no model"),
    ("--world 4 --prepared out", "--prepared out: simulated ranks hold no model"),
    ("--random --prepared out", "--prepared out: is of a model with weights; leave out --random"),
    ("--pad pack --cuda-graph", "replays one shape without positions; use --pad fixed"),
    ("--epochs 0", "--epochs 0.0: must be a positive number"), ("--pad packed", "--pad packed: must be fixed, longest"),
    ("--data nowhere.jsonl", "nowhere.jsonl"), ("--remat-ratio 2", "--remat-ratio 2.0: must be between 0 and 1"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), LINES)
def test_bad_flags_are_told_in_one_line(argv, message, tune):
    done = tune(*argv.split())
    assert done.code == (3 if "nowhere.jsonl" in argv else 2) and done.err.count("error: ") == 1
    assert message in done.err


@pytest.mark.parametrize("missing", ["--model", "--data"])
def test_model_and_data_have_to_be_named(missing, capsys):
    argv = dict([("--model", "a"), ("--data", "b")]) | {missing: ""}
    with pytest.raises(SystemExit) as exit:
        config.parse([f"{name}={value}" for name, value in argv.items() if value], 0, 1)
    assert exit.value.code == 2 and f"error: {missing}: needs" in capsys.readouterr().err


def test_epochs_and_effective_batch_decide_steps_and_accumulation(tune):
    done = tune("--batch", 2, "--effective-batch", 16, "--epochs", 0.5)
    assert done.code == 0 and done.row["grad_accum"] == 8 and done.row["flags"]["steps"] == 2  # 64 examples
    assert "each step passes" not in done.out
    few = tune("--effective-batch", 96)
    assert few.code == 0 and "each step passes 1.5 times over all 64 rows of --data" in few.out


def test_a_preview_marks_what_is_learned(qwen, capsys):
    c = config.parse(["--model", str(qwen), "--data", str(qwen.parent / "chat.jsonl"), "--seqlen", "48"])
    finetune.show(c, 1)
    shown = capsys.readouterr().out
    assert "user\nWhat is 0 plus 0?<|im_end|>\n<|im_start|>assistant\n[[0 plus 0 is 0.<|im_end|>]]" in shown


def test_a_model_is_looked_at_once_and_by_no_compiled_code(tune, monkeypatch):
    looks, compiled = [], []
    look, compile = HuggingFaceModel.look, torch.compile
    monkeypatch.setattr(HuggingFaceModel, "look", lambda model, device: (looks.append(1), look(model, device)))
    eager = lambda graph, _: compiled.append(graph) or graph.forward  # noqa: E731
    call = lambda module, **_: setattr(module, "_compiled_call_impl", compile(module._call_impl, backend=eager))  # noqa: E731
    monkeypatch.setattr(torch.nn.Module, "compile", call)
    assert tune("--compile", "blocks", "--steps", 2).code == 0
    assert len(looks) == 1 and len(compiled) == 1


@pytest.mark.slow
def test_rows_of_any_length_are_one_graph(tune, tmp_path, monkeypatch):
    lines = [dict(prompt="What?", completion="a b c d " * (i + 1)) for i in range(8)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    compiled, compile = [], torch.compile
    eager = lambda graph, _: compiled.append(graph) or graph.forward  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, fullgraph=True, backend=eager))
    argv = "--pad", "longest", "--batch", 1, "--steps", 8, "--log-every", 1
    done = tune("--compile", "fwdbwd", *argv, data=tmp_path / "text.jsonl")
    eager = tune(*argv, data=tmp_path / "text.jsonl")
    assert done.code == 0 and len(compiled) == 1
    assert [s["loss"] for s in done.steps] == pytest.approx([s["loss"] for s in eager.steps], abs=5e-6)


def test_bad_flags_answer_before_torch_is_imported(tmp_path):
    command = [sys.executable, "-X", "importtime", str(ROOT / "finetune.py"), "--model", str(tmp_path), "--data", "x"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 3 and "config.json: No such file or directory" in told.stderr
    assert not re.search(r"\| +(torch|transformers)$", told.stderr, re.MULTILINE)


# -------------------------------------------------------------------------------------------------- compiled, and large


@pytest.mark.slow
@pytest.mark.parametrize("argv", ["--compile fwdbwd --pad pack --remat-ratio 0.5", "--compile blocks --loss chunked"])
def test_compiled_steps_have_the_losses_of_eager_ones(argv, tune):
    rest = argv.split()[2:]
    compiled, eager = (tune("--steps", 3, "--log-every", 1, *more) for more in (argv.split(), rest))
    assert compiled.code == 0, compiled.err
    assert [s["loss"] for s in compiled.steps] == pytest.approx([s["loss"] for s in eager.steps], abs=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), [("qwen3-moe", {}), ("gemma3", dict(sliding_window=8))])
def test_other_kinds_train_packed_on_two_ranks_resume_bit_equal_and_are_exported(kind, more, tmp_path):
    folder = write_model(tmp_path / "m", kind, **more)
    write_tokenizer(folder)
    usual = ["finetune.py", "--model", folder, "--data", write_data(tmp_path / "chat.jsonl"), "--compile", "none"]
    usual += ["--pad", "pack", "--seqlen", 96, "--batch", 2, "--lr", "3e-3", "--warmup", 0, "--steps", 6]
    usual += ["--remat-ratio", 0.5, "--log-every", 1, "--save-every", 3]

    def run(name):
        job = Job(2, [*usual, "--results", tmp_path / f"{name}.jsonl", "--save", tmp_path / name, "--export",
                      tmp_path / f"out-{name}"], tmp_path / f"{name}.log", cwd=tmp_path,
                  XDG_CACHE_HOME=str(tmp_path / "cache"))  # fmt: skip
        assert job.wait(200) == [0, 0], (tmp_path / f"{name}.log").read_text()
        return read(tmp_path / f"{name}.jsonl")[1]

    steps = run("a")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    shutil.copytree(tmp_path / "a/step-00000003", tmp_path / "b/step-00000003")
    again = run("b")
    assert [[s["loss"], s["grad_norm"]] for s in again] == [[s["loss"], s["grad_norm"]] for s in steps[3:]]
    files = [(tmp_path / f"out-{name}/model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1] != (folder / "model.safetensors").read_bytes()
    assert export.main([str(tmp_path / "a"), str(tmp_path / "later"), "--model", str(folder)]) == 0
    assert torch.equal(logits(tmp_path / "later"), logits(tmp_path / "out-a"))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """100 MB in bf16."""
    folder = write_model(tmp_path_factory.mktemp("large") / "m", vocab=16000, hidden_size=768, intermediate_size=3072,
                         num_hidden_layers=4, num_attention_heads=12)  # fmt: skip
    write_tokenizer(folder)
    return folder


def status_mib(entry):
    return int(re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def resident_while_loading(mesh):
    """MiB: by how much loading raised the peak of resident memory, this rank's shards, the largest slice in fp32."""
    c = flags.resolve(config.parse(["--model", os.environ["LARGE"], "--data", "x", "--compile", "none"]), "cpu", 2)
    model = blank_model(c.model)
    model.drawn = False
    step = build(c, CPU, 2, model=model)
    inner = step.model.model
    load.renamed("", load.weights.table(load.weights_in(c.model)), inner)  # imports what it needs
    shards = [p.to_local().nbytes / 2**20 for p in inner.parameters()]
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    load.load_weights(c, step.model, None)
    return status_mib("VmHWM") - before, sum(shards), max(shards)


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux: /proc/self/clear_refs")
def test_loading_holds_this_ranks_shards_and_one_slice(large, monkeypatch):
    monkeypatch.setenv("LARGE", str(large))
    for grown, shards, largest in spawn(2, [resident_while_loading])["resident_while_loading"]:
        assert shards < grown < shards + 2 * largest, (grown, shards, largest)


@pytest.mark.slow
def test_two_ranks_train_a_hundred_megabytes(large, tmp_path):
    """Of a 100 MB model in bf16: from JSONL to a lower loss, resumed bit-equal, opened by from_pretrained()."""
    write_data(tmp_path / "chat.jsonl")
    assert 90e6 < os.path.getsize(large / "model.safetensors") < 130e6
    usual = ["finetune.py", "--model", large, "--data", tmp_path / "chat.jsonl", "--compile", "none", "--seqlen", 40]
    usual += ["--batch", 2, "--lr", "3e-4", "--warmup", 0, "--log-every", 1, "--save-every", 2, "--steps", 4]

    def run(name, *more):
        results = tmp_path / f"{name}.jsonl"
        job = Job(2, [*usual, "--results", results, *more], tmp_path / f"{name}.log", cwd=tmp_path,
                  XDG_CACHE_HOME=str(tmp_path / "cache"))  # fmt: skip
        assert job.wait(300) == [0, 0], (tmp_path / f"{name}.log").read_text()
        return read(results)

    _, steps = run("a", "--save", tmp_path / "a", "--export", tmp_path / "out")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    os.makedirs(tmp_path / "b")
    shutil.copytree(tmp_path / "a/step-00000002", tmp_path / "b/step-00000002")
    _, again = run("b", "--save", tmp_path / "b", "--export", tmp_path / "again")
    assert [s["loss"] for s in again] == [s["loss"] for s in steps if s["step"] > 2]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert files[0] == files[1]
