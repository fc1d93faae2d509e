"""trainer/config.py and what main.py checks first: help, bad command lines, values that do not fit, the environment.

    pytest tests/test_config.py        # about 40 s on 2 cores, no GPU

Every bad input ends in one line and its exit code. Faults are caused in this process where they can be; processes start
for what only they can show: exit codes, start-up time, what is imported.
"""

import dataclasses
import re
import socket
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import torch.distributed as dist
from fixtures import outcome
from running import TINY, TORCHRUN, fails, python, resolved

from trainer import config as flags
from trainer import elastic
from trainer.config import Output, System, Training
from trainer.distributed import command_line
from trainer.distributed.spelling import flag
from trainer.distributed.terminal import ranks
from trainer.finetuning import config as finetuning

pytestmark = pytest.mark.usefixtures("isolated")

FIELDS = {f.name: f for group in (Training, System, Output) for f in dataclasses.fields(group)
          if f.name not in flags.PARTS}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------- help


@pytest.fixture(scope="module")
def help_entries():
    """What the help says about each flag, on one line."""
    entries = {}
    name = None
    for line in python("--help").out.splitlines():
        if start := re.match(r"│ (?:-\w, )?(--[a-z0-9-]+)", line):
            name = start[1]
        if name and line.startswith("│"):
            entries[name] = " ".join(f"{entries.get(name, '')} {line.strip('│')}".split())
    return entries


def test_help_imports_no_torch():
    done = python("--help")
    assert done.code == 0 and done.err == "" and "usage: main.py" in done.out
    assert "tyro" in done.imports
    assert not {name for name in done.imports if name.split(".")[0] in ("torch", "numpy", "wandb")}


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

HF = "--model", "a", "--data", "b"

VALUES = {  # flags, or the beginning of what is in their place -> values that are wrong by themselves
    "--depth, --width, --head-dim, --grouping, --grow, --vocab, --seqlen, --batch, --grad-accum": "0 -3",
    "--effective-batch, --world, --log-every, --keep": "0 -3",
    "--save-every, --warmup, --steps, --eval-every, --sample": "-1",
    "--seed": f"-1 {2**64}",
    "--lr": "-0.1 0 nan inf fast",
    "--clip, --weight-decay, --min-shard-mib, --timeout": "-1 nan inf",
    "--nonfinite stop:limit=, --nonfinite stop:warn=": "-1 nan inf",
    "--optimizer adamw:beta1=, --optimizer adamw:beta2=": "-0.1 1.0 nan",
    "--remat both:": "-0.1 1.5 nan inf",
    "--ahead": "1.5 -0.1 -2 nan inf",
    "--save, --profile": "~/a ~",
    "--init": "runs/a",
    "--compile-options": "max_autotune",
    "--depth": "x 1.5",
    "--loss chunked:": "''",
    "--param-dtype, --reduce-dtype": "fp16",
    "--adam-dtype": "int8",
    "--device": "tpu",
    "--wrapper": "zero",
    "--mode": "zero3",
    "--compile, --remat": "all",
    "--attn": "eager",
    "--loss": "half",
    "--wandb": "maybe",
    "--mlp": "thin",
    "--block": "moe",
    "--schedule": "linear",
    "--nonfinite": "ignore",
    "--accum-sync": "first",
    "--link": "token-ring",
    "--optimizer": "sgd",
}
BAD = [(f"{flag}{' ' * (flag[-1] not in ':=')}{value}", value) for names, values in VALUES.items()
       for flag in names.split(", ") for value in values.split()]  # fmt: skip


@pytest.mark.parametrize(("argv", "value"), BAD, ids=[argv for argv, _ in BAD])
def test_a_bad_value_is_one_message_that_names_flag_and_value(argv, value, capfd):
    done = outcome(capfd, lambda: flags.parse(argv.split()))
    line = fails(done, 2)
    assert done.out == "" and re.match(rf"error: {argv.split()[0]}\b", line), line
    number = re.escape(value) + (r"(\.0)?" if re.fullmatch(r"-?\d+", value) else "")
    assert re.search(rf"(?<![\w.]){number}(?![\w.])", line), f"does not name {value}: {line}"


