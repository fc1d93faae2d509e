"""finetune.py --lora: adapters beside a frozen model are those of peft, on any number of ranks, saved and exported.

    pytest tests/test_lora.py            # one rank here, two in one spawn; no GPU, no network
    pytest -s -m slow tests/test_lora.py    # all causal classes on meta
"""

import importlib.util
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import Job
from harness import spawn
from outcomes import fine, later, losses, refused
from running import read as rows

pytest.importorskip("peft", reason="needs transformers and peft: pip install -e '.[hf]'")

from families import FAMILIES, tiny
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from test_families import saved
from tiny_hf import TOKENS, built, edit_json, logits, resolved, write_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lab.planning.architecture import read
from lab.planning.weights import trained
from trainer.checkpoint.manifest import CheckpointError
from trainer.data import DataError
from trainer.finetuning import adapters, export, load
from trainer.finetuning.model import adapters_in, blank_model, is_adapter
from trainer.measuring import flops

pytestmark = pytest.mark.usefixtures("isolated")
LORA = "--lora", 4, "--lora-alpha", 8.0
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
MODULES = ["lm_head", "embed_tokens", "model.norm"]
# Model, what peft adapts: modules, and parameters; flags.
KINDS = {
    "qwen2.5": ("qwen2.5", SEVEN, None, []), "qwen3-moe": ("qwen3-moe", SEVEN[:4], None, []),
    "mixtral": ("mixtral", SEVEN[:4], None, []), "gpt2": ("gpt2", ["c_attn", "c_proj", "c_fc"], None, []),
    # One dense block and one with experts, of which one is shared: peft takes their names for those of experts.
    "deepseek": ("deepseek", LATENT, [f"model.layers.{path}.{name}.weight" for name in SEVEN[4:]
                                      for path in ("0.mlp", "1.mlp.shared_experts")], []),
    "experts": ("qwen3-moe", SEVEN[:4], STACKED, ["--lora-targets", "all-linear", "experts"]),
    "rslora": ("qwen2.5", SEVEN, None, ["--lora-rslora"]),
    "modules": ("qwen3", SEVEN, None, ["--lora-modules-to-save", *MODULES]),
    "transposed": ("gpt-oss", None, STACKED, ["--lora-targets", "experts"]),
}  # fmt: skip
EXACT = "qwen2.5", "qwen3-moe", "mixtral", "gpt2", "rslora", "modules"


def whole(model):
    """{name: what is trained}, of sharded ones."""
    found = model.saved_with_adapters()
    return {name: p.detach().full_tensor().clone() for name, p in found.items()}


def train_every_kind(mesh):
    """Saves adapters before and after three steps, losses, how parameters are stored, logits, and a line of export."""
    told, rank = {}, dist.get_rank()
    for kind, (_, _, _, more) in KINDS.items():
        folder, out = f"{os.environ['MODELS']}/{kind}", f"{os.environ['MODELS']}/out-{kind}"
        usual = folder, "--seqlen", 12, "--lr", "1e-2", *LORA, *more, "--export"
        step = built(c := resolved(*usual, out))
        load.load_weights(c, step.model, None)
        before, losses = whole(step.model), []
        for k in range(3):
            tokens = (TOKENS + k)[rank : rank + 1]
            losses.append(step(tokens, tokens.roll(-1, 1)).item())
        export.export(c, step.model, None)
        stored = {(p.dtype, p.requires_grad, isinstance(p, DTensor)) for p in step.model.parameters()}
        with torch.no_grad():
            found = step.model(TOKENS)
        told[kind] = before, losses, whole(step.model), stored, found, export.export(
            resolved(*usual, f"{out}-merged", "--merge"), step.model, None)  # fmt: skip
    if not rank:
        torch.save(told, f"{os.environ['MODELS']}/told.pt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind, (model, *_) in KINDS.items():
        write_model(folder / kind, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELS", str(folder))
        spawn(2, [train_every_kind])
        yield folder, torch.load(folder / "told.pt", weights_only=False)


def of_peft(folder, kind, before):
    """peft's own model on one process, with these adapters, and its names of them."""
    _, modules, parameters, _ = KINDS[kind]
    how = dict(task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2", target_modules=modules or [])
    how |= dict(target_parameters=parameters, use_rslora=kind == "rslora")
    how |= dict(modules_to_save=MODULES if kind == "modules" else None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **how)).eval()
    own = {name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): p
           for name, p in model.named_parameters() if p.requires_grad}  # fmt: skip
    assert own.keys() == before.keys()
    for name, p in own.items():
        p.data.copy_(before[name])
    return model, own


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_the_adapters_that_peft_trains_on_one_process(kind, two_ranks):
    folder, told = two_ranks
    before, losses, after, stored, *_ = told[kind]
    model, own = of_peft(folder / kind, kind, before)
    optimizer, expected = torch.optim.AdamW(own.values(), 1e-2, (0.9, 0.95), weight_decay=0.0), []
    for k in range(3):
        tokens = TOKENS + k
        logits = model(input_ids=tokens).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens.roll(-1, 1).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=2e-6) and losses[2] != pytest.approx(losses[0], abs=1e-3)
    assert max((after[name] - p).abs().max().item() for name, p in own.items()) < 2e-5
    assert stored == {(torch.bfloat16, False, True), (torch.float32, True, True)}


