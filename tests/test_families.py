"""Every causal class of the installed transformers trains as the plain model does, or is refused in one sentence.

    pytest -s -m slow tests/test_families.py    # a minute on two ranks; prints the table
    pytest tests/test_families.py               # what is refused, one rank

Gradients on two ranks are those of from_pretrained() on one process, in fp32; what is exported has the
files' bits. Configurations: tests/families.py.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from outcomes import fine, refused
from running import one_line, rows_of

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from families import FAMILIES, tiny
from safetensors.torch import load_file
from tiny_hf import TOKENS, built, resolved, write_tokenizer
from transformers import AutoModelForCausalLM

from trainer.checkpoint.manifest import CheckpointError
from trainer.data import DataError
from trainer.finetuning import export, load
from trainer.finetuning.model import HuggingFaceModel
from trainer.terminal.text import one_line as in_one_line

pytestmark = pytest.mark.usefixtures("isolated")
CPU = torch.device("cpu")
TARGETS = TOKENS.roll(-1, 1)
LARGEST = 8_000_000  # parameters
RIGHT, REFUSED, NONE = "trained right", "refused", "no tiny model"


def write(family: str, folder: Path) -> None:
    """A tiny model whose weights are no constants; raises if it does not run in transformers itself."""
    made = tiny(family)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(made).parameters())
    if size > LARGEST:
        raise ValueError(f"has {size} parameters")
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(input_ids=TOKENS, use_cache=False)


def train(folder: Path, out: Path) -> tuple[float, dict, str]:
    """The loss and the gradients of a model on two ranks, and why it is not exported."""
    c = resolved(folder, "--seqlen", 12)
    step = built(c)
    load.load_weights(c, step.model, None)
    step.model.probe(CPU)
    loss = step.model(TOKENS, TARGETS)
    loss.backward()
    grads = {n: p.grad.full_tensor() for n, p in step.model.model.named_parameters() if p.grad is not None}
    try:
        step.model.check_packed(CPU)
        packed = "packed"
    except DataError:
        packed = "not packed"
    try:
        export.export(resolved(folder, "--export", out), step.model, None)
    except CheckpointError as error:
        packed += f", not exported: {error}"
    assert step(TOKENS, TARGETS).isfinite() and not step.skipped
    return loss.item(), grads, packed


def differs(folder: Path, out: Path, loss: float, grads: dict) -> str:
    """What is not as the plain model has it."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = plain(input_ids=TOKENS, use_cache=False, return_dict=True).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")
    expected.backward()
    own = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None and p.grad.any()}
    if abs(loss - expected.item()) > 1e-3:
        return f"loss {loss}, not {expected.item()}"
    for name in sorted(own.keys() | grads.keys()):
        one = own.get(name, torch.zeros(()))
        if (grads.get(name, torch.zeros(())) - one).abs().max() > 1e-3 * one.abs().max():
            return f"gradient of {name}"
    if out.exists():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (out, folder))
        if any(not torch.equal(t, ours[name]) for name, t in theirs.items()):
            return "the exported tensors"
    return ""


def saved(family: str, folder: Path, **how) -> Path:
    """A tiny model with a tokenizer, as a folder."""
    made = tiny(family)
    vars(made).update(how)
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def scan(mesh) -> dict[str, tuple[str, str]]:
    told, root = {}, Path(os.environ["MODELS"])
    for family in FAMILIES:
        folder, out, why = root / family, root / f"out-{family}", [None]
        if not dist.get_rank():
            try:
                write(family, folder)
            except Exception as error:  # whatever a class says against sizes that do not fit together
                why = [in_one_line(error, 120)]
        dist.broadcast_object_list(why)
        if why[0] is not None:
            told[family] = NONE, why[0]
            continue
        try:
            loss, grads, words = train(folder, out)
        except (DataError, ValueError) as error:
            told[family] = REFUSED, str(error).replace(f"{root}/", "")
        except Exception as error:
            told[family] = "crashed", in_one_line(error, 300)
        else:
            wrong = "" if dist.get_rank() else differs(folder, out, loss, grads)
            told[family] = (f"wrong: {wrong}" if wrong else RIGHT), words
        dist.barrier()
        if not dist.get_rank():
            shutil.rmtree(folder)
            shutil.rmtree(out, ignore_errors=True)
    return told


@pytest.mark.slow
def test_every_causal_class_is_trained_right_or_refused_in_one_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MODELS", str(tmp_path))
    first, second = spawn(2, [scan], timeout=900)["scan"]
    with capfd.disabled():
        print()
        for family, (outcome, words) in first.items():
            print(f"{family:26} {outcome:14} {words[:150]}")
    outcomes = [outcome for outcome, _ in first.values()]
    print(f"{outcomes.count(RIGHT)} of {len(FAMILIES)} trained right, {outcomes.count(REFUSED)} refused")
    assert [each for each in first.items() if each[1][0] not in (RIGHT, REFUSED, NONE)] == []
    assert first.keys() == {*FAMILIES} and first == second
    assert all("\n" not in words and len(words) < 600 for _, words in first.values())
    assert outcomes.count(RIGHT) >= 0.8 * len(FAMILIES) and outcomes.count(NONE) <= 0.12 * len(FAMILIES)


