"""finetune.py: models of Hugging Face are loaded by slices, trained, resumed and exported, bit-equal.

    pytest tests/test_finetune.py        # one rank here, two in one spawn; no GPU, no network

What it refuses, compiled steps and large models: tests/test_finetune_limits.py. The data: tests/test_chat.py.
"""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conversations import TEMPLATES, jsonl, long_chats
from harness import spawn
from outcomes import fine, later, losses, refused

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from safetensors.torch import load_file, save_file
from tiny_hf import KINDS, TOKENS, built, edit_json, logits, resolved, write_data, write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_pt_utils import LabelSmoother

from trainer import config as flags
from trainer.finetuning import config, export, load
from trainer.finetuning.chat import ChatBatches
from trainer.finetuning.model import HuggingFaceModel, blank_model
from trainer.finetuning.run import open_model

pytestmark = pytest.mark.usefixtures("isolated")
CPU = torch.device("cpu")


@pytest.mark.long
def test_a_held_out_prompt_is_answered_after_each_evaluation(tune):
    done = fine(tune("--steps", 3, "--eval-every", 2, "--sample", 5, "--seqlen", 128))
    heads = re.findall(r"^sample   (\d+) tokens of held-out data, then after \| (\d) that", done.out, re.M)
    assert len(heads) == 2 and heads[0][0] == heads[1][0] and 1 <= int(heads[0][1]) <= 5
    assert len(re.findall(r"^<\|im_start\|>user\nWhat is .*\n<\|im_start\|>assistant\n\|", done.out, re.M)) == 2
    plain = tune("--steps", 3, "--eval-every", 2, "--pad", "longest")
    assert "sample  " not in plain.out
    assert ["padding is computed, too; --pad longest" in each.out for each in (done, plain)] == [True, False]


# ------------------------------------------------------------------------------------------------- loading and saving


def load_and_export_every_kind(mesh):
    """Largest difference from from_pretrained()'s logits, whether what is exported has the same, bits and dtypes."""
    told = {}
    for kind in KINDS:
        folder, out = f"{os.environ['MODELS']}/{kind}", f"{os.environ['MODELS']}/out-{kind}"
        c = resolved(folder, "--seqlen", 12, "--export", out)
        step = built(c)
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
        c = resolved(folder, *(["--export", out] if out else []))
        step, fill = built(c), load.weights.fill
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


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_load_by_slices_what_from_pretrained_loads_pack_it_and_export_it_bit_equal(kind, two_ranks):
    apart, same, names, source, line = two_ranks["load_and_export_every_kind"][0][kind]
    assert apart < 1e-5 and source == "slices"
    assert same == (True, True) and names, line


@pytest.mark.long
def test_what_one_rank_cannot_read_or_write_is_raised_on_both(two_ranks):
    first, second = two_ranks["fail_on_one_rank"]
    assert first == second
    assert "DataError" in first[0] and "Input/output error" in first[0]
    assert "CheckpointError: nowhere/out: No such file or directory" in first[1]


@pytest.mark.long
def test_a_run_learns_saves_resumes_bit_equal_and_exports(tune, qwen, tmp_path, capfd):
    usual = "--steps", 8, "--eval-every", 4, "--log-every", 1
    whole = fine(tune(*usual, "--save", "a", "--save-every", 4, "--export", "out"))
    assert whole.steps[-1]["loss"] < whole.steps[0]["loss"] - 0.25
    row = whole.row
    assert row["outcome"] == "ok" and row["loaded_from"] == "slices" and row["load_s"] > 0
    assert row["eval_ppl"] == pytest.approx(torch.tensor(row["eval_loss"]).exp().item())
    # One of 64 is held out.
    assert row["eval_examples"] == 1 and f"perplexity {row['eval_ppl']:.3f}, of 1 example, after step 8" in whole.out
    assert row["flags"]["model"] == "qwen" and row["depth"] == 2 and row["flags"]["effective_batch"] == 4
    assert "26 tensors of bfloat16; each rank read its rows" in whole.out
    os.makedirs("b")
    shutil.copytree("a/step-00000004", "b/step-00000004")
    again = fine(tune(*usual, "--save", "b", "--export", "again"))
    assert again.row["resumed_after"] == 4 and "loaded_from" not in again.row
    losses = {step["step"]: step["loss"] for step in whole.steps}
    assert {s["step"]: s["loss"] for s in again.steps} == {k: losses[k] for k in losses if k > 4}
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()
    assert not torch.equal(logits("out"), logits(qwen)) and logits("out").dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {*os.listdir("out")}
    fine(later(capfd, "a", "later", "--model", qwen, "--max-shard-gb", "1e-5"))
    assert torch.equal(logits("later"), logits("out")) and "model.safetensors.index.json" in os.listdir("later")
    other = shutil.copytree(qwen, tmp_path / "other")
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    refused(4, "a model with rms_norm_eps 1e-06 (", later(capfd, "a", "never", "--model", other))
    assert not os.path.exists("never")