@pytest.mark.long
def test_adapters_begin_as_peft_begins_them(two_ranks):
    before = two_ranks[1]["qwen2.5"][0]
    for name, p in before.items():
        bound = p.shape[1] ** -0.5  # of a uniform distribution, as nn.Linear's
        assert (not p.any()) if ".lora_B." in name else (0.8 * bound < p.abs().max() <= bound), name


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_opened_by_peft_and_a_merged_one_by_transformers_bit_equal(kind, two_ranks):
    folder, told = two_ranks
    _, _, after, _, ours, line = told[kind]
    base = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, folder / f"out-{kind}").eval()
    with torch.no_grad():
        theirs = opened(input_ids=TOKENS).logits
    assert torch.equal(theirs, ours) if kind in EXACT else (theirs - ours).abs().max() < 1e-5
    stored = {name: p for name, p in opened.named_parameters() if is_adapter(name)}
    assert all(torch.equal(p, after[name.removeprefix("base_model.model.")]) for name, p in stored.items())
    settings = json.loads((folder / f"out-{kind}/adapter_config.json").read_text())
    assert settings["r"] == 4 and settings["lora_alpha"] == 8 and settings["base_model_name_or_path"] == kind
    base = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.bfloat16)
    theirs = PeftModel.from_pretrained(base, folder / f"out-{kind}").merge_and_unload().eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / f"out-{kind}-merged")
    assert merged.dtype == torch.bfloat16 and "merged" in line
    for name, p in theirs.state_dict().items():
        far = (p.float() - merged.state_dict()[name].float()).abs().max()
        # Beside a parameter peft rounds what is added to bf16 before it adds it.
        assert far <= (0.0 if kind in EXACT else 0.01 * p.abs().max()), name
    assert not torch.equal(logits(folder / f"out-{kind}-merged"), logits(folder / kind))


@pytest.mark.long
def test_a_run_of_adapters_is_saved_resumed_bit_equal_evaluated_and_exported(tune, qwen, tmp_path, capfd):
    usual = *LORA, *"--lr 1e-2 --steps 8 --eval-every 4 --log-every 1 --remat block --remat-ratio 0.5".split()
    whole = fine(tune(*usual, "--save", "a", "--save-every", 4, "--export", "out"))
    assert "LoRA of rank 4 beside q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj: 3'712 p" in whole.out
    assert "28'448 are frozen in bfloat16" in whole.out and "0.149 MFLOP per token" in whole.out
    assert whole.steps[-1]["loss"] < whole.steps[0]["loss"] - 0.1 and whole.row["eval_loss"] > 0
    tensors = json.loads(Path("a/step-00000008/train_state.json").read_text())["tensors"]
    assert all(is_adapter(name) for name in tensors if name != "t") and len(tensors) == 1 + 3 * 28  # nothing is frozen
    os.makedirs("b")
    shutil.copytree("a/step-00000004", "b/step-00000004")
    again = fine(tune(*usual, "--save", "b", "--export", "again"))
    assert again.row["resumed_after"] == 4 and again.row["loaded_from"] == "slices"
    losses = [[s["loss"], s["grad_norm"]] for s in whole.steps if "grad_norm" in s]
    assert [[s["loss"], s["grad_norm"]] for s in again.steps if "grad_norm" in s] == losses[4:]
    names = "adapter_model.safetensors", "adapter_config.json"
    assert all(Path("out", name).read_bytes() == Path("again", name).read_bytes() for name in names)
    assert {"tokenizer.json", *names} <= {*os.listdir("out")} and "config.json" not in os.listdir("out")
    merged = fine(tune(*usual, "--save", "a", "--export", "merged", "--merge"))
    assert "already done" in merged.out
    # The same folder, but not what is there.
    refused(2, "--export merged: already exists", tune(*usual, "--save", "a", "--export", "merged"))
    for name, more in (("later", []), ("later-merged", ["--merge"])):
        fine(later(capfd, "a", name, "--model", qwen, *more))
    assert Path("later", names[0]).read_bytes() == Path("out", names[0]).read_bytes()
    assert Path("later-merged/model.safetensors").read_bytes() == Path("merged/model.safetensors").read_bytes()
    assert torch.equal(logits("merged"), logits("later-merged")) and not torch.equal(logits("merged"), logits(qwen))