@pytest.mark.slow
def test_every_class_that_is_given_shared_beginnings_computes_what_it_does_with_separate_rows():
    until, positions = torch.tensor([[8, 8, 4, 4, 8, 8, 8, 8]]), torch.tensor([[0, 1, 2, 3, 2, 3, 4, 5]])
    tokens, differ = TOKENS[:1, :8], {}
    for family in FAMILIES:
        torch.manual_seed(0)
        with suppress(Exception):  # what the test above is about
            inner = AutoModelForCausalLM.from_config(tiny(family), dtype=torch.float32)
            for p in inner.parameters():
                p.data += 0.05 * torch.randn_like(p)
            model = HuggingFaceModel(inner)
            model.check_packed(CPU)
            if model.can_share_prefix:
                differ[family] = torch.inf
                with torch.no_grad():
                    logits = model(tokens, position_ids=positions, until=until)
                    branch, rest = model(tokens[:, :4]), model(tokens[:, [0, 1, 4, 5, 6, 7]])[:, 2:]
                largest = (logits - torch.cat((branch, rest), 1)).abs().max()
                differ[family] = (largest / logits.abs().max()).item()
    assert len(differ) > 50 and max(differ.values()) < 1e-5, differ


@pytest.mark.long
@pytest.mark.parametrize(("family", "how", "said"), [
    ("bert", dict(is_decoder=False),
     "its tokens attend to later ones, which they should predict; use a causal model (some "),
    ("reformer", dict(vocab_size=400), "ReformerModelWithLMHead: its code does not run here; use another model ("),
    ("rwkv", {}, "RwkvForCausalLM: its code does not work with sharded parameters; use another model ("),
])  # fmt: skip
def test_a_class_that_cannot_be_trained_is_refused_in_one_line(family, how, said, tune, tmp_path):
    refused(3, said, tune("--steps", 1, "--seqlen", 64, model=saved(family, tmp_path / "model", **how)))


@pytest.mark.long
def test_a_model_whose_files_join_tensors_is_not_exported(tune, tmp_path):
    folder = saved("hrm_text", tmp_path / "model")
    refused(4, "gqkv_proj.weight cannot be split into the tensors of the files",
        tune("--steps", 1, "--export", "out", model=folder))


@pytest.mark.long
@pytest.mark.parametrize("family", ["rembert", "gemma2"])  # a head of another width than hidden states; a cap
def test_where_logits_are_more_than_the_product_of_the_head_the_loss_is_full(family, tune, tmp_path):
    folder = saved(family, tmp_path / "model")
    done = fine(tune("--steps", 2, "--eval-every", 1, "--results", tmp_path / "r.jsonl", model=folder))
    assert "--loss full: the loss of" in done.out and rows_of(tmp_path / "r.jsonl")[-1]["loss_kind"] == "full"
    refused(2, "use --loss full", tune("--steps", 1, "--loss", "chunked", model=folder))


@pytest.mark.long
def test_parameters_without_a_gradient_are_named_and_stay_as_they_are(tune, tmp_path):
    folder, name = saved("bart", tmp_path / "model"), "model.decoder.layers.{}.encoder_attn.k_proj.weight"
    for out, more in ((tmp_path / "all", []), (tmp_path / "adapters", ["--lora", 2])):
        done = fine(tune("--steps", 2, "--weight-decay", 0.5, "--export", out, *more, model=folder))
        (line,) = [each for each in done.out.splitlines() if "get no gradient" in each]
        assert "without weight decay: model." + name.format("*").rpartition(".")[0] in line
        if not more:
            before, after = (load_file(each / "model.safetensors") for each in (folder, out))
            same = {each for each, t in before.items() if torch.equal(t, after[each])}
            assert name.format(0) in same and all(".encoder_attn" in each for each in same)
            assert f"{len(same)} parameters get no gradient" in line
    assert "get no gradient" not in tune("--steps", 1).out


@pytest.mark.long
def test_rows_that_are_too_short_for_a_part_of_the_model_are_refused_before_the_first_step(tune, tmp_path):
    made, folder = tiny("deepseek_v4"), tmp_path / "model"  # one of its compressors begins at 128 tokens
    made.max_position_embeddings = 1024
    made.save_pretrained(folder)
    write_tokenizer(folder)
    how = dict(model=folder)
    done = tune("--random", "--steps", 1, "--pad", "longest", "--seqlen", 1016, **how)
    assert done.code == 2
    assert re.search(r"--pad longest: may have rows of 127 tokens, in which \d+ parameters get no gradient \(.*\."
                     r"compressor\.position_bias, .*\); use --pad fixed", one_line(done.err))  # fmt: skip
    for pad, seqlen in (("longest", 1024), ("fixed", 128)):
        fine(tune("--random", "--steps", 1, "--batch", 1, "--pad", pad, "--seqlen", seqlen, **how))


@pytest.mark.long
def test_models_that_compute_a_part_in_fp32_train_in_bf16(tune, tmp_path, monkeypatch):
    seen, probe = {}, HuggingFaceModel.probe

    def watched(self, device):
        for name, module in self.model.named_modules():
            if name.endswith(("mlp.gate", "q_proj")):
                last = name.rpartition(".")[2]
                module.register_forward_pre_hook(lambda m, _, last=last: seen.update({last: m.weight.dtype}))
        probe(self, device)

    monkeypatch.setattr(HuggingFaceModel, "probe", watched)
    for family in ("mamba", "ernie4_5_moe"):
        done = fine(tune("--steps", 1, "--param-dtype", "bf16", model=saved(family, tmp_path / family)))
        assert "transformers keeps" not in done.out, done.err
    assert seen == dict(gate=torch.float32, q_proj=torch.bfloat16)
    argv = "--steps", 1, "--param-dtype", "bf16", "--batch", 2, "--grad-accum", 2, "--accum-sync", "last"
    last = fine(tune(*argv, model=tmp_path / "ernie4_5_moe"))
    assert "keeps in fp32, are gathered in bf16, such as model.model.layers.1.mlp.gate.weight; use" in last.out
    assert "transformers keeps" not in tune("--steps", 1, model=tmp_path / "ernie4_5_moe").out
