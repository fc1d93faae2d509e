"""finetune.py at its limits: what cannot be used is told in one line; compiled steps; models that are large.

    pytest tests/test_finetune_limits.py            # one rank here; no GPU, no network
    pytest -m slow tests/test_finetune_limits.py    # compiled, two ranks, a model of 100 MB

Loading, training and exporting: tests/test_finetune.py.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conversations import TEMPLATES, TURNS, jsonl
from forked import Job
from harness import spawn
from outcomes import fine, later, losses, refused
from running import module, read

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from tiny_hf import (
    KINDS,
    OTHERS,
    TEMPLATE,
    built,
    edit_json,
    logits,
    resolved,
    write_data,
    write_model,
)
from transformers import AutoModelForCausalLM

import finetune
from trainer import checks
from trainer.finetuning import config, load
from trainer.finetuning.model import HuggingFaceModel

pytestmark = pytest.mark.usefixtures("isolated")


# ------------------------------------------------------------------------------------------------- what cannot be used

AUDITED = """
import os, sys
asked = []
def hook(event, args):
    if event.startswith(("socket.connect", "socket.getaddrinfo", "socket.sendto")):
        asked.append((event, args[-1:]))
    elif event == "open" and str(args[0]).endswith((".py", ".pyc", ".so")) and "/folders/" in str(args[0]):
        asked.append((event, args[0]))
    elif event == "compile" and "/folders/" in str(args[1]):
        asked.append((event, args[1]))
sys.addaudithook(hook)
from trainer.finetuning.model import blank_model, tokenizer_of
for folder in sys.argv[1:]:
    model = blank_model(folder)
    tokenizer_of(folder)
    assert model.model.config._attn_implementation in ("sdpa", "eager"), folder