def test_a_signal_ends_a_later_export_and_nothing_is_left(tune, qwen, monkeypatch, capfd):
    fine(tune("--steps", 1, "--save", "a"))
    real = export.checkpoint.read
    monkeypatch.setattr(export.checkpoint, "read", lambda *_: (os.kill(os.getpid(), signal.SIGTERM), real(*_))[1])
    done = later(capfd, "a", "out", "--model", qwen)
    assert done.code == 143 and "stopped by SIGTERM; out was not written" in done.err
    assert not [name for name in os.listdir() if name.startswith("out")]


def test_what_a_killed_export_left_is_removed_by_the_next_and_no_lock_is_exported(tune, qwen, tmp_path):
    for name in ("out.tmp-00000000", "out.tmp-12345678", "out.tmp-mine"):
        shutil.copytree(qwen, tmp_path / name)
    (tmp_path / "out.tmp-12345678/lock").write_text('{"pid": 1, "machine": "another"}')  # a sign of life
    done = fine(tune("--steps", 1, "--export", "out/"))
    assert "removed out.tmp-00000000, which an export" in done.out
    left = {name for name in os.listdir() if name.startswith("out")}
    assert left == {"out", "out.tmp-12345678", "out.tmp-mine"} and "lock" not in os.listdir("out")


@pytest.mark.long
def test_a_link_out_of_the_models_folder_is_not_copied_into_an_export(tune, qwen, tmp_path, capfd):
    """As the folder of a stranger may have; the cache of the hub has links to its own files alone."""
    blobs, model = tmp_path / "cache/blobs", shutil.copytree(qwen, tmp_path / "cache/snapshots/1")
    blobs.mkdir()
    (model / "config.json").rename(blobs / "a")
    (model / "config.json").symlink_to("../../blobs/a")
    fine(tune("--steps", 1, "--save", "a", "--export", "out", model=model))
    assert not Path("out/config.json").is_symlink()
    (tmp_path / "secret").write_text("secret")
    for name in ("NOTICE", "additional_chat_templates/secret"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).symlink_to(tmp_path / "secret")
        words = f"{model / name}: is a link to a file outside of its folder"
        refused(3, words, tune("--steps", 1, "--export", "never", model=model))
        assert later(capfd, "a", "never", "--model", model).code == 3
        assert not [each for each in os.listdir() if each.startswith("never")]
        (model / name).unlink()
    (model / "additional_chat_templates/tool.jinja").write_text("template")
    fine(later(capfd, "a", "later", "--model", model))
    assert Path("later/additional_chat_templates/tool.jinja").read_text() == "template"


@pytest.mark.long
def test_an_export_that_failed_is_made_by_the_same_command(tune, monkeypatch):
    argv, there = ("--steps", 2, "--save", "a", "--export", "out"), "--export out: already exists; name a new folder"
    with monkeypatch.context() as patch:
        patch.setattr(export.weights, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for _ in range(2):  # after training, and again
            failed = tune(*argv)
            assert failed.code == 4 and "out: No space left" in failed.err and not os.path.exists("out")
    again = fine(tune(*argv))
    assert "already done" in again.out and "export   out: 26 tensors" in again.out
    once_more = tune(*argv)  # a job that is queued again: nothing is left to do, or to refuse
    assert once_more.code == 0 and "already done" in once_more.out and "export   " not in once_more.out
    for longer in (("--steps", 3, "--save", "a", "--export", "out"), ("--steps", 2, "--save", "b", "--export", "out")):
        refused(2, there, tune(*longer))  # not when it would train, nor for another run
    shutil.copytree("a", "c", ignore=shutil.ignore_patterns("step-*"))  # its checkpoint is gone: it would train
    refused(2, there, tune("--steps", 2, "--save", "c", "--export", "out"))
    fine(tune("--steps", 2, "--export", "straight"))
    assert Path("out/model.safetensors").read_bytes() == Path("straight/model.safetensors").read_bytes()


@pytest.mark.long
def test_a_run_is_not_resumed_with_a_value_of_config_json_back_at_its_default(tune, qwen, tmp_path):
    other = shutil.copytree(qwen, tmp_path / "other")
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    fine(tune("--steps", 1, "--save", "a", model=other))
    refused(4, "was saved with rms_norm_eps 0.001 (now ", tune("--steps", 2, "--save", "a"))


def loss_of_transformers(folder, dtype=torch.float32):
    """Of the first 8 rows that a run draws."""
    data = str(write_data(Path("first.jsonl")))
    how = dict(global_batch=8, seqlen=48, vocab=400, seed=0)
    tokens, targets, _ = next(ChatBatches(data, AutoTokenizer.from_pretrained(folder), **how))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, return_dict=True).eval()
    assert (targets[:, -1] == -100).all(), "else the last target would be lost"
    labels = torch.cat([torch.full((8, 1), -100), targets[:, :-1]], 1)  # transformers moves them on itself
    losses, counts = [], (labels != -100).sum(1)
    for row, own in zip(tokens, labels, strict=True):  # without padding, by whose length longrope would choose
        n = int((own != -100).nonzero()[-1]) + 1
        losses.append(model(input_ids=row[None, :n], labels=own[None, :n]).loss.item())
    return (torch.tensor(losses) @ counts.float() / counts.sum()).item()