@pytest.mark.parametrize("path", ["", "~/a"])
@pytest.mark.parametrize("name", ["save", "results", "profile", "prepared", "export", "eval-data"])
def test_an_empty_path_and_a_home_that_no_shell_has_put_in_are_one_message(name, path, capfd):
    parse, more = (flags.parse, []) if name in ("save", "results", "profile") else (finetuning.parse, HF)
    done = outcome(capfd, lambda: parse([*more, f"--{name}", path]))
    fails(done, 2, f"error: --{name} {path}: must be a path; ~ is $HOME")


def test_every_flag_that_is_not_free_text_has_a_bad_value_above():
    # forms of --data: below
    free = {"data", "results", "verbose", "debug", "resume", "cast", "reshard", "cuda_graph", "deterministic", "force"}
    free |= {"keep_last", "report"}
    assert {argv.split()[0] for argv, _ in BAD} == {flag(name) for name in FIELDS.keys() - free}
    assert {name for name, kind in get_type_hints(Output).items() if kind in (str, bool)} <= free | flags.PARTS.keys()


@pytest.mark.parametrize("argv", ["--depth 0", "--depth x", "--no-such-thing", "--mode zero3", "--depth"])
def test_a_bad_command_line_is_not_repeated_by_other_ranks(argv, capfd, monkeypatch):
    monkeypatch.setattr(command_line.time, "sleep", lambda _: None)
    done = outcome(capfd, lambda: flags.parse(argv.split(), rank=1))
    assert (done.code, done.out, done.err) == (2, "", "")


def test_the_limits_themselves_are_allowed():
    flags.parse("--remat both:0 --clip 0 --warmup 0 --seed 0 --min-shard-mib 0 --depth 1 --grouping 1".split())
    flags.parse("--remat both:1 --compile-options a=b c=1=2 --no-reshard --no-debug".split())