assert not asked, asked
"""


@pytest.mark.long
def test_a_start_with_any_familys_folder_asks_for_no_network_and_runs_nothing_of_it(tmp_path):
    folders = []
    for kind in KINDS | OTHERS:
        folders.append(write_model(tmp_path / "folders" / kind, kind))
        code, kernel = dict(AutoModelForCausalLM="code.Model", AutoConfig="code.Config"), "kernels-community/flash"
        how = dict(attn_implementation=kernel, experts_implementation=kernel)
        edit_json(folders[-1] / "config.json", auto_map=code, **how)
        for name in ("code.py", "torch.py", "sitecustomize.py"):
            (folders[-1] / name).write_text("raise SystemExit('run')")
    done = module(f"\n{AUDITED}", *map(str, folders))
    assert done.code == 0, done.err


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


def with_a_deep_index(folder):
    os.remove(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map":' * 10**5)


UP = "model.layers.1.mlp.up_proj.weight"
FOLDERS = [  # what is done to a good folder, the exit code, what the message names
    (lambda f: os.remove(f / "config.json"), 3, ["config.json", "No such file"]),
    (lambda f: os.rename(f / "config.json", f / "adapter_config.json"), 3,
     ["found adapters", "export it again with --merge"]),
    (lambda f: (f / "config.json").write_text("{"), 3, ["config.json", "is damaged"]),
    (lambda f: (f / "config.json").write_text('{"a":' * 10**5), 3, ["config.json", "is damaged"]),
    (lambda f: os.mkfifo(f / "merges.txt"), 3, ["merges.txt: is a pipe or device"]),
    (with_a_deep_index, 3, ["config.json or the index of its weights is damaged"]),
    (lambda f: edit_json(f / "config.json", vocab_size=10**15), 6, ["OOM init", "use a smaller model, or start more"]),
    (lambda f: edit_json(f / "config.json", num_hidden_layers=10**6, layer_types=None), 3, ["found: num_hidden"]),
    (lambda f: edit_json(f / "config.json", model_type="nonsense"), 3, ["config.json", "nonsense"]),
    (lambda f: os.remove(f / "model.safetensors"), 3, ["model.safetensors or pytorch_model.bin", "--random"]),
    (lambda f: os.truncate(f / "model.safetensors", 999), 3, ["model.safetensors", "is damaged"]),
    (without_a_shard, 3, ["index.json: names 1 missing file: model-00002-of"]),
    (lambda f: os.remove(f / "tokenizer.json"), 3, ["expected a tokenizer"]),
    (retensor(lambda s: s.pop(UP)), 3, ["1 tensor missing", UP]),
    (retensor(lambda s: s.update(extra=torch.zeros(2))), 3, ["1 tensor unexpected: extra"]),
    (retensor(lambda s: s.update({UP: s[UP][:, :3].contiguous()})), 3, [f"{UP} [48, 3] (the model: [48, 32])"]),
    (retensor(lambda s: s[UP].fill_(float("nan"))), 3, [f"{UP} has values that are not finite"]),
    (retensor(lambda s: s.update({"lm_head.weight": s[UP].new_zeros(400, 32)})), 3, ["differ, but are one parameter"]),
    (lambda f: edit_json(f / "config.json", tie_word_embeddings=False), 3, ["1 tensor missing: lm_head.weight"]),
    (lambda f: edit_json(f / "config.json", vocab_size=200), 3, ["200"]),
    (lambda f: edit_json(f / "config.json", max_position_embeddings=16), 2, ["--seqlen 48: the model has only 16",
     "use --seqlen 16 or less"]),
    (lambda f: edit_json(f / "config.json", quantization_config=dict(quant_method="bitsandbytes", load_in_4bit=True)),
     3, ["weights that are not quantised, found bitsandbytes in 4 bit; name the folder"]),
    (lambda f: edit_json(f / "config.json", text_config=dict(quantization_config=dict(quant_method="fp8"))), 3,
     ["weights that are not quantised, found fp8; name the folder"]),
    (lambda f: edit_json(f / "config.json", model_type="gemma3"), 3, ["a multimodal one, gemma3; use another model"]),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("spoil", "code", "names"), FOLDERS)
def test_a_folder_that_cannot_be_used_is_told_in_one_line(spoil, code, names, tune, qwen, tmp_path):
    folder = shutil.copytree(qwen, tmp_path / "copy")
    spoil(folder)
    done = tune("--steps", 1, model=folder)
    for name in names:
        refused(code, name, done)


@pytest.mark.long
def test_pickles_are_read_without_running_code(tune, qwen, tmp_path):
    folder = shutil.copytree(qwen, tmp_path / "copy")
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    os.remove(folder / "model.safetensors")
    torch.save(state, folder / "pytorch_model.bin")
    good = fine(tune("--steps", 1, "--log-every", 1, model=folder))
    assert good.steps[0]["loss"] == tune("--steps", 1, "--log-every", 1).steps[0]["loss"]

    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "planted"),)

    torch.save(state | dict(more=Planted()), folder / "pytorch_model.bin")
    refused(3, "of which nothing was run", tune("--steps", 1, model=folder))
    assert not (tmp_path / "planted").exists()


LINES = [
    ("--model nowhere", "--model nowhere: is not a folder"), ("--export .", "--export .: already exists"),
    ("--effective-batch 6", "--effective-batch 6: must be 1 rank x --batch 4 x a whole number"),
    ("--effective-batch 8 --grad-accum 3", "must be 1 rank x --batch 4 x a whole number (--grad-accum 3)"),
    ("--eval-data x.jsonl", "--eval-data x.jsonl: needs --eval-every"),
    ("--depth 3", "Unrecognized options: --depth, 3"),
    ("--eval-every 1 --eval-data x.jsonl:0.7", "--eval-data x.jsonl:0.7: takes no weight; name a file, folder or pat"),
    ("--world 4 --export out", "--export out: not with --world 4: simulated ranks train no usable model"),
    ("--world 4 --prepared out", "--prepared out: not with --world 4: caches weights that real ranks read"),
    ("--random --prepared out", "--prepared out: not with --random: caches weights that real ranks read"),
    ("--template-args [1]", "--template-args [1]: must be a JSON object"),
    ("--columns answer=output", "--columns answer=output: must be NAME=COLUMN, where NAME is one of"),
    ("--model=", "--model: needs the folder of a model"), ("--data", "--data: needs files of examples;"),
    ("--label-smoothing 1", "--label-smoothing 1.0: must be 0 or more and below 1"),
    ("--lora -1", "--lora -1: must be 0 or more"),
    ("--lora-alpha 8", "--lora 0: not with --lora-alpha 8.0: needs adapters"),
    ("--lora-targets q_proj", "--lora 0: not with --lora-targets q_proj: needs adapters; add --lora RANK"),
    ("--merge --export out", "--lora 0: not with --merge: needs adapters"),
    ("--lora 4 --merge", "--merge: needs --export"),
    ("--lora 4 --lora-targets", "--lora-targets: needs a name, such as q_proj; --help lists all flags"),
    ("--lora-modules-to-save norm", "--lora 0: not with --lora-modules-to-save norm: needs adapters; add --lora"),
    ("--adapter nowhere", "--adapter nowhere: adapter_config.json: No such file or directory; name a folder that"),
    ("--long-text split", "invalid choice 'split' for argument '--long-text'"),
    ("--lora-rslora", "--lora 0: not with --lora-rslora: needs adapters; add --lora RANK"),
    ("--warmup-ratio 0.1", "--warmup 0: not with --warmup-ratio 0.1: both set"),
    ("--remat both", "invalid choice 'both' for argument '--remat'"),
    ("--attn math", "Unrecognized options: --attn, math"),
    ("--remat-ratio 0.5", "--remat-ratio 0.5: needs --remat"),
    ("--wrapper ddp", "Unrecognized options: --wrapper, ddp"),
    ("--remat block --remat-core", "Unrecognized options: --remat-core"), ("--templte c", "meant: --template"),
    ("--prepared ~/a", "--prepared ~/a: must be a path; write $HOME"), ("--export=", "--export : must be a path"),
    ("--eval-data ~/a", "--eval-data ~/a: must be a path; write $HOME"),
    ("--lora 4 --lora-alpha 0", "--lora-alpha 0.0: must be a positive number"),
    ("--lora 4 --optimizer muon", "--lora 4: Muon is not for adapters"),
    ("--lora 4 --prepared ready", "--prepared ready: not with --lora 4: caches weights that real ranks read"),
    ("--pad pack --cuda-graph", "replays sequences of one length; use --pad fixed"),
    ("--epochs 0", "--epochs 0.0: must be a positive number"), ("--pad packed", "'packed' for argument '--pad'"),
    ("--data nowhere.jsonl", "nowhere.jsonl"),
    ("--remat block --remat-ratio 2", "--remat-ratio 2.0: must be between 0 and 1"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), LINES)
def test_bad_flags_are_told_in_one_message(argv, message, tune):
    refused(3 if "nowhere.jsonl" in argv else 2, message, tune(*argv.split()))


@pytest.mark.long
def test_epochs_and_effective_batch_decide_steps_and_accumulation(tune):
    done = fine(tune("--batch", 2, "--effective-batch", 16, "--epochs", 0.5))
    assert done.row["grad_accum"] == 8 and done.row["flags"]["steps"] == 2  # 64 examples
    assert "each step uses all" not in done.out
    few = fine(tune("--effective-batch", 96))
    assert "each step uses all 64 rows of --data 1.5 times" in few.out


@pytest.mark.long
def test_a_batch_that_the_machine_has_no_memory_for_is_refused_with_one_that_fits(tune, monkeypatch):
    most = 2**31 - 1
    done = tune("--batch", most)
    refused(2, "--batch 2147483647: a step would take about ", done)
    batch, accum = map(int, re.search(r"--batch (\d+) --grad-accum (\d+) would fit", done.err).groups())
    assert 0 <= batch * accum - most < batch
    monkeypatch.setattr(checks, "available", lambda: 1 << 20)  # bytes
    for more in ([], ["--lora", 2]):
        wide = "--steps", 1, "--batch", 64, *more
        refused(2, "--batch 64: a step would take", tune(*wide))
        fine(tune(*wide, "--force"))
    monkeypatch.setattr(checks, "available", lambda: 1 << 16)
    fine(tune("--steps", 1))  # not even one would fit: the estimate says nothing


MARKED = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
          "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}"
          "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
THINKING = TEMPLATE.replace("assistant\n'", "assistant\n<think>\n'")  # which the answers do not begin with


@pytest.mark.long
def test_a_template_that_is_refused_is_replaced_by_one_that_writes_the_same(tune, qwen, tmp_path):
    (tmp_path / "own.jinja").write_text(MARKED)
    same = [tune("--steps", 2, "--log-every", 1, *more) for more in ([], ["--template", tmp_path / "own.jinja"])]
    assert same[0].steps[1]["loss"] == same[1].steps[1]["loss"] and "--template" not in same[1].out
    folder = shutil.copytree(qwen, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(THINKING)
    for words in ("opens <think>", "and name it by --template"):
        refused(3, words, tune("--steps", 1, model=folder))
    argv = "--steps", 2, "--log-every", 1, "--template", tmp_path / "own.jinja", "--export", "out"
    done = fine(tune(*argv, model=folder))
    assert losses(done) == losses(same[0]), done.err
    (note,) = [line for line in done.out.splitlines() if line.startswith("--template ")]
    assert re.search("writes '.*assistant.n<.im_start.*' where the model's own template writes '.*<think>", note)
    assert Path("out/chat_template.jinja").read_text() == THINKING
    argv = "--model", folder, "--data", qwen.parent / "chat.jsonl", "--template", tmp_path / "own.jinja", "--seqlen", 48
    finetune.show(config.parse(list(map(str, argv))), 1)  # --preview


def test_a_template_that_cannot_be_read_is_told_in_one_line(tune, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for file in ("nowhere.jinja", tmp_path / "bytes", tmp_path):
        refused(2, f"error: --template {file}: ", tune("--steps", 1, "--template", file))


def test_a_run_shows_its_first_example_and_what_the_data_holds_before_the_first_step(tune, tmp_path):
    turns = [dict(role="user", content="why? " * 90), dict(role="assistant", content="So.")]
    lines = [dict(messages=turns), dict(messages=[]), dict(text=""), dict(text=3)]
    jsonl(tmp_path / "few.jsonl", lines)
    argv = "--steps", 1, "--seqlen", 512, "--bad-lines", "skip", "--log-every", 1, "--data", tmp_path / "few.jsonl"
    done = fine(tune(*argv, "--batch", 1))
    before, _, _ = done.out.partition("step 1/1 ")
    reasons = "(expected messages, a list of {role, content}: 1; expected text to train on: 2; the first: "
    assert reasons in " ".join(before.split())
    shown = before.partition("the first example, with [[what is learned]]:\n")[2]
    assert shown.count("why?") in range(25, 35) and " .. " in shown and "assistant\n[[So.<|im_end|>]]" in shown


@pytest.mark.long
def test_a_model_is_looked_at_once_and_by_no_compiled_code(tune, monkeypatch):
    looks, compiled = [], []
    probe, compile = HuggingFaceModel.probe, torch.compile
    monkeypatch.setattr(HuggingFaceModel, "probe", lambda model, device: (looks.append(1), probe(model, device)))
    eager = lambda graph, _: compiled.append(graph) or graph.forward  # noqa: E731
    call = lambda module, **_: setattr(module, "_compiled_call_impl", compile(module._call_impl, backend=eager))  # noqa: E731
    monkeypatch.setattr(torch.nn.Module, "compile", call)
    fine(tune("--compile", "blocks", "--steps", 2))
    assert len(looks) == 1 and len(compiled) == 1


@pytest.mark.slow
def test_rows_of_any_length_are_one_graph(tune, tmp_path, monkeypatch):
    lines = [dict(prompt="What?", completion="a b c d " * (i + 1)) for i in range(8)]
    data = jsonl(tmp_path / "text.jsonl", lines)
    compiled, compile = [], torch.compile
    eager = lambda graph, _: compiled.append(graph) or graph.forward  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, fullgraph=True, backend=eager))
    argv = "--pad", "longest", "--batch", 1, "--steps", 8, "--log-every", 1
    done = fine(tune("--compile", "fwdbwd", *argv, data=data))
    eager = tune(*argv, data=data)
    assert len(compiled) == 1
    assert losses(done) == pytest.approx(losses(eager), abs=5e-6)


# -------------------------------------------------------------------------------------------------- compiled, and large


# 100 MB in bf16.
LARGE = dict(vocab=16000, hidden_size=768, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=12)


@pytest.mark.slow
@pytest.mark.parametrize("argv", [
    "--compile fwdbwd --pad pack --remat block --remat-ratio 0.5", "--compile blocks --loss chunked",
    "--compile fwdbwd --lora 4 --remat block --remat-ratio 0.5 --loss chunked",
    "--compile fwdbwd --lora 4 --accum-sync last --grad-accum 2", "--compile blocks --label-smoothing 0.1",
    "--compile fwdbwd --label-smoothing 0.1 --pad pack", "--compile step --label-smoothing 0.1",
])  # fmt: skip
def test_compiled_steps_have_the_losses_of_eager_ones(argv, tune):
    rest = argv.split()[2:]
    compiled, eager = (fine(tune("--steps", 3, "--log-every", 1, *more)) for more in (argv.split(), rest))
    assert losses(compiled) == pytest.approx(losses(eager), abs=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lr", "more"), [
    ("qwen3-moe", "3e-3", {}), ("gemma3", "3e-3", dict(sliding_window=8)),
])  # fmt: skip
def test_two_ranks_train_packed_resume_bit_equal_and_export(kind, lr, more, tmp_path, capfd):
    folder = write_model(tmp_path / "m", kind, **more)
    usual = ["finetune.py", "--model", folder, "--data", write_data(tmp_path / "chat.jsonl"), "--compile", "none"]
    usual += ["--pad", "pack", "--seqlen", 96, "--batch", 2, "--lr", lr, "--warmup", 0, "--steps", 6]
    usual += ["--remat", "block", "--remat-ratio", "0.5", "--log-every", 1, "--save-every", 3]

    def run(name):
        job = Job(2, [*usual, "--results", tmp_path / f"{name}.jsonl", "--save", tmp_path / name, "--export",
                      tmp_path / f"out-{name}"], tmp_path / f"{name}.log", cwd=tmp_path,
                  XDG_CACHE_HOME=str(tmp_path / "cache"))  # fmt: skip
        assert job.wait(300) == [0, 0], (tmp_path / f"{name}.log").read_text()
        return read(tmp_path / f"{name}.jsonl")[1]

    steps = run("a")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    shutil.copytree(tmp_path / "a/step-00000003", tmp_path / "b/step-00000003")
    again = run("b")
    assert [[s["loss"], s["grad_norm"]] for s in again] == [[s["loss"], s["grad_norm"]] for s in steps[3:]]
    files = [(tmp_path / f"out-{name}/model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1] != (folder / "model.safetensors").read_bytes()
    fine(later(capfd, tmp_path / "a", tmp_path / "later", "--model", folder))
    assert torch.equal(logits(tmp_path / "later"), logits(tmp_path / "out-a"))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("large") / "m", **LARGE)


def status_mib(entry):
    return int(re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def resident_while_loading(mesh):
    """MiB: by how much loading raised the peak of resident memory, this rank's shards, the largest slice in fp32."""
    c = resolved(os.environ["LARGE"], "--lora", os.environ["LORA"])
    step = built(c)
    inner = step.model.model
    load.renamed("", load.weights.table(load.weights_in(c.model)), inner)  # imports what it needs
    shards = [p.to_local().nbytes / 2**20 for p in inner.parameters()]
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    load.load_weights(c, step.model, None)
    return status_mib("VmHWM") - before, sum(shards), max(shards)


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux: /proc/self/clear_refs")
@pytest.mark.parametrize("rank", [0, 8])
def test_loading_holds_this_ranks_shards_and_one_slice(rank, large, monkeypatch):
    """Frozen ones in bf16, as they are in the files."""
    monkeypatch.setenv("LARGE", str(large))
    monkeypatch.setenv("LORA", str(rank))
    for grown, shards, largest in spawn(2, [resident_while_loading])["resident_while_loading"]:
        # A slice in the map of its file, its copy, what was read through that map before. Adapters are there before.
        most = shards + 2 * largest + load.weights.MAPPED / 2**20
        assert shards * 0.98 < grown < most, (grown, shards, largest)
        assert (shards < 60) == (rank > 0), shards