def test_the_first_loss_is_that_of_transformers(tune, qwen):
    done = tune("--steps", 1, "--grad-accum", 2, "--log-every", 1)
    assert done.steps[0]["loss"] == pytest.approx(loss_of_transformers(qwen), abs=1e-6)


@pytest.mark.parametrize("pad", ["fixed", "pack"])
def test_smoothed_labels_have_the_loss_and_the_gradient_of_transformers(pad, tune, qwen):
    argv = "--label-smoothing", 0.1, "--pad", pad, "--steps", 1, "--grad-accum", 2, "--log-every", 1
    done = fine(tune(*argv))
    how = dict(global_batch=8, seqlen=48, vocab=400, seed=0, pad=pad)
    data = str(write_data(Path("first.jsonl")))
    tokens, targets, inputs = next(ChatBatches(data, AutoTokenizer.from_pretrained(qwen), **how))
    model = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).eval()
    loss = LabelSmoother(0.1)(model(input_ids=tokens, use_cache=False, **inputs), targets)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert done.steps[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert done.steps[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert "--loss full: the loss of Qwen2ForCausalLM is not the cross-entropy of its head's product" in done.out


def test_smoothed_labels_leave_the_held_out_loss_and_refuse_the_loss_in_chunks(tune):
    argv = "--steps", 0, "--eval-every", 1
    plain, smoothed = (fine(tune(*argv, *more)).row["eval_loss"] for more in ((), ("--label-smoothing", 0.5)))
    assert smoothed == pytest.approx(plain, abs=1e-6)
    refused(2, "--loss chunked: the loss of", tune("--label-smoothing", 0.5, "--loss", "chunked", "--steps", 1))


FAMILIES = "diffllama", "tuples", "llama4", "xglm", "minimax", "qwen3.5", "longrope", "deepseek"


@pytest.mark.long
@pytest.mark.parametrize("kind", FAMILIES)
def test_other_families_have_the_losses_of_transformers_and_are_exported(kind, tune, tmp_path):
    """DiffLlama draws parameters on the CPU; "tuples" is of a config.json with return_dict false; the text model of
    Llama 4 names a base that it lacks; buffers of XGLM and MiniMax have the dtype in which a model is loaded; Qwen3.5's
    config.json and files are of a model of text and images; longrope leaves a tensor on the device where it is run."""
    folder = write_model(tmp_path / "m", kind)
    for dtype, torch_dtype, apart in (("fp32", torch.float32, 2e-6), ("bf16", torch.bfloat16, 5e-3)):
        out = tmp_path / dtype
        argv = "--steps", 1, "--grad-accum", 2, "--log-every", 1, "--lr", 1e-30, "--param-dtype", dtype, "--export", out
        done = fine(tune(*argv, model=folder))
        assert done.steps[0]["loss"] == pytest.approx(loss_of_transformers(folder, torch_dtype), abs=apart)
        before, after = (logits(each, return_dict=True) for each in (folder, out))
        assert torch.allclose(before, after, rtol=0, atol=1e-20)  # not equal: rows of 0 are trained, too
        assert ("longrope: a micro-batch has the long" in done.out) == (kind == "longrope")
        assert ("tensors that the model does not use are left out: model.visual." in done.out) == (kind == "qwen3.5")
    names = [AutoConfig.from_pretrained(each).model_type for each in (folder, out)]
    assert names == (["qwen3_5", "qwen3_5_text"] if kind == "qwen3.5" else names[:1] * 2)


@pytest.mark.long
def test_longrope_chooses_its_factors_by_the_examples_and_not_by_their_padding(tune, tmp_path):
    folder = write_model(tmp_path / "m", "longrope")
    weights = {name: 9 * t if "proj" in name else t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))  # so that attention looks at positions
    data = tmp_path / "short.jsonl"
    jsonl(data, [dict(text="7 plus 9 is 16, 9 plus 7 is 16.")] * 4)
    argv = "--steps", 1, "--log-every", 1, "--batch", 2
    first = {
        (n, pad): tune(*argv, "--seqlen", n, "--pad", pad, model=folder, data=data).steps[0]["loss"]
        for n, pad in ((32, "fixed"), (48, "fixed"), (48, "longest"))
    }
    assert first[48, "fixed"] == pytest.approx(first[32, "fixed"], abs=1e-5) == first[48, "longest"]
    model, ids = HuggingFaceModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)), TOKENS[:1]
    long = model(ids, ids, position_ids=torch.arange(12)[None] + 30)  # what a row with padding had
    assert abs(long - model(ids, ids)) > 0.01
    argv = ["--model", str(folder), "--data", "x", "--cuda-graph", "--seqlen", "48", "--device", "cuda"]
    with pytest.raises(ValueError, match="--cuda-graph: cannot choose between longrope's .* use --seqlen 32 or less"):
        open_model(flags.resolve(config.parse(argv), "cuda", 1))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt2", "bloom", "opt"])