MISFITS = {  # what is wrong together: flags, on so many ranks -> what the message names
    "--width 100 --head-dim 32": "--width 100|--head-dim 32",
    "--width 16 --head-dim 32": "--width 16|--head-dim 32",
    "--width 96 --head-dim 3": "--head-dim 3|even",
    "--grouping 3": "--grouping 3|4 heads",
    "--grouping 8": "--grouping 8|4 heads",
    "--width 64": "--grouping 4: must divide the 2 heads (64 / 32), as --grouping 1",
    "--vocab 255": "--vocab 255|256|stdlib",
    "--vocab 100 --data overfit": "--vocab 100|256|overfit",
    "--vocab 100 --data text:here": "--vocab 100|256|text:here",
    "--mode hybrid_shard on 3": "--mode hybrid_shard|2 replicas|3 ranks",
    "--mode hybrid_shard": "--mode hybrid_shard|2 replicas|1 rank;",
    "--mode hybrid_shard:8 on 4": "--mode hybrid_shard:8|8 replicas|4 ranks",
    "--batch 4 --effective-batch 12 on 2": "--effective-batch 12|2 ranks x --batch 4 x a whole number",
    "--batch 4 --effective-batch 4 on 2": "--effective-batch 4|2 ranks x --batch 4 x a whole number",
    "--batch 4 --effective-batch 8 --grad-accum 2 on 2": "--effective-batch 8|(--grad-accum 2)",
    "--wrapper none on 2": "--wrapper none|one rank|2",
    "--world 8 on 2": "--world 8|one process|2|without torchrun",
    "--world 8 --wrapper none": "--wrapper none|one rank|8",
    "--world 8 --mode hybrid_shard:3": "--mode hybrid_shard:3|8 ranks",
    "--wrapper none --param-dtype bf16": "--wrapper none|--param-dtype",
    "--attn flex": "--attn flex|CUDA",
    "--attn cudnn": "--attn cudnn|CUDA",
    "--attn efficient": "--attn efficient|CUDA",
    "--compile step --grad-accum 2": "--compile step|--grad-accum|2",
    "--compile step --accum-sync last": "--accum-sync last|--compile step",
    "--accum-sync shards --grad-accum 2 on 4": "--accum-sync shards|--mode hybrid_shard",
    "--compile blocks --ahead 0.1": "--ahead 0.1|--compile blocks",
    "--compile none --ahead 2": "--ahead 2|--compile none",
    "--wrapper fsdp2 --compile fwdbwd": "--wrapper fsdp2|--compile fwdbwd|blocks",
    "--wrapper fsdp2 --compile blocks --mode replicate": "--wrapper fsdp2|--mode replicate",
    "--wrapper ddp --compile none --mode hybrid_shard:1": "--wrapper ddp|--mode hybrid_shard",
    "--wrapper ddp --compile none --reduce-dtype bf16": "--wrapper ddp|--reduce-dtype bf16|CUDA",
    "--wrapper ddp --compile none --min-shard-mib 1": "--wrapper ddp|--min-shard-mib",
    "--compile step -vv": "-vv|--compile step",
    "--cuda-graph": "--cuda-graph|CUDA",
    "--mlp lean --remat pointwise": "--mlp lean|--remat pointwise",
    "--mlp lean --wrapper ddp --compile none --param-dtype bf16": "--mlp lean|--wrapper ddp|fp32",
    "--remat both:core --compile fwdbwd": "--remat both:core|--compile fwdbwd|--compile none",
    "--keep-last --no-reshard": "--keep-last|--reshard",
    "--keep-last --mode replicate": "--keep-last|--mode fully_shard",
    "--keep-last --accum-sync last --grad-accum 2": "--keep-last|--accum-sync every",
    "--keep-last --wrapper fsdp2 --compile none": "--keep-last|--wrapper simple",
    "--data bytes": "--data bytes|stdlib|text:PATH|bin:GLOB|random|overfit",
    "--data text:": "--data text:|text:PATH",
    "--data stdlib:x": "--data stdlib:x",
    "--compile blocks --compile-options max_autotone=1": "--compile-options|max_autotone",
    "--results {tmp}": "--results {tmp}|directory",
    "--results {tmp}/file/rows.jsonl": "--results {tmp}/file/rows.jsonl",
    "--device cuda": "--device cuda|no GPU|--device cpu",
    "--save-every 2": "--save-every 2|--save DIR",
    "--keep 2": "--keep 2|--save DIR",
    "--save-every 0:async": "--save-every 0:async: needs --save DIR",
    "--save-every 0:warn": "--save-every 0:warn: needs --save DIR",
    "--keep 3:best": "--keep 3:best: needs --save DIR",
    "--world 2 --save {tmp}": "--world 2|--save",
    "--world 2 --resume x": "--world 2|--resume",
    "--world 2 --init a.pt": "--world 2|--init",
    "--world 2 --sample 9": "--world 2|--sample",
    "--resume x --init a.pt": "--init a.pt|--resume x",
    "--batch 100000000": "--batch 100000000|GiB|--grad-accum|would fit|--force",
    "--width 1048576 --batch 1 --depth 100": "--width 1048576|GiB|lower one of them",
    "--save {tmp}/file": "--save {tmp}/file|Not a directory",
    "--save {tmp}/file/deep": "--save {tmp}/file/deep|directory",
}


@pytest.mark.parametrize("case", MISFITS)
def test_values_that_do_not_fit_end_before_any_process_group_exists(case, train, tmp_path, monkeypatch):
    argv, _, world = case.format(tmp=tmp_path).partition(" on ")
    names = MISFITS[case].format(tmp=tmp_path).split("|")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was asked for"))
    (tmp_path / "file").touch()
    defaults = "--head-dim 32 --width 128 --grouping 4".split()
    done = train(*defaults, *argv.split(), world=int(world or 1))
    assert fails(done, 2, *names)
    assert done.out == ""


