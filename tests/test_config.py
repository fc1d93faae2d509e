"""trainer/config.py and what main.py checks first: help, bad command lines, values that do not fit, the environment.

    pytest tests/test_config.py        # about 40 s on 2 cores, no GPU

Every bad input ends in one message and its exit code: tyro's for what is no flag or no value of one, else our own line.
Faults are caused in this process where they can be; processes start for what only they can show: exit codes, start-up
time, what is imported.
"""

import dataclasses
import json
import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixtures import outcome
from running import TINY, TORCHRUN, fails, python, ran, resolved

from trainer import config as flags
from trainer.config import Output, System, Training
from trainer.distributed.environment import ranks
from trainer.terminal import command_line
from trainer.terminal.command_line import flag

pytestmark = pytest.mark.usefixtures("isolated")

FIELDS = {f.name: f for group in (Training, System, Output) for f in dataclasses.fields(group)}

# ---------------------------------------------------------------------------------------------------------------- help


@pytest.fixture(scope="module")
def help_text():
    return python("--help").out


@pytest.fixture(scope="module")
def help_entries(help_text):
    """What the help says about each flag, on one line."""
    entries = {}
    name = None
    for line in help_text.splitlines():
        if start := re.match(r"│ (?:-\w, )?(--[a-z0-9-]+)", line):
            name = start[1]
            if name == "--micro-batch":  # another name, which stands before
                name = "--batch"
        if name and line.startswith("│"):
            entries[name] = " ".join(f"{entries.get(name, '')} {line.strip('│')}".split())
    return entries