def test_old_files_without_the_prefix_of_the_base_keep_names_and_dtypes(kind, tune, tmp_path):
    """Those of GPT-2 have buffers, too, that no one reads; no dtype is in their config.json."""
    folder = write_model(tmp_path / "m", kind)
    edit_json(folder / "config.json", dtype=None)
    prefix = "model." if kind == "opt" else "transformer."
    old = {name.removeprefix(prefix): t for name, t in load_file(folder / "model.safetensors").items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 9, 9), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(old | (masks if kind == "gpt2" else {}), folder / "model.safetensors", metadata=dict(format="pt"))
    done = fine(tune("--steps", 1, "--lr", 1e-30, "--export", "out", model=folder))
    left = "2 tensors that the model does not use are left out: h.0.attn.bias, h.0.attn.masked_bias"
    assert (left in done.out) == (kind == "gpt2")
    new = load_file("out/model.safetensors")
    assert new.keys() == old.keys() and all(new[name].dtype == t.dtype for name, t in old.items())
    before, after = (logits(each, dtype=torch.float32) for each in (folder, "out"))
    assert torch.allclose(before, after, rtol=0, atol=1e-20)


@pytest.mark.parametrize("kind", ["qwen2.5", "xglm", "minimax", "deepseek"])
def test_buffers_have_the_dtypes_of_a_model_that_transformers_loads_for_the_same_computation(kind, tmp_path):
    folder = write_model(tmp_path / "m", kind)
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = blank_model(folder, dtype=dtype).model, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        dtypes = [{name: buffer.dtype for name, buffer in each.named_buffers()} for each in (ours, theirs)]
        assert dtypes[0] == dtypes[1] and {p.dtype for p in ours.parameters()} == {torch.float32}