def test_a_preview_says_what_the_run_would_and_shows_each_form(tune, qwen, tmp_path, capfd):
    turns = [dict(role="user", content="why? " * 90), dict(role="assistant", content="So. " * 40)]
    lines = [dict(messages=turns), dict(messages=[]), dict(text="one two"), dict(text=""),
             dict(conversations=[{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]),
             dict(prompt="What is 1 plus 2? " * 9, completion=" b"), dict(text="three")]  # fmt: skip
    jsonl(tmp_path / "few.jsonl", lines)
    argv = "--seqlen", 100, "--bad-lines", "skip", "--data", tmp_path / "few.jsonl", "--batch", 1
    done = fine(tune(*argv, "--steps", 1))
    finetune.show(config.parse(list(map(str, ("--model", qwen, *argv)))), 1)
    shown = capfd.readouterr().out
    head = shown.partition("\n\n")[0]
    assert all(len(each) <= 100 or len(each.split()) == 1 for each in shown.splitlines())
    assert f"\n{head}\n" in done.out, "as a run prints it"
    assert "1 cut to 101 tokens," in " ".join(head.split()) and "2 lines left out as bad (" in head
    assert re.search(r"\n     \d+ tokens are cut off", head)
    forms = "1 example of ShareGPT's", "1 example of prompt and completion", "2 examples of text"
    assert all(f"\n{form}, the first with [[what is learned]]:\n" in shown for form in forms), shown
    assert "[[one two<|im_end|>]]" in shown and "[[y<|im_end|>]]" in shown


def test_a_preview_of_packed_rows_counts_what_examples_share(tune, qwen, tmp_path, capfd):
    (tmp_path / "qwen3.jinja").write_text(TEMPLATES["qwen3"])
    jsonl(tmp_path / "few.jsonl", [dict(messages=TURNS)] * 9)
    argv = "--pad", "pack", "--template", tmp_path / "qwen3.jinja", "--data", tmp_path / "few.jsonl", "--seqlen", 256
    done = fine(tune(*argv, "--steps", 1))
    finetune.show(config.parse(list(map(str, ("--model", qwen, *argv)))), 1)
    shown = capfd.readouterr().out
    facts = shown[shown.index("\ndata") + 1 : shown.index("\n\n")]
    assert "tokens are shared by several examples" in facts and f"\n{facts}\n" in done.out