INSTANT = {  # a command that imports nothing that takes seconds -> its exit code, and what it says
    "main.py --help": (0, "usage: main.py"), "finetune.py --help": (0, "usage: finetune.py"),
    "plan.py --help": (0, "usage: plan.py"), "speed_mem_tests_mlp.py --help": (0, "--reduce-dtype"),
    "-m trainer.checkpoint.export --help": (0, "--shard-gb"), "finetune.py --model docs --data x": (3, "config.json"),
    "-m lab.report compile --results results/cpu_modes.jsonl": (0, "**compile**"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("command", INSTANT)
def test_help_a_bad_folder_and_a_report_are_told_without_importing_torch(command):
    code, says = INSTANT[command]
    done = ran(sys.executable, "-X", "importtime", *command.split())
    imported = {line.split("|")[-1].strip() for line in done.err.splitlines()}
    assert done.code == code and says in done.out + done.err, done.err[-500:]
    slow = {"torch", "triton", "pandas", "pyarrow", "matplotlib", "transformers", "wandb", "trackio", "tensorboard"}
    assert "argparse" in imported and not slow & imported


@pytest.mark.parametrize("name", FIELDS)
def test_every_flag_has_a_text_and_a_default_in_the_help(name, help_entries):
    source = Path(flags.__file__).read_text()
    entry = help_entries[flag(name)]
    text = re.search(rf'^    {name}: .*\n    """([^"]+)"""', source, re.MULTILINE)[1]  # the docstring of the field
    assert len(text) > 10 and " ".join(text.split()) in entry, entry
    assert "(default" in entry, f"no default: {entry}"


def test_defaults_by_device_are_those_of_the_help(help_entries):
    for name, gpu in flags.DEFAULTS["cuda"].items():
        cpu = flags.DEFAULTS["cpu"][name]
        expected = f"(default: {gpu})" if gpu == cpu else f"(default: {gpu}, on a CPU {cpu})"
        assert expected in help_entries[flag(name)]
    for device in ("cpu", "cuda"):
        c = resolved(device=device)
        assert {k: getattr(c, k) for k in flags.DEFAULTS[device]} == flags.DEFAULTS[device]
        assert c.device == flags.setting(c)["device"] == device


# ---------------------------------------------------------------------------------------------------- bad command lines

VALUES = {  # flags -> values that are wrong by themselves: the message names the flag and the value
    "--depth --width --head-dim --grouping --grow --vocab --seqlen --batch --grad-accum": "0 -3",
    "--effective-batch --world --log-every --keep --eval-batches --replicas --loss-chunk": "0 -3",
    "--save-every --warmup --steps --eval-every --sample --mlp-chunk": "-1",
    "--seed": f"-1 {2**64}",
    "--lr --muon-lr": "-0.1 0 nan inf fast",
    "--clip --weight-decay --min-shard-mib --timeout --timeout-first --norm-limit --norm-spike": "-1 nan inf",
    "--adam-beta1 --adam-beta2": "-0.1 1.0 nan",
    "--remat-ratio --warmup-ratio": "-0.1 1.5 nan inf",
    "--ahead": "1.5 -0.1 -2 nan inf",
    "--save --profile": "~/a ~",
    "--init": "runs/a",
    "--compile-options": "max_autotune",
    "--depth": "x 1.5",
    "--param-dtype --reduce-dtype --muon-dtype": "fp16",
    "--adam-dtype": "int8",
    "--device": "tpu",
    "--wrapper": "zero",
    "--mode": "zero3 hybrid_shard:4",
    "--compile": "all regions",
    "--remat": "all both:0.5",
    "--attn": "eager falsh sdpa",
    "--loss": "half",
    "--tracker": "mlflow",
    "--mlp": "thin",
    "--block": "moe",
    "--schedule": "linear",
    "--nonfinite --save-errors": "ignore",
    "--accum-sync": "first",
    "--link": "token-ring",
    "--optimizer": "sgd",
    "--muon-adjust-lr": "none",
}
REFUSED = {  # a command line of main.py, and on how many ranks -> the message
    **{f"{name} {value}": rf"{name}\b.*(?<![\w.]){re.escape(value)}(\.0)?(?![\w.])|'{re.escape(value)}'.*'{name}'"
       for names, values in VALUES.items() for name in names.split() for value in values.split()},
    # What means something beside another flag alone.
    "--replicas 4": "--replicas 4: needs --mode hybrid_shard",
    "--remat-ratio 0.5": "--remat-ratio 0.5: needs --remat mlp or attn or both or block or pointwise",
    "--remat mlp --remat-core": "--remat-core: needs --remat attn or both or block",
    "--remat block --no-remat-norm": "--no-remat-norm: needs --remat mlp or attn or both",
    "--mlp-chunk 64": "--mlp-chunk 64: needs --mlp lean",
    "--loss-chunk 512": "--loss-chunk 512: needs --loss chunked",
    "--muon-lr 0.1": "--muon-lr 0.1: needs --optimizer muon",
    "--muon-adjust-lr original": "--muon-adjust-lr original: needs --optimizer muon",
    "--muon-dtype fp32": "--muon-dtype fp32: needs --optimizer muon",
    "--tracker-group g": "--tracker-group g: needs --tracker wandb or trackio or tensorboard",
    "--wandb-tags a b": "--wandb-tags a b: needs --tracker wandb",
    "--tracker tensorboard --wandb-mode offline": "--wandb-mode offline: needs --tracker wandb",
    # No flag, or no value: what tyro says.
    "--dpeth 3": "Unrecognized options: --dpeth, 3 Perhaps you meant: --depth INT",
    "--accum-sink 1": "--accum-sink, 1 Perhaps you meant: --accum-sync {every,shards,last}",
    "--dtype bf16": "Unrecognized options: --dtype, bf16 Perhaps you meant: .*--param-dtype",
    "--remat-rato 0.5": "Perhaps you meant: --remat-ratio FLOAT",
    "--no-such-thing": "Unrecognized options: --no-such-thing For full helptext, run main.py --help",
    "--reshard False": "Unrecognized options: False",
    "-vv --verbose 3": "Unrecognized options: 3",
    "--depth": "Missing value for argument '--depth'",
    "--compile-options a=b c=d --depth x": "Error parsing --depth",
    "stray": "Unrecognized options: stray",
    "depth=8": "Unrecognized options: depth=8",
    "--optim in-backward": "Unrecognized options: --optim, in-backward",
    # Values that do not fit together.
    "--width 100 --head-dim 32": "--width 100: must be a multiple of --head-dim 32",
    "--width 16 --head-dim 32": "--width 16: must be a multiple of --head-dim 32",
    "--width 96 --head-dim 3": "--head-dim 3: must be even",
    "--grouping 3": "--grouping 3: must divide the 4 heads",
    "--grouping 8": "--grouping 8: must divide the 4 heads",
    "--width 64": r"--grouping 4: must divide the 2 heads \(64 / 32\), as --grouping 1",
    "--vocab 255": "--vocab 255: must be at least 256 for the bytes of --data stdlib",
    "--vocab 100 --data overfit": "--vocab 100: must be at least 256 .*overfit",
    "--vocab 100 --data text:here": "--vocab 100: must be at least 256 .*text:here",
    "--mode hybrid_shard on 3": "--replicas 2: must divide the 3 ranks",
    "--mode hybrid_shard": "--replicas 2: must divide the 1 rank$",
    "--mode hybrid_shard --replicas 8 on 4": "--replicas 8: must divide the 4 ranks",
    "--batch 4 --effective-batch 12 on 2": "--effective-batch 12: must be 2 ranks x --batch 4 x a whole number",
    "--batch 4 --effective-batch 4 on 2": "--effective-batch 4: must be 2 ranks x --batch 4 x a whole number",
    "--batch 4 --effective-batch 8 --grad-accum 2 on 2": r"--effective-batch 8: .*\(--grad-accum 2\)",
    "--wrapper none on 2": "--wrapper none: needs one rank and --param-dtype fp32, got 2 ranks",
    "--world 8 on 2": "--world 8: simulates all ranks in one process, but torchrun started 2; start it",
    "--world 8 --wrapper none": "--wrapper none: needs one rank and --param-dtype fp32, got 8 ranks",
    "--world 8 --mode hybrid_shard --replicas 3": "--replicas 3: must divide the 8 ranks",
    "--wrapper none --param-dtype bf16": "--wrapper none: .*--param-dtype",
    "--attn flex": "--attn flex: needs CUDA",
    "--attn cudnn": "--attn cudnn: needs CUDA",
    "--attn efficient": "--attn efficient: needs CUDA",
    "--compile step --grad-accum 2": "--compile step: not with --grad-accum 2",
    "--compile step --accum-sync last": "--compile step: not with --accum-sync last",
    "--accum-sync shards --grad-accum 2 on 4": "--accum-sync shards: shards needs --mode hybrid_shard",
    "--compile blocks --ahead 0.1": "--ahead 0.1: not with --compile blocks",
    "--compile none --ahead 2": "--ahead 2.0: not with --compile none",
    "--wrapper fsdp2 --compile fwdbwd": "--wrapper fsdp2: not with --compile fwdbwd: needs --compile none or blocks",
    "--wrapper fsdp2 --compile blocks --mode replicate": "--wrapper fsdp2: not with --mode replicate",
    "--wrapper ddp --compile none --mode hybrid_shard --replicas 1": "--wrapper ddp: not with --mode hybrid_shard",
    "--wrapper ddp --compile none --reduce-dtype bf16": "--wrapper ddp: not with --reduce-dtype bf16: .*CUDA",
    "--wrapper ddp --compile none --min-shard-mib 1": "--wrapper ddp: not with --min-shard-mib",
    "--compile step -vv": "--compile step: not with -vv",
    "--cuda-graph": "--cuda-graph: not with --device cpu: needs CUDA",
    "--mlp lean --remat pointwise": "--mlp lean: not with --remat pointwise",
    "--mlp lean --wrapper ddp --compile none --param-dtype bf16": "--mlp lean: not with --wrapper ddp: .*fp32",
    "--remat both --remat-core --compile fwdbwd": r"--remat-core: .*\(--compile fwdbwd\); use --compile none",
    "--keep-last --no-reshard": "--keep-last: not with --no-reshard",
    "--keep-last --mode replicate": "--keep-last: not with --mode replicate: needs .*--mode fully_shard",
    "--keep-last --accum-sync last --grad-accum 2": "--keep-last: not with --accum-sync last: .*--accum-sync every",
    "--keep-last --wrapper fsdp2 --compile none": "--keep-last: not with --wrapper fsdp2: needs --wrapper simple",
    "--warmup 5 --warmup-ratio 0.1": "--warmup 5: not with --warmup-ratio 0.1: both set the length",
    "--explain-memory --profile traces": "--explain-memory: not with --profile traces: both inspect the same step",
    "--eval-batches 4": "--eval-batches 4: needs --eval-every N",
    "--steps 0": "--steps 0: would do nothing; add --eval-every 1 to evaluate",
    "--steps 0 --eval-every 1 --save {tmp}/run": "--steps 0: not with --save {tmp}/run: only evaluates, so there",
    "--steps 0 --eval-every 1 --explain-memory": "--steps 0: not with --explain-memory: only evaluates",
    "--data bytes": r"--data bytes: .*stdlib.*text:PATH.*bin:GLOB.*random.*overfit",
    "--data stdlb": "--data stdlb: expected one of .*; did you mean stdlib[?]",
    "--data text:": "--data text:: .*text:PATH",
    "--data stdlib:x": "--data stdlib:x",
    "--compile blocks --compile-options max_autotone=1": "--compile-options: .*max_autotone; did you mean max_autotune",
    "--results {tmp}": "--results {tmp}.*directory",
    "--results {tmp}/file/rows.jsonl": "--results {tmp}/file/rows.jsonl",
    "--device cuda": "--device cuda: .*no GPU.*--device cpu",
    "--save-every 2": "--save-every 2: needs --save DIR",
    "--keep 2": "--keep 2: needs --save DIR",
    "--save-async": "--save-async: needs --save DIR",
    "--save-errors warn": "--save-errors warn: needs --save DIR",
    "--keep-best": "--keep-best: needs --save DIR",
    "--keep-best --save {tmp}/run": "--keep-best: needs --eval-every, and --save-errors stop",
    "--keep-best --save {tmp}/run --eval-every 1 --save-errors warn": "--keep-best: needs .*, and --save-errors stop",
    "--world 2 --save {tmp}": "--world 2: not with --save",
    "--world 2 --resume x": "--world 2: not with --resume",
    "--world 2 --init a.pt": "--world 2: not with --init",
    "--world 2 --sample 9": "--world 2: not with --sample",
    "--resume x --init a.pt": "--init a.pt: not with --resume x",
    "--batch 100000000": "--batch 100000000: .*GiB.*--grad-accum .* would fit; --force",
    "--width 1048576 --batch 1 --depth 100": "--width 1048576.*GiB.*lower one of them",
    "--save {tmp}/file": "--save {tmp}/file.*Not a directory",
    "--save {tmp}/file/deep": "--save {tmp}/file/deep.*directory",
    **{f"--{name} {path}": f"--{name} {path}: must be a path; write \\$HOME"
       for name in ("save", "results", "profile") for path in ("''", "~/a")},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_command_line_is_one_message_before_any_process_group_exists(case, train, tmp_path, monkeypatch):
    argv, _, world = case.replace("{tmp}", str(tmp_path)).partition(" on ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was asked for"))
    (tmp_path / "file").touch()
    defaults = "--head-dim 32 --width 128 --grouping 4".split()
    done = train(*defaults, *shlex.split(argv), world=int(world or 1))
    line = fails(done, 2)
    assert re.search(REFUSED[case].replace("{tmp}", str(tmp_path)).replace("''", ""), line), line
    assert done.out == ""


@pytest.mark.parametrize("argv", ["--depth 0", "--depth x", "--no-such-thing", "--mode zero3", "--depth"])
def test_a_bad_command_line_is_not_repeated_by_other_ranks(argv, capfd, monkeypatch):
    monkeypatch.setattr(command_line.time, "sleep", lambda _: None)
    done = outcome(capfd, lambda: flags.parse(argv.split(), rank=1))
    assert (done.code, done.out, done.err) == (2, "", "")


def test_the_help_text_of_a_flag_that_may_be_meant_is_running_text(capfd, monkeypatch):
    """Tyro prints the line breaks of an indented docstring, which leave lone words."""
    monkeypatch.setenv("COLUMNS", "100")
    done = outcome(capfd, lambda: flags.parse(["--comple", "none"]))
    text = re.sub("[│ \n]+", " ", done.err)
    assert done.code == 2 and "Perhaps you meant: --compile {" in text
    lines = [line.strip("│ ") for line in done.err.splitlines()]
    assert all(len(line) > 40 for line in lines[4:-4]), done.err


def test_the_limits_themselves_are_allowed():
    flags.parse("--remat both --remat-ratio 0 --clip 0 --warmup 0 --seed 0 --min-shard-mib 0 --depth 1".split())
    flags.parse("--remat both --remat-ratio 1 --compile-options a=b c=1=2 --no-reshard --no-debug".split())


def test_a_flag_has_one_name_but_for_underscores_and_of_two_the_last_counts():
    c = flags.parse("--remat=both --remat_ratio 0.5 --micro-batch 3 --depth 2 --depth 3".split())
    assert (c.remat, c.remat_ratio, c.batch, c.depth) == ("both", 0.5, 3, 3)


@pytest.mark.parametrize("form", ["settings", "results"])
def test_a_run_is_repeated_by_what_it_wrote_and_other_flags_change_it(form, tmp_path):
    words = "--depth 3 --no-reshard --warmup 0 --compile-options a=1 b=2 --batch 2 --effective-batch 8"
    first = resolved(f"{words} --seed 5 --steps 7 --results {tmp_path / 'x.jsonl'} --save {tmp_path}", world=2)
    found = flags.setting(first)
    if form == "settings":
        path = tmp_path / "a.settings.json"
        path.write_text(json.dumps(found | dict(continues="b", after_step=3)))
    else:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(dict(flags=each)) + "\n" for each in (dict(depth=9), found)))
    again = resolved(f"--config {path}", world=2)
    assert flags.setting(again) == found and again.save is None and again.results == Output.results
    changed = resolved(f"--seed 6 --config={path} --reshard", world=4)
    assert changed.seed == 6 and changed.reshard and changed.grad_accum == 1
    assert changed.depth == 3 and changed.compile_options == ("a=1", "b=2") and changed.warmup == 0
    other = resolved(f"--config {path} --warmup-ratio 0.5", world=2)
    assert (other.warmup_ratio, other.warmup_steps) == (0.5, 4)