@pytest.mark.long
def test_adapters_that_two_ranks_saved_are_trained_on_by_one(tune, qwen, tmp_path):
    usual = *LORA, "--lr", "1e-2", "--steps", 4, "--log-every", 1, "--save-every", 2, "--effective-batch", 4
    argv = "--model", qwen, "--data", qwen.parent / "chat.jsonl", "--compile", "none", "--batch", 2, "--seqlen", 48
    argv += "--warmup", 0, *usual, "--save", "two", "--results", "two.jsonl"
    job = Job(2, ["finetune.py", *argv], "log", cwd=tmp_path)
    assert job.wait() == [0, 0], Path(tmp_path, "log").read_text()
    shutil.copytree(tmp_path / "two/step-00000002", "one/step-00000002")
    one = fine(tune(*usual, "--save", "one"))
    assert one.row["resumed_after"] == 2, one.err
    _, steps = rows(str(tmp_path / "two.jsonl"))
    assert losses(one) == pytest.approx([s["loss"] for s in steps[2:]], abs=2e-6)


@pytest.mark.long
def test_what_a_run_of_adapters_began_with_is_kept(tune, qwen, tmp_path, capfd):
    usual = "--steps", 1, "--save", "a"
    fine(tune(*usual, *LORA))
    for more, said in ((["--lora", 8], "--lora 4 (now 8)"), ([], "--lora 4 (now None)")):
        refused(4, said, tune("--steps", 2, "--save", "a", *more))
    other = write_model(tmp_path / "other", rms_norm_eps=1e-6, initializer_range=0.03)
    edit_json(other / "config.json", initializer_range=0.02)
    refused(4, "frozen 26 tensors of 56896 bytes, CRC-32 ", tune("--steps", 2, "--save", "a", *LORA, model=other))
    refused(4, "a model with frozen 26 tensors", later(capfd, "a", "never", "--model", other, "--merge"))
    fine(tune("--steps", 1, "--save", "full"))
    words = "was saved by a run without --lora; leave out --merge"
    refused(4, words, later(capfd, "full", "never", "--model", qwen, "--merge"))
    assert not os.path.exists("never")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["deepseek", "experts"])
def test_a_run_of_a_mixture_is_resumed_bit_equal_exported_and_merged(kind, tune, tmp_path, capfd):
    model, _, _, more = KINDS[kind]
    folder = write_model(tmp_path / "model", model)
    usual = *LORA, *more, *"--lr 1e-2 --steps 4 --log-every 1 --remat block --remat-ratio 0.5".split()
    whole = fine(tune(*usual, "--save", "a", "--save-every", 2, "--export", "out", model=folder))
    said = {"deepseek": "have no adapters (add --lora-targets all-linear experts)", "experts": "experts.down_proj, "}
    assert said[kind] in whole.out and ("have no adapters" in whole.out) == (kind == "deepseek")
    os.makedirs("b")
    shutil.copytree("a/step-00000002", "b/step-00000002")
    again = fine(tune(*usual, "--save", "b", "--export", "again", model=folder))
    assert again.row["resumed_after"] == 2 and losses(again) == losses(whole)[2:]
    assert Path("out/adapter_model.safetensors").read_bytes() == Path("again/adapter_model.safetensors").read_bytes()
    fine(later(capfd, "a", "merged", "--model", folder, "--merge"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), "out").eval()
    with torch.no_grad():
        adapted, merged = model(input_ids=TOKENS).logits, logits("merged", dtype=torch.float32)
    before = (logits(folder, dtype=torch.float32) - adapted).abs().max()
    assert (merged - adapted).abs().max() < 0.2 * before  # but for the rounding to bf16