def test_a_graph_of_a_whole_step_is_refused_where_positions_branch_on_values(tune, tmp_path):
    rotary = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    folder = write_model(tmp_path / "m", "llama", max_position_embeddings=64, rope_parameters=rotary)
    refused(2, "--compile fwdbwd: rope_type dynamic of config.json branches",
        tune("--steps", 1, "--compile", "fwdbwd", model=folder))
    fine(tune("--steps", 1, model=folder))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "more"), [
    ("qwen3", ("--compile", "fwdbwd", "--remat", "block", "--remat-ratio", "0.5")),
    ("qwen3-moe", ("--loss", "chunked")), ("mistral", ()),
])  # fmt: skip
def test_examples_of_a_chat_that_share_their_beginning_have_the_loss_and_gradients_of_separate_ones(
        kind, more, tune, tmp_path):  # fmt: skip
    folder, data = write_model(tmp_path / "m", kind, max_position_embeddings=512), tmp_path / "long.jsonl"
    (folder / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    jsonl(data, long_chats(4))
    how = dict(model=folder, data=data)
    usual = "--steps", 2, "--log-every", 1, "--seqlen", 512, "--lr", "1e-2", "--batch"
    apart, packed = tune(*usual, 10, "--pad", "longest", **how), tune(*usual, 1, "--pad", "pack", **how)
    rows = int(re.search(r"in (\d+) rows of 512", packed.out)[1])
    packed = tune(*usual, rows, "--pad", "pack", *more, **how)
    said = " ".join(apart.out.split())  # lines are folded
    assert rows < 9 and "10 examples" in said and "3 split, as the template rewrites answers" in said
    shared = "tokens are shared by several examples" in " ".join(packed.out.split())
    assert shared == (kind != "mistral")  # which has sliding windows
    # Of the second step: the first one may compile. Apart, rows have different lengths.
    assert "tok_s" in packed.steps[1] and "tok_s" not in apart.steps[1]
    for one, other in zip(apart.steps, packed.steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.long
def test_recomputed_blocks_and_the_chunked_loss_change_nothing(tune):
    plain = tune("--steps", 2, "--log-every", 1)
    for more in ("--remat block --remat-ratio 0.5".split(), "--remat block --loss chunked --loss-chunk 32".split()):
        other = tune("--steps", 2, "--log-every", 1, *more)
        assert losses(other) == pytest.approx(losses(plain), abs=2e-6)


def test_the_share_of_blocks_that_is_recomputed_is_spread_evenly(tmp_path):
    folder = write_model(tmp_path / "six", num_hidden_layers=6)
    for ratio, expected in ((0, []), (0.5, [1, 3, 5]), (0.34, [2, 5]), (1, [0, 1, 2, 3, 4, 5])):
        layers = blank_model(str(folder), ratio).model.model.layers
        assert [i for i, layer in enumerate(layers) if "forward" in vars(layer)] == expected


@pytest.mark.long
def test_a_prepared_model_is_loaded_the_second_time_and_refused_for_another(tune, qwen, tmp_path):
    first, second = (fine(tune("--steps", 2, "--prepared", "ready", "--log-every", 1)) for _ in range(2))
    assert (first.row["loaded_from"], second.row["loaded_from"]) == ("slices", "prepared")
    assert losses(first) == losses(second)
    other = shutil.copytree(qwen, tmp_path / "other")
    state = load_file(other / "model.safetensors")
    max(state.values(), key=lambda t: t.nbytes).view(-1)[2048:] = 0  # all of a tensor in bf16 but its first 4096 bytes
    save_file(state, other / "model.safetensors")
    assert load.weights.glimpse(f"{other}/model.safetensors") != load.weights.glimpse(f"{qwen}/model.safetensors")
    words = "--prepared ready: was made from another --model"
    refused(4, words, tune("--steps", 2, "--prepared", "ready", model=other))
    (tmp_path / "ready/step-00000000/__0_0.distcp").write_bytes(b"")
    refused(4, "delete step-00000000 in it to build it again", tune("--steps", 2, "--prepared", "ready"))


@pytest.mark.long
def test_a_prepared_model_touches_no_checkpoint_of_a_run(tune):
    fine(tune("--steps", 2, "--save", "a", "--save-every", 1))
    refused(4, "--prepared a: holds step-00000002, a checkpoint of a run", tune("--steps", 1, "--prepared", "a"))
    assert sorted(name for name in os.listdir("a") if name != "lock") == ["step-00000001", "step-00000002"]
    refused(2, "--prepared a: not with --save ./a: caches weights that real ranks read from",
            tune("--prepared", "a", "--save", "./a"))


@pytest.mark.parametrize("when", ["saving", "saved"])
def test_a_start_goes_on_where_another_one_prepares_the_model_meanwhile(when, tune, monkeypatch):
    def acquire(folder):
        if when == "saving":
            raise load.Refused("--save ready: pid 1 on host a is writing there")
        os.makedirs(f"{folder}/step-00000000")

    monkeypatch.setattr(load, "acquire", acquire)
    done = fine(tune("--steps", 1, "--prepared", "ready"))
    assert f"not saved, another run {'is' if when == 'saving' else 'has'} sav" in done.out


@pytest.mark.long
def test_random_weights_need_no_files_of_weights_and_an_export_is_that_of_the_config(tune, qwen, tmp_path):
    bare = shutil.copytree(qwen, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    (bare / "additional_chat_templates").mkdir()
    for name in ("additional_chat_templates/tools.jinja", "LICENSE", "rust_model.ot", "model.tflite"):
        (bare / name).touch()
    assert "add --random" in tune("--steps", 1, model=bare).err
    done = fine(tune("--steps", 1, "--random", "--log-every", 1, "--export", "out/", model=bare))
    assert done.steps[0]["loss"] == pytest.approx(torch.tensor(400.0).log().item(), abs=0.1)
    assert logits("out").shape == (2, 12, 400) and logits("out").dtype == torch.bfloat16
    kept = {"additional_chat_templates", "LICENSE", "model.safetensors", "tokenizer.json"}
    assert kept <= {*os.listdir("out")} and not {"rust_model.ot", "model.tflite"} & {*os.listdir("out")}
    assert os.listdir("out/additional_chat_templates") == ["tools.jinja"]


@pytest.mark.long
def test_noise_of_the_config_is_off_and_said(tune, tmp_path):
    folder = write_model(tmp_path / "noisy", "mixtral", attention_dropout=0.25)
    argv = "--steps", 4, "--log-every", 1, "--save", "a", "--remat", "block"
    done = fine(tune(*argv, "--save-every", 2, model=folder))
    assert "noise is off: attention_dropout 0.25, router_jitter_noise 0.1 of" in done.out
    shutil.rmtree("a/step-00000004")
    again = tune(*argv, model=folder)
    assert losses(again) == [s["loss"] for s in done.steps[2:]]
    kept = tune(*argv[:4], "--remat", "none", model=folder)
    assert losses(kept, "grad_norm") == pytest.approx(losses(done, "grad_norm"), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt-oss", "falcon", "lfm2", "mamba"])
def test_a_model_that_cannot_be_trained_so_is_refused_before_the_first_step(kind, tune, tmp_path):
    folder = write_model(tmp_path / "m", kind)
    done = tune("--steps", 1, "--pad", "pack", *["--random"] * (kind == "mamba"), model=folder)
    apart = "lets examples of one row attend to each other; use --pad longest"
    refused(3, "with sharded" if kind == "mamba" else apart, done)
    assert not done.steps


def test_ranks_of_a_mixture_of_experts_are_simulated_and_its_products_counted(tune, tmp_path):
    folder = write_model(tmp_path / "m", "qwen3-moe")
    done = fine(tune("--world", 4, "--link", "none", "--steps", 1, model=folder))
    assert done.row["world"] == "4(sim none)" and done.row["collectives"]
    # A token's products: attention 4 D^2 with half as many keys and values, the router, two experts of three, the head.
    D, V = 32, 400
    linear = 2 * (2 * D * D + 2 * D * D // 2 + 4 * D + 2 * 3 * 16 * D) + V * D
    attention = 2 * 2 * D * (48 + 1) / 2  # two products a block, with half of the 48 tokens each
    assert f"{6 * (linear + attention) / 1e6:.3f} MFLOP per token" in done.out


def test_data_of_its_own_is_evaluated_and_not_trained_on(tune, tmp_path):
    write_data(tmp_path / "eval.jsonl", 6)
    done = fine(tune("--steps", 2, "--eval-every", 1, "--eval-data", "eval.jsonl", "--log-every", 1))
    assert "64 to train on" in done.out and "6 held out of eval.jsonl" in done.out
    found = [s["eval_loss"] for s in done.steps if "eval_loss" in s]
    assert len(found) == 2 and done.row["eval_loss"] == found[1] == done.row["best_eval_loss"] < found[0]


@pytest.mark.long
def test_zero_steps_evaluate_the_model_as_it_is_and_train_nothing(tune, tmp_path):
    """Its loss is the one with which training begins."""
    write_data(tmp_path / "eval.jsonl", 6)
    flags = "--eval-every", 1, "--eval-data", "eval.jsonl", "--log-every", 1
    model, trained = tune(*flags, "--steps", 0), tune(*flags, "--steps", 1, "--lr", "1e-30")
    assert model.code == 0 and model.row["loss"] is None and model.row["eval_step"] == 0
    assert model.row["eval_loss"] == pytest.approx(trained.row["eval_loss"], abs=1e-6)
    saved = tune(*flags, "--steps", 2, "--save", "run")
    again = fine(tune(*flags, "--steps", 0, "--resume", "run"))
    assert again.row["eval_step"] == 2 and again.row["eval_loss"] == saved.row["eval_loss"]