@pytest.mark.parametrize("text, message", [
    (None, "No such file or directory"), ("", "no run wrote this"), ("[1]", "no run wrote this"),
    ('{"depth": 1', "no run wrote this"),
    ('{"model": "m", "columns": []}', "has columns, model, which are no settings"),
    ('{"depth": "many"}', "--depth"), ('{"depth": -1}', "--depth -1"), ("[" * 99_999, "no run wrote this"),
    ('{"config": "b.json"}', "has config, which are no settings"),
    ('{"save": "b", "results": "c"}', "has results, save, which are no settings"),
    ('{"seed": [0, "--save", "b"]}', "has seed [0, '--save', 'b'], which no run wrote"),
    ('{"data": "--save=b"}', "has data --save=b, which no run wrote"),
    ('{"verbose": 1e30}', "has verbose 1e+30, which no run wrote"), ('{"verbose": "x"}', "has verbose x, which no run"),
])  # fmt: skip
def test_settings_that_no_run_wrote_exit_2_with_the_name_of_the_file_or_flag(text, message, tmp_path, capfd):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        flags.parse(["--config", str(path)])
    assert ended.value.code == 2 and message in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_settings_that_are_no_regular_file_are_refused_and_not_read_for_ever(kind, tmp_path, capfd):
    path = tmp_path / "a.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(SystemExit) as ended:
        flags.parse(["--config", str(path)])
    assert ended.value.code == 2 and f"--config {path}: no regular file; name the settings" in capfd.readouterr().err