@pytest.mark.long
def test_tied_modules_are_trained_whole_resumed_bit_equal_and_opened_by_peft(tune, qwen, tmp_path, capfd):
    usual = *LORA, "--lora-modules-to-save", "lm_head", "embed_tokens", "--lr", "1e-2", "--steps", 4, "--eval-every", 2
    usual += "--log-every", 1
    whole = fine(tune(*usual, "--save", "a", "--save-every", 2, "--export", "out"))
    assert "embed_tokens, lm_head trained whole in fp32: 16'512 parameters are trained" in whole.out
    os.makedirs("b")
    shutil.copytree("a/step-00000002", "b/step-00000002")
    again = fine(tune(*usual, "--save", "b", "--export", "again"))
    assert again.row["resumed_after"] == 2 and losses(again)[-1] == losses(whole)[-1]
    assert Path("out/adapter_model.safetensors").read_bytes() == Path("again/adapter_model.safetensors").read_bytes()
    fine(later(capfd, "a", "merged", "--model", qwen, "--merge"))
    base = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, "out").eval()
    with torch.no_grad():
        adapted, merged = opened(input_ids=TOKENS).logits, logits("merged", dtype=torch.float32)
    before = (logits(qwen, dtype=torch.float32) - adapted).abs().max()
    assert (merged - adapted).abs().max() < 0.2 * before  # but for the rounding to bf16
    words = "--lora-modules-to-save lm_head: shares its weight with model.embed_tokens (tied); name model.embed_tokens"
    refused(2, words, tune("--steps", 1, *LORA, "--lora-modules-to-save", "lm_head"))
    words = "--lora-modules-to-save classifier: names no module with weights; use down_proj, embed_tokens, gate_proj, "
    refused(2, words, tune("--steps", 1, *LORA, "--lora-modules-to-save", "classifier"))


@pytest.mark.long
def test_training_goes_on_from_adapters_that_a_run_exported(tune, tmp_path):
    usual = "--lora", 4, "--lora-rslora", "--lora-modules-to-save", "norm", "--lr", "1e-2", "--eval-every", 9
    first = fine(tune(*usual, "--steps", 3, "--export", "out"))
    same = fine(tune("--adapter", "out", "--steps", 0, "--eval-every", 9))
    assert "out/adapter_model.safetensors: 33 tensors of float32; training starts from them" in same.out
    assert "trained with" not in same.out
    assert same.row["eval_loss"] == first.row["eval_loss"]
    assert same.row["flags"]["lora"] == 4 and same.row["flags"]["lora_alpha"] == 8
    # Resumed, the run has its own adapters.
    more = "--adapter", "out", "--steps", 4, "--log-every", 1, "--save-every", 2, "--save"
    whole = fine(tune(*more, "a"))
    os.makedirs("b")
    shutil.copytree("a/step-00000002", "b/step-00000002")
    assert losses(fine(tune(*more, "b"))) == losses(whole)[2:]
    words = "--lora 8: not with --adapter out, which has --lora 4; leave it out"
    refused(2, words, tune("--adapter", "out", "--lora", 8))
    refused(2, "--adapter out: not with --random: the adapters belong to", tune("--adapter", "out", "--random"))