def test_what_fits_is_accepted():
    def fits(argv, device="cpu", world=1):
        return resolved(argv, world, device)

    assert fits("--vocab 100 --data random").vocab == fits("--vocab 100 --data bin:x").vocab == 100
    assert fits("--mode hybrid_shard", world=4).replicas == 2
    for world, accum in ((1, 8), (2, 4), (4, 2)):
        assert fits("--batch 2 --effective-batch 16", world=world).grad_accum == accum
    assert fits("--batch 2 --grad-accum 3", world=2).effective_batch == 12
    assert fits("--attn flex", "cuda").attn == "flex"
    assert fits("--attn efficient", "cuda").sdpa == "efficient"
    for argv in ("--wrapper fsdp2 --compile blocks", "--world 2", "-vv", "--profile memory"):
        with pytest.raises(ValueError, match=f"({argv.split()[0]} .*|^)--cuda-graph: (.*{argv.split()[0]}|.*)"):
            fits(f"--cuda-graph {argv}", "cuda")
    assert fits("--cuda-graph", "cuda").cuda_graph
    assert fits("--wrapper none").param_dtype == "fp32"
    assert fits("--remat both:core:keep-norm", "cuda").remat_core  # the published policy
    assert fits("--remat both:core --wrapper none").remat_core
    assert fits("--mlp lean:64 --remat block --compile blocks").mlp == "lean"
    assert fits("--wrapper ddp --compile none", world=2).mode == "replicate"
    assert fits("--lr 1", "cuda").lr == 1
    assert fits("", "cuda").param_dtype == "bf16"


WRONG = {  # a command line -> the line that it ends in
    "--dpeth 3": "--dpeth: no such flag; did you mean --depth?",
    "--accum-sink 1": "--accum-sink: no such flag; did you mean --accum-sync?",
    "--dtype bf16": "--dtype: no such flag; did you mean --param-dtype or --reduce-dtype or --adam-dtype?",
    "--batch-size 4": "--batch-size: no such flag; did you mean --batch?",
    "--nproc=4": "--nproc: no flag of this program: NPROC=N ./launch.sh run, or torchrun --nproc-per-node N",
    "--no-such-thing": "--no-such-thing: no such flag; --help lists all flags",
    "--reshard False": "--reshard False: takes no value; write --reshard or --no-reshard",
    "-vv --verbose 3": "--verbose 3: takes no value; write --verbose",
    "--depth": "--depth: needs a value",
    "--compile-options a=b c=d --depth x": "--depth x: must be a whole number",
    "--lr=fast": "--lr fast: must be a number",
    "stray": "stray: belongs to no flag; --help lists all flags",
    "depth=8": "depth=8: flags begin with --; did you mean --depth 8?",
    "dpeth=8": "dpeth=8: flags begin with --; did you mean --depth 8?",
    "--depth 0": "--depth 0: must be at least 1",
    "--lr -1": "--lr -1.0: must be a positive number below 1e38",
    "--world 0": "--world 0: must be at least 1",
    "--world 8 --link token-ring": "--link token-ring: must be a100-nvlink, .*",
    "--mode zero": "--mode zero: must be replicate, fully_shard or hybrid_shard",
    "--attn falsh": "--attn falsh: must be auto, cudnn, .*; did you mean flash?",
    "--param-dtype half": "--param-dtype half: must be fp32 or bf16",  # None is no choice of the user's
    "--data stdlb": "--data stdlb: expected one of .*; did you mean stdlib?",
    "--data text:absent": "absent: expected readable data, found No such file or directory; .*",
}


@pytest.mark.parametrize("argv", WRONG)
def test_a_bad_command_line_exits_2_with_one_line_and_imports_no_torch(argv):
    done = python(*argv.split())
    line = fails(done, 3 if "absent" in argv else 2)
    assert re.fullmatch(WRONG[argv].replace("?", "[?]"), line.removeprefix("error: ")), line
    assert done.out == ""
    assert "torch" not in done.imports