@pytest.mark.long
def test_what_fits_is_accepted():
    def fits(argv, device="cpu", world=1):
        return resolved(argv, world, device)

    assert fits("--vocab 100 --data random").vocab == fits("--vocab 100 --data bin:x").vocab == 100
    assert fits("--mode hybrid_shard", world=4).replicas == 2
    for world, accum in ((1, 8), (2, 4), (4, 2)):
        assert fits("--batch 2 --effective-batch 16", world=world).grad_accum == accum
    assert fits("--batch 2 --grad-accum 3", world=2).effective_batch == 12
    assert fits("--attn flex", "cuda").attn == "flex"
    assert fits("--attn efficient", "cuda").attn == "efficient"
    for argv in ("--wrapper fsdp2 --compile blocks", "--world 2", "-vv", "--explain-memory"):
        with pytest.raises(ValueError, match=f"({argv.split()[0]} .*|^)--cuda-graph: (.*{argv.split()[0]}|.*)"):
            fits(f"--cuda-graph {argv}", "cuda")
    assert fits("--cuda-graph", "cuda").cuda_graph
    assert fits("--wrapper none").param_dtype == "fp32"
    assert fits("--remat both --remat-core --no-remat-norm", "cuda").remat_core  # the published policy
    assert fits("--remat both --remat-core --wrapper none").remat_core
    assert fits("--mlp lean --mlp-chunk 64 --remat block --compile blocks").mlp == "lean"
    assert fits("--wrapper ddp --compile none", world=2).mode == "replicate"
    assert fits("--lr 1", "cuda").lr == 1
    assert fits("", "cuda").param_dtype == "bf16"