@pytest.mark.long
def test_training_goes_on_from_adapters_that_peft_wrote(tune, qwen, tmp_path):
    torch.manual_seed(1)
    settings = LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", lora_dropout=0.1, use_rslora=True,
                          init_lora_weights=False, task_type="CAUSAL_LM", modules_to_save=["norm"])  # fmt: skip
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32), settings).eval()
    theirs.save_pretrained("theirs")
    edit_json(Path("theirs/adapter_config.json"), base_model_name_or_path="someone/other-1b")
    done = fine(tune("--adapter", "theirs", "--steps", 1, "--lr", "1e-30", "--export", "out"))
    assert "--adapter theirs: trained with lora_dropout 0.1; training goes on without dropout and " in done.out
    assert "the base model other-1b; these go on that of --model" in done.out
    base = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(input_ids=TOKENS).logits
        assert torch.equal(PeftModel.from_pretrained(base, "out").eval()(input_ids=TOKENS).logits, expected)
    edit_json(Path("theirs/adapter_config.json"), r=2)
    refused(3, "of another shape: model.layers.0.self_attn.q_proj.lora_A.default.weight", tune("--adapter", "theirs"))
    for name, value in dict(use_dora=True, bias="all", init_lora_weights="pissa_niter_4", target_modules=".*q_proj",
                            peft_type="IA3", rank_pattern=dict(q_proj=9)).items():  # fmt: skip
        before = Path("theirs/adapter_config.json").read_text()
        edit_json(Path("theirs/adapter_config.json"), **{name: value})
        refused(2, f"--adapter theirs: adapter_config.json has {name} {value}"[:70], tune("--adapter", "theirs"))
        Path("theirs/adapter_config.json").write_text(before)
    refused(2, "--adapter nowhere: adapter_config.json: No such file", tune("--adapter", "nowhere"))
    for text in "[1]", json.dumps(dict(r=float("inf"), peft_type="LORA", lora_alpha=1)):
        Path("theirs/adapter_config.json").write_text(text)
        refused(2, "--adapter theirs: adapter_config.json is not a file of peft", tune("--adapter", "theirs"))
    Path("theirs/adapter_config.json").unlink()
    os.mkfifo("theirs/adapter_config.json")
    refused(2, "--adapter theirs: adapter_config.json: is a pipe or device", tune("--adapter", "theirs"))


@pytest.mark.long
def test_what_cannot_be_adapted_is_named_and_what_can(tune, tmp_path):
    words = "--lora-targets experts: the model has no experts that are stacked in one tensor; leave it out"
    refused(2, words, tune("--steps", 1, *LORA, "--lora-targets", "experts"))
    mamba = saved("mamba2", tmp_path / "mamba")
    done = fine(tune("--steps", 1, *LORA, model=mamba))
    assert "LoRA of rank 4 beside in_proj:" in done.out
    words = "--lora-targets out_proj: a kernel of mamba2 reads the weight of out_proj directly and skips an adapter; "
    refused(2, f"{words}use in_proj", tune("--steps", 1, *LORA, "--lora-targets", "out_proj", model=mamba))


def test_what_peft_did_is_looked_at(tune, monkeypatch):
    monkeypatch.setattr(adapters, "_in_short", lambda *_: ["q_proj"])
    words = "--lora-targets: peft created no adapter for model.layers.0.mlp.down_proj, unlike asked; install "
    refused(2, words, tune("--steps", 1, *LORA))


def adapted_on_meta(folder, targets):
    """How many adapters there are, once peft has opened the same ones by what is exported; None: no such model."""
    try:
        model, other = (blank_model(str(folder)) for _ in range(2))
    except DataError:
        return None
    adapters.attach(model, str(folder), 4, 8.0, targets, random=True)
    made = adapters.saved(model, str(folder))
    told = json.loads(made.settings)
    names = "r", "lora_alpha", "target_modules", "target_parameters", "fan_in_fan_out", "bias", "task_type"
    inject_adapter_in_model(LoraConfig(**{name: told[name] for name in names}), other.model, low_cpu_mem_usage=True)
    shapes = {f"base_model.model.{name.replace('.default.', '.')}": p.shape
              for name, p in adapters_in(other.model.named_parameters()).items()}  # fmt: skip
    assert shapes == {name: t.shape for name, t in made.tensors.items()}
    return len(shapes)


