"""Fixtures of several files."""

import ast
import gc
import json
import os
import shutil
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conversations import SPECIAL, TEMPLATES, TURNS, chats
from planted import planting
from running import ROOT, TINY, TORCHRUN, read, resolved
from torch._inductor import config as inductor
from torch.nn.attention import flex_attention as flex
from torch.testing._internal.distributed.fake_pg import FakeStore

import main
import model
from gloo import one_worker_thread
from trainer import config as flags
from trainer.checkpoint import export
from trainer.distributed.launch import connect
from trainer.finetuning.chat import ChatBatches

one_worker_thread()

# In CPython 3.11 two threads that parse at once, as inspect and printing a traceback do, may end in a SystemError.
_parsing = threading.RLock()
_parse = ast.parse


def parse_alone(*args, **kwargs) -> ast.AST:
    with _parsing:
        return _parse(*args, **kwargs)


ast.parse = parse_alone

# Or torch would compile a probe for each kind of vector instructions in each cache directory, and load it in a process
# of its own for each process that compiles. The variable is for processes that import torch later.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"], inductor.cpp.vec_isa_ok = "1", True

# Programs of the checkout are not installed: those that a test starts find them here.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

# The files whose tests take longest, in that order; what is not here takes a few seconds.
LONGEST = """
peak simple_fsdp_ranks overlap equivalence gpu_code plan sweep muon graph other_models hosts generated
travel faults finetune config lora slurm speed_mem_mlp
main finetune_limits muon_trainer simple_fsdp remat inputs checkpoint timeline nonfinite manifest
compile_cache baselines habits evaluation data simple_fsdp_cost contract torchrun killed going_on rungs
checkpoint_ranks simulated_world control structures export sinks settings
""".split()


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest files first: two workers, who take a file at a time, end together then.
    TEST_SHARE=I/N in the environment: runs every Nth file of these, from the Ith on."""
    place = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(place)), item.path.name))
    # It is taken out of the environment: both conftest.py have this hook, and a share of the share would be run by the
    # second call, or by a pytest that a test starts.
    if share := os.environ.pop("TEST_SHARE", None):
        which, shares = map(int, share.split("/"))
        files = list(dict.fromkeys(item.path for item in items))
        chosen = set(files[which % shares :: shares])
        config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
        items[:] = [item for item in items if item.path in chosen]


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it again, which is a part of each compilation. Nor
    often (Python: every 700 allocations) at a compiler's graphs, which are in use."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture
def mesh_of():
    """make(world, replicas=1) -> a mesh of ranks that are not there: collectives return at once and move nothing."""

    def make(world, replicas=1):
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        if replicas > 1:
            return dist.init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        return dist.init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))

    yield make
    torch._dynamo.reset()
    if dist.is_initialized():  # not if the test was skipped
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_signal_handler_is_left():
    """One that a test leaves would meet the tests after it, in an order that differs from run to run."""
    before = {kind: signal.getsignal(kind) for kind in signal.Signals}
    yield
    left = {kind.name: now for kind, was in before.items() if (now := signal.getsignal(kind)) != was}
    for kind, was in before.items():
        if was is not None and was != signal.getsignal(kind):
            signal.signal(kind, was)
    assert not left, f"the test left signal handlers: {left}"


@pytest.fixture(scope="module")
def one_thread():
    """Small shapes, and sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def isolated(monkeypatch, tmp_path):
    """No environment of torchrun, W&B or a terminal; no process group, compiled code or file left behind."""
    for name in [*TORCHRUN, *(name for name in os.environ if name.startswith("WANDB_"))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")  # tyro sets wider ones in two columns
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def environ(monkeypatch):
    """environ(NAME="value"): of this process, until the test ends."""

    def environ(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return environ


@pytest.fixture
def alone(isolated):
    """A process group of one rank."""
    connect(resolved(), 0, 0, 1)


@pytest.fixture
def no_model(monkeypatch):
    """A run that builds one fails."""
    monkeypatch.setattr("main.wrap", lambda *_, **__: pytest.fail("a model was built"))


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """FlexAttention that trains on a CPU: torch's dense stand-in, without the private check that refuses it."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(model, "compiled_flex_attention", flex.flex_attention)


def outcome(capfd, call, results=None):
    """What call() returns or exits with, both outputs, and of the file `results` its row and steps if it has them."""
    capfd.readouterr()
    try:
        code = call()
    except SystemExit as exit:
        code = exit.code
    if dist.is_initialized():
        dist.destroy_process_group()
    out, err = capfd.readouterr()
    row, steps = read(results) if results and results.is_file() and results.stat().st_size else (None, [])
    logged, losses = ([step[key] for step in steps] for key in ("step", "loss"))
    return SimpleNamespace(code=code, out=out, err=err, row=row, steps=steps, logged=logged, losses=losses)


@pytest.fixture
def train(capfd, tmp_path):
    """Run main.main on one rank in this process: its exit code, both outputs, its row and steps if it has them.
    fault: planted in it, as tests/planted.py says."""

    def train(*argv, rank=0, world=1, fault="", **env):
        results = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        argv = [*TINY, "--results", str(results), *map(str, argv)]
        with mock.patch.dict(os.environ, env), planting(fault) if fault else nullcontext():
            return outcome(capfd, lambda: main.main(flags.parse(argv), rank, rank, world), results)

    return train


@pytest.fixture
def trains(train):
    """The same of a run that must end well."""

    def trains(*argv, **how):
        done = train(*argv, **how)
        assert done.code == 0, done.err
        return done

    return trains


@pytest.fixture(scope="module")
def saved_run(one_thread, tmp_path_factory) -> Path:
    """Steps 2, 4 and 6 of a run, not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    argv = [*TINY, "--results", f"{folder}/rows.jsonl", "--save", f"{folder}/run", "--save-every", "2"]
    assert main.main(flags.parse(argv), 0, 0, 1) == 0
    return folder / "run"


@pytest.fixture
def folder(saved_run, tmp_path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(saved_run, tmp_path / "run")


@pytest.fixture(scope="module")
def exported(saved_run, tmp_path_factory) -> dict[str, Path]:
    """The weights of step 6 in each form, not to be changed."""
    folder = tmp_path_factory.mktemp("exported")
    forms = {"one": "out.safetensors", "several": "cut.safetensors", "pt": "out.pt"}
    for form, name in forms.items():
        assert export.main([str(saved_run), str(folder / name), *["--shard-gb", "30e-6"] * (form == "several")]) == 0
    return {form: folder / name for form, name in forms.items()}


@pytest.fixture
def call_study(isolated, capfd):
    """A study of studies/ on a CPU in this process: exit code, both outputs."""
    from lab.studies import study

    def call(module, *argv):
        return outcome(capfd, lambda: study.main(module, [*map(str, argv), "--device", "cpu"]))

    return call


def byte_level(texts, vocab_size, **how):
    """A byte-level BPE of a small vocabulary, trained on texts. how: of what cuts them before."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers.ByteLevel
    made.pre_tokenizer = pre(add_prefix_space=False, **how)
    made.decoder = tokenizers.decoders.ByteLevel()
    known = dict(special_tokens=SPECIAL, initial_alphabet=pre.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **known)
    made.train_from_iterator(texts, trainer)
    return made


@pytest.fixture(scope="module")
def backend():
    """A byte-level BPE, trained on the turns. It puts <|begin|> before texts, as Llama's does."""
    import tokenizers

    made = byte_level([repr(TURNS + chats(9)), "system user assistant model You are kind.", "\n\n"], 500)
    begins = dict(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    made.post_processor = tokenizers.processors.TemplateProcessing(**begins)
    return made.to_str()


@pytest.fixture
def tokenizer(backend):
    """template -> a tokenizer."""
    import tokenizers
    import transformers

    def make(template=None, pad="<|pad|>", eos="<|end|>", **changes):
        how = dict(bos_token="<|begin|>", eos_token=eos, pad_token=pad, additional_special_tokens=SPECIAL[3:]) | changes
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(backend), **how)
        made.chat_template = TEMPLATES.get(template, template)
        return made

    return make


@pytest.fixture
def batches(tmp_path, tokenizer):
    """lines, as dictionaries or bytes -> batches; of one row and from a new file unless told otherwise."""

    def make(lines, template="qwen2.5", made=None, **changes):
        path = tmp_path / "chat.jsonl"
        if lines is not None:
            path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
        how = dict(global_batch=1, seqlen=128, vocab=512, seed=3, cache=str(tmp_path / "cache")) | changes
        return ChatBatches(str(path), made or tokenizer(template), **how)

    return make


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A tiny Qwen2.5 in bf16 with its tokenizer, and data beside it; not to be changed."""
    from tiny_hf import write_data, write_model

    folder = tmp_path_factory.mktemp("hf")
    write_model(folder / "qwen")
    write_data(folder / "chat.jsonl")
    return folder / "qwen"


@pytest.fixture
def tune(qwen, capfd, tmp_path, monkeypatch):
    """Runs finetune.py on one rank in this process: its exit code, both outputs, its row and steps if it has them."""
    import finetune
    from trainer.finetuning import checks, config

    monkeypatch.setenv("XDG_CACHE_HOME", str(qwen.parent / "cache"))

    def tune(*argv, model=qwen, data=qwen.parent / "chat.jsonl"):
        results = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        usual = ["--model", model, "--data", data, "--compile", "none", "--seqlen", 48, "--batch", 4, "--lr", "1e-3",
                 "--warmup", 0, "--results", results]  # fmt: skip

        def call():
            c = config.parse([*map(str, usual), *map(str, argv)], 0, 1)
            checks.check_before_torch(c, 1)
            return finetune.main(c, 0, 0, 1)

        return outcome(capfd, call, results)

    return tune