def test_without_a_driver_auto_is_the_cpu_before_torch_is_asked(monkeypatch, capfd):
    monkeypatch.setattr(flags, "may_have_gpu", lambda: False)
    done = outcome(capfd, lambda: flags.parse(["--width", "100"], world=1))
    assert fails(done, 2) == "error: --width 100: must be a multiple of --head-dim 32"


def test_an_inductor_option_that_is_not_there_is_told_what_it_may_be(train):
    done = train("--compile", "blocks", "--compile-options", "maxautotune=True")
    fails(done, 2, "maxautotune; did you mean max_autotune")


@pytest.mark.long
def test_a_value_that_only_the_device_refuses_exits_2(tmp_path):
    done = python("--head-dim", 96, "--results", tmp_path / "rows.jsonl", trace=False)
    assert re.fullmatch(r"error: --width (128|4096): .* --head-dim 96", fails(done, 2))
    assert not (tmp_path / "rows.jsonl").exists()


# --------------------------------------------------------------------------------------------------------- environment


@pytest.mark.parametrize("there", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "RANK WORLD_SIZE LOCAL_RANK",
                                   "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"])  # fmt: skip
def test_part_of_torchruns_environment_is_an_error_that_lists_the_rest(there, environ, capfd):
    environ(**dict.fromkeys(there.split(), "1"))
    given, missing = fails(outcome(capfd, ranks), 2).split("set but not")
    for name in TORCHRUN:
        if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            assert (re.search(rf"\b{name}\b", missing) is None) == (name in there.split()), name


def test_a_rank_without_a_world_size_exits_2_before_torch_is_imported():
    done = python(*TINY, env={"RANK": "0"})
    assert fails(done, 2, "WORLD_SIZE")
    assert "torch" not in done.imports


def test_without_torchrun_there_is_one_rank_and_with_it_what_it_says(environ):
    assert ranks() == (0, 0, 1)
    environ(RANK="5", LOCAL_RANK="6", WORLD_SIZE="7", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    assert ranks() == (5, 6, 7)


@pytest.mark.long
def test_a_port_in_use_is_one_line_and_exit_2(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        done = python(*TINY, "--results", tmp_path / "rows.jsonl", env=env, trace=False)
    assert done.out.startswith("importing torch on 2 ranks\n")  # on a slow machine it says so again
    fails(done, 2, f"127.0.0.1:{port}", "in use", "another port")


def test_more_ranks_than_gpus_are_told_by_rank_0_which_has_one(train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("waits for ranks that never come"))
    env = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    fails(train("--device", "cuda", world=2, **env, LOCAL_WORLD_SIZE="2"), 2, "--nproc-per-node", "1")