@pytest.mark.slow
def test_every_causal_class_has_adapters_that_peft_opens_or_is_refused_in_one_sentence(tmp_path, capfd):
    told = {}
    for family in FAMILIES:
        with suppress(Exception):  # what a class says against sizes that do not fit together
            tiny(family).save_pretrained(tmp_path / family)
        for targets in (["all-linear"], ["all-linear", "experts"]):
            try:
                words = adapted_on_meta(tmp_path / family, targets)
            except (ValueError, CheckpointError) as error:
                words = str(error).replace(str(tmp_path), "")
            told[family, targets[-1]] = words
    with capfd.disabled():
        for (family, targets), words in told.items():
            print(f"{family:26} {targets:12} {str(words)[:100]}")
    attached = [each for each, words in told.items() if isinstance(words, int)]
    with capfd.disabled():
        print({targets: sum(each[1] == targets for each in attached) for targets in ("all-linear", "experts")})
    none = "the model has no experts that are stacked", "cannot be split into the tensors of the files"
    odd = {each: words for each, words in told.items()
           if isinstance(words, str) and not any(part in words for part in none)}  # fmt: skip
    assert not odd and len([each for each in attached if each[1] == "all-linear"]) > 0.85 * len(FAMILIES)


@pytest.mark.long
def test_layers_are_chosen_by_the_ends_of_their_names_and_the_head_is_none(tune):
    done = fine(tune("--steps", 1, *LORA, "--lora-targets", "q_proj", "layers.1.mlp.up_proj", "--export", "out"))
    assert "LoRA of rank 4 beside q_proj, up_proj: 832 parameters" in done.out, done.err
    named = json.loads(Path("out/adapter_config.json").read_text())["target_modules"]
    assert named == [f"model.layers.{end}" for end in ("0.self_attn.q_proj", "1.mlp.up_proj", "1.self_attn.q_proj")]
    for name in ("lm_head", "proj", "embed_tokens"):
        expected = f"--lora-targets {name}: matches no linear layer of the model apart from its head; use down_proj"
        refused(2, expected, tune("--steps", 1, *LORA, "--lora-targets", name))


def test_without_peft_adapters_are_refused_in_one_line(tune, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    refused(2, "error: --lora: needs peft; pip install -e '.[hf]'", tune("--steps", 1, *LORA))


@pytest.mark.long
def test_random_weights_are_frozen_too_and_drawn_again_by_a_resumed_run(tune, qwen, capfd):
    usual = "--random", *LORA, "--log-every", 1, "--save", "a", "--save-every", 2, "--steps"
    whole = fine(tune(*usual, 4))
    shutil.rmtree("a/step-00000004")
    again = fine(tune(*usual, 4))
    assert again.row["resumed_after"] == 2 and losses(again) == losses(whole)[2:]
    fine(later(capfd, "a", "out", "--model", qwen))
    words = "frozen weights were random and were not saved; leave out --merge"
    refused(4, words, later(capfd, "a", "never", "--model", qwen, "--merge"))


@pytest.mark.long
def test_gradients_of_frozen_weights_are_not_counted(qwen):
    model = blank_model(str(qwen), 0.5)
    for module in model.modules():
        vars(module).pop("forward", None)
    adapters.attach(model, str(qwen), 4, 8.0, ["all-linear"])
    D, K, F, V, T, r = 32, 16, 48, 400, 48, 4  # multiplications of a token
    first, rest = D * D + 2 * D * K, D * D + 3 * D * F  # q, k, v, of which nothing before is trained in block 0
    weights, beside = 2 * (first + rest) + V * D, 2 * r * (3 * D + D + 2 * K + 2 * D + 2 * (D + F) + F + D)
    expected = 4 * weights - 2 * first + 6 * beside - 2 * 3 * r * D
    assert flops.count(model, T).linear == expected
    assert flops.count(model, T).palm - expected == 2 * 3 * 4 * D * T  # attention: two products in two blocks, thrice


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3-moe", "mixtral"])
def test_the_planner_counts_the_parameters_that_are_trained_and_frozen(kind, tmp_path):
    folder = write_model(tmp_path / "m", kind)
    model, a = blank_model(str(folder)), read(str(folder))
    adapters.attach(model, str(folder), 4, 8.0, ["all-linear"])
    c = resolved(folder, "--lora", 4, world=1)
    sizes = {True: 0, False: 0}
    for p in model.parameters():
        sizes[p.requires_grad] += p.nbytes
    assert sizes[True] == 4 * trained(c, a) and a.stored == 2
    assert sizes[False] == 2 * a.parameters