def test_what_no_rule_of_ours_explains_is_the_parsers_own_text_in_one_line(monkeypatch, capfd):
    monkeypatch.setattr(command_line, "explain", lambda *_: None)
    done = outcome(capfd, lambda: flags.parse(["--mode", "zero"]))
    assert not re.search("[\u2500-\u257f]", fails(done, 2, "--mode", "zero"))


def test_without_a_driver_auto_is_the_cpu_before_torch_is_asked(monkeypatch, capfd):
    monkeypatch.setattr(flags, "may_have_gpu", lambda: False)
    done = outcome(capfd, lambda: flags.parse(["--width", "100"], world=1))
    assert fails(done, 2) == "error: --width 100: must be a multiple of --head-dim 32"


def test_an_inductor_option_that_is_not_there_is_told_what_it_may_be(train):
    done = train("--compile", "blocks", "--compile-options", "maxautotune=True")
    fails(done, 2, "maxautotune; did you mean max_autotune")


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


def test_a_port_in_use_is_one_line_and_exit_2(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        done = python(*TINY, "--results", tmp_path / "rows.jsonl", env=env, trace=False)
    assert done.out.startswith("importing torch\n")  # on a slow machine it says so again
    fails(done, 2, f"127.0.0.1:{port}", "in use", "another port")


def test_more_ranks_than_gpus_are_told_by_rank_0_which_has_one(train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("waits for ranks that never come"))
    env = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    fails(train("--device", "cuda", world=2, **env, LOCAL_WORLD_SIZE="2"), 2, "--nproc-per-node", "1")


# ------------------------------------------------------------------------------------------- nodes that come and go

ELASTIC = "--batch 2 --save runs/a --save-every 5 --effective-batch 8"


def told(nodes, rank, argv, **env):
    return elastic.words(2, argv.split(), dict(NNODES=nodes, NODE_RANK=rank, MASTER_ADDR="first") | env)


def test_the_first_node_holds_what_nodes_that_come_and_go_meet_by_and_stays_the_first():
    expected = "--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=first:29500 --rdzv-conf=is_host={} --local-addr={} "
    expected += "--max-restarts=9"
    assert told("1:2", "0", ELASTIC) == expected.format(1, "first").split()
    assert told("1:2", "1", ELASTIC) == expected.format(0, "first.1").split()
    assert sorted(["first.2", "first.1", "first"])[0] == "first"  # as torchrun numbers them
    other = told("1:2", "1", ELASTIC, MASTER_PORT="3", MAX_RESTARTS="0")
    assert other[2::3] == ["--rdzv-endpoint=first:3", "--max-restarts=0"]


@pytest.mark.parametrize(("nodes", "argv", "message"), [
    ("2:1", ELASTIC, "NNODES=2:1: expected the least and the most nodes, as 1:2"),
    ("1:x", ELASTIC, "NNODES=1:x: expected the least"), ("0:2", ELASTIC, "NNODES=0:2: expected the least"),
    ("1:2", "--batch 2 --save runs/a --save-every 5", "NNODES=1:2: nodes that leave need --save DIR and --save-every "
     "N, to go on from, and --effective-batch N"),
    ("1:2", "--batch 2 --save runs/a --effective-batch 8", "NNODES=1:2: nodes that leave need --save DIR and --save"),
    ("1:2", "--batch 2 --effective-batch 8", "NNODES=1:2: nodes that leave need --save DIR"),
    ("1:3", ELASTIC, "--effective-batch 8: must be 6 ranks x --batch 2 x a whole number"),  # 3 nodes of 2 ranks
])  # fmt: skip
def test_flags_that_do_not_do_for_every_number_of_nodes_are_refused(nodes, argv, message, capfd):
    fails(outcome(capfd, lambda: told(nodes, "0", argv)), 2, f"error: {message}")
