"""main.py and trainer/config.py: every bad input ends in one line and its exit code, every good run in its row.

    pytest tests/test_main.py        # about 60 s on 2 cores, no GPU

Faults are caused in this process where they can be; processes start for what only they can show: exit codes, start-up
time, and what two ranks print. Runs are eager and tiny.
"""

import ast
import dataclasses
import gzip
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch
import torch.distributed as dist
from harness import free_port

import main
from model import Transformer
from trainer import config as flags
from trainer import step as steps_of
from trainer.config import Output, System, Training

ROOT = Path(main.__file__).parent
TINY = "--compile none --depth 1 --width 32 --head-dim 16 --grouping 2 --seqlen 16 --steps 6 --batch 2".split()
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SWEEP_CELL")
FIELDS = {f.name: f for group in (Training, System, Output) for f in dataclasses.fields(group)}
# DESIGN, "A row"; what depends on the device is that of a CPU
KEYS = """date commit dirty torch device world wrapper mode compile attn remat remat_ratio loss_kind depth width seqlen
batch grad_accum param_dtype reduce_dtype flags outcome peak_rss_mib first_step_peak_mib step_ms step_ms_min step_ms_max
n compile_s tok_s mfu mfu_palm hfu loss""".split()


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
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


def rows_of(path):
    """The lines of a file as strict JSON, which knows no NaN."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in Path(path).read_text().splitlines()]


def read(results):
    """The only row of a results file, and the steps of its run."""
    (row,) = rows_of(results)
    steps = Path(results).with_suffix(".steps") / f"{row['run']}.jsonl"
    return row, rows_of(steps) if steps.exists() else []


@pytest.fixture
def train(capfd, tmp_path):
    """Run main.main on one rank in this process: its exit code, both outputs, its row and steps if it has them."""

    def train(*argv, rank=0, world=1):
        results = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        capfd.readouterr()
        try:
            code = main.main(flags.parse([*TINY, "--results", str(results), *map(str, argv)]), rank, rank, world)
        except SystemExit as exit:
            code = exit.code
        if dist.is_initialized():
            dist.destroy_process_group()
        out, err = capfd.readouterr()
        row, steps = read(results) if results.is_file() and results.stat().st_size else (None, [])
        return SimpleNamespace(code=code, out=out, err=err, row=row, steps=steps)

    return train


def python(*argv, env=(), trace=True, timeout=60):
    """main.py in a process of its own. `imports`, if asked for, are the modules that it imported; `err` is the rest."""
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"} | dict(env)
    command = [sys.executable, *["-X", "importtime"] * trace, str(ROOT / "main.py"), *map(str, argv)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    lines = done.stderr.splitlines(keepends=True)
    imports = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}
    err = "".join(line for line in lines if not line.startswith("import time:"))
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=err, imports=imports)


def torchrun(*argv, ranks=2, cwd=None):
    """main.py on gloo ranks. `code` is that of the first rank that failed, as torchrun reports it; `err` is ours."""
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), str(ROOT / "main.py"), *map(str, argv)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=cwd)
    report = done.stderr.partition("Root Cause")[2]
    code = int(re.search(r"exitcode\s*: (-?\d+)", report)[1]) if report else done.returncode
    ours = re.split(r"^[WE]\d{4} .*torch/distributed/elastic", done.stderr, maxsplit=1, flags=re.MULTILINE)[0]
    return SimpleNamespace(code=code, out=done.stdout, err=ours)


def one_line(err):
    """The error, which is all that was printed."""
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


# ---------------------------------------------------------------------------------------------------------------- help


@pytest.fixture(scope="module")
def help_entries():
    """What the help says about each flag, on one line."""
    entries, name = {}, None
    for line in python("--help").out.splitlines():
        if start := re.match(r"│ (?:-\w, )?(--[a-z-]+)", line):
            name = start[1]
        if name and line.startswith("│"):
            entries[name] = " ".join(f"{entries.get(name, '')} {line.strip('│')}".split())
    return entries


def test_help_takes_less_than_half_a_second_and_imports_no_torch():
    done, seconds = python("--help"), []
    assert done.code == 0 and done.err == "" and "usage: main.py" in done.out
    assert "tyro" in done.imports
    assert not {name for name in done.imports if name.split(".")[0] in ("torch", "numpy", "wandb")}
    while len(seconds) < 3 or (min(seconds) >= 0.5 and len(seconds) < 6):  # others may be using the machine
        start = time.perf_counter()
        python("--help", trace=False)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5, seconds


@pytest.mark.parametrize("name", FIELDS)
def test_every_flag_has_a_text_and_a_default_in_the_help(name, help_entries):
    source, entry = Path(flags.__file__).read_text(), help_entries[flags.flag(name)]
    text = re.search(rf'^    {name}: .*\n    """([^"]+)"""', source, re.MULTILINE)[1]  # the docstring of the field
    assert len(text) > 10 and " ".join(text.split()) in entry, entry
    assert "(default" in entry, f"no default: {entry}"


def test_defaults_by_device_are_those_of_the_help(help_entries):
    for name, gpu in flags.DEFAULTS["cuda"].items():
        cpu = flags.DEFAULTS["cpu"][name]
        expected = f"(default: {gpu})" if gpu == cpu else f"(default: {gpu}, on a CPU {cpu})"
        assert expected in help_entries[flags.flag(name)]
    for device in ("cpu", "cuda"):
        c = flags.resolve(flags.parse([]), device, 1)
        assert {k: getattr(c, k) for k in flags.DEFAULTS[device]} == flags.DEFAULTS[device]
        assert c.device == device and flags.changed(c) == {}


# ---------------------------------------------------------------------------------------------------- bad command lines

BAD = [  # what is wrong by itself: argv, the flag and the value that the message names
    *((f"--{name} {value}", value) for value in (0, -3) for name in
      "depth width head-dim grouping grow vocab seqlen batch grad-accum steps world replicas chunk log-every".split()),
    *((f"--lr {value}", value) for value in ("-0.1", "0", "nan", "inf")),
    *((f"--clip {value}", value) for value in ("-1", "nan", "inf")),
    *((f"--min-shard-mib {value}", value) for value in ("-1", "nan", "inf")),
    *((f"--remat-ratio {value}", value) for value in ("-0.1", "1.5", "nan", "inf")),
    ("--warmup -1", -1), ("--seed -1", -1), (f"--seed {2**64}", 2**64),
    ("--compile-options max_autotune", "max_autotune"),
    *((f"--{name} {value}", value) for name, value in dict(
        device="tpu", wrapper="zero", mode="zero3", compile="all", attn="eager", sdpa="fast", remat="all", loss="half",
        wandb="maybe", mlp="thin", optim="never").items()),
    ("--mlp-chunk -1", -1),
    ("--accum-sync first", "first"), ("--link token-ring", "token-ring"), ("--param-dtype fp16", "fp16"),
    ("--reduce-dtype fp16", "fp16"), ("--adam-dtype int8", "int8"),
    ("--depth x", "x"), ("--depth 1.5", "1.5"), ("--lr fast", "fast"), ("--chunk ''", "''"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "value"), BAD, ids=[argv for argv, _ in BAD])
def test_a_bad_value_is_one_message_that_names_flag_and_value(argv, value, capsys):
    with pytest.raises(SystemExit) as exit:
        flags.parse(argv.split())
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == ""
    flag = argv.split()[0]
    assert err.count("For full helptext") == 1 and re.search(rf"{flag}\b", err), err
    number = re.escape(str(value)) + (r"(\.0)?" if re.fullmatch(r"-?\d+", str(value)) else "")
    assert re.search(rf"(?<![\w.]){number}(?![\w.])", err), f"does not name {value}: {err}"


def test_every_flag_that_is_not_free_text_has_a_bad_value_above():
    # forms of --data: below
    free = {"data", "results", "group", "tags", "profile", "verbose", "debug", "flex_options"}
    free |= {"reshard", "explain_memory", "remat_norm", "remat_core", "cuda_graph"}
    assert {argv.split()[0] for argv, _ in BAD} == {flags.flag(name) for name in FIELDS.keys() - free}
    assert {name for name, kind in get_type_hints(Output).items() if kind in (str, bool)} <= free


@pytest.mark.parametrize("argv", ["--depth 0", "--depth x", "--no-such-thing", "--mode zero3", "--depth"])
def test_a_bad_command_line_is_not_repeated_by_other_ranks(argv, capsys, monkeypatch):
    monkeypatch.setattr(flags.time, "sleep", lambda _: None)
    with pytest.raises(SystemExit) as exit:
        flags.parse(argv.split(), rank=1)
    assert exit.value.code == 2 and capsys.readouterr() == ("", "")


def test_the_limits_themselves_are_allowed():
    flags.parse("--remat-ratio 0 --clip 0 --warmup 0 --seed 0 --min-shard-mib 0 --depth 1 --grouping 1".split())
    flags.parse("--remat-ratio 1 --compile-options a=b c=1=2 --tags --no-reshard --no-debug".split())


MISFITS = [  # what is wrong together: argv, world, what the message names
    ("--width 100 --head-dim 32", 1, ["--width 100", "--head-dim 32"]),
    ("--width 16 --head-dim 32", 1, ["--width 16", "--head-dim 32"]),
    ("--width 96 --head-dim 3", 1, ["--head-dim 3", "even"]),
    ("--grouping 3", 1, ["--grouping 3", "4 heads"]),
    ("--grouping 8", 1, ["--grouping 8", "4 heads"]),
    ("--vocab 255", 1, ["--vocab 255", "256", "stdlib"]),
    ("--vocab 100 --data overfit", 1, ["--vocab 100", "256", "overfit"]),
    ("--vocab 100 --data text:here", 1, ["--vocab 100", "256", "text:here"]),
    ("--mode hybrid_shard", 3, ["--replicas 2", "3 ranks"]),
    ("--mode hybrid_shard", 1, ["--replicas 2", "1 rank "]),
    ("--mode hybrid_shard --replicas 8", 4, ["--replicas 8", "4 ranks"]),
    ("--wrapper none", 2, ["--wrapper none", "one rank", "2"]),
    ("--world 8", 2, ["--world 8", "one process", "2", "without torchrun"]),
    ("--world 8 --wrapper none", 1, ["--wrapper none", "one rank", "8"]),
    ("--world 8 --mode hybrid_shard --replicas 3", 1, ["--replicas 3", "8 ranks"]),
    ("--wrapper none --param-dtype bf16", 1, ["--wrapper none", "--param-dtype"]),
    ("--attn flex", 1, ["--attn flex", "CUDA"]),
    ("--sdpa cudnn", 1, ["--sdpa cudnn", "CUDA"]), ("--sdpa efficient", 1, ["--sdpa efficient", "CUDA"]),
    ("--flex-options here.json", 1, ["--flex-options here.json", "--attn flex"]),
    ("--compile step --grad-accum 2", 1, ["--compile step", "--grad-accum", "2"]),
    ("--compile step --accum-sync last", 1, ["--accum-sync last", "--compile step"]),
    ("--wrapper fsdp2 --compile fwdbwd", 1, ["--wrapper fsdp2", "--compile fwdbwd", "blocks"]),
    ("--wrapper fsdp2 --compile blocks --mode replicate", 1, ["--wrapper fsdp2", "--mode replicate"]),
    ("--wrapper ddp --compile none --mode hybrid_shard --replicas 1", 1, ["--wrapper ddp", "--mode hybrid_shard"]),
    ("--wrapper ddp --compile none --reduce-dtype bf16", 1, ["--wrapper ddp", "--reduce-dtype bf16", "CUDA"]),
    ("--wrapper ddp --compile none --min-shard-mib 1", 1, ["--wrapper ddp", "--min-shard-mib"]),
    ("--compile step -vv", 1, ["-vv", "--compile step"]),
    ("--cuda-graph", 1, ["--cuda-graph", "CUDA"]),
    ("--mlp lean --remat pointwise", 1, ["--mlp lean", "--remat pointwise"]),
    ("--mlp lean --wrapper ddp --compile none --param-dtype bf16", 1, ["--mlp lean", "--wrapper ddp", "fp32"]),
    ("--mlp-chunk 64", 1, ["--mlp-chunk 64", "--mlp lean"]),
    ("--remat-core --remat mlp --compile none", 1, ["--remat-core", "--remat mlp"]),
    ("--remat-core --remat both --compile fwdbwd", 1, ["--remat-core", "--compile fwdbwd", "--compile none"]),
    ("--no-remat-norm --remat block", 1, ["--no-remat-norm", "--remat block"]),
    ("--optim in-backward --compile none", 1, ["--optim in-backward", "--clip 1.0", "--clip 0"]),
    ("--optim in-backward --clip 0 --compile fwdbwd", 1, ["--optim in-backward", "--compile fwdbwd", "use --compile"]),
    ("--optim in-backward --clip 0 --compile none --grad-accum 2", 1, ["--optim in-backward", "--grad-accum 2"]),
    ("--optim in-backward --clip 0 --compile none --wrapper fsdp2", 1, ["--optim in-backward", "--wrapper fsdp2"]),
    ("--optim in-backward --clip 0 --compile none -vv", 1, ["-vv", "--optim in-backward"]),
    ("--data bytes", 1, ["--data bytes", "stdlib", "text:PATH", "bin:GLOB", "random", "overfit"]),
    ("--data text:", 1, ["--data text:", "text:PATH"]),
    ("--data stdlib:x", 1, ["--data stdlib:x"]),
    ("--compile blocks --compile-options max_autotone=1", 1, ["--compile-options", "max_autotone"]),
    ("--results {tmp}", 1, ["--results {tmp}", "directory"]),
    ("--results {tmp}/file/rows.jsonl", 1, ["--results {tmp}/file/rows.jsonl"]),
    ("--device cuda", 1, ["--device cuda", "no GPU", "--device cpu"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "world", "names"), MISFITS, ids=[f"{argv} on {n}" for argv, n, _ in MISFITS])
def test_values_that_do_not_fit_end_before_any_process_group_exists(argv, world, names, train, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was asked for"))
    (tmp_path / "file").touch()
    defaults = "--head-dim 32 --width 128 --grouping 4".split()
    done = train(*defaults, *argv.format(tmp=tmp_path).split(), world=world)
    assert done.code == 2 and done.out == ""
    line = one_line(done.err)
    assert all(name.format(tmp=tmp_path) in line for name in names), line


def test_what_fits_is_accepted():
    def fits(argv, device="cpu", world=1):
        return flags.resolve(flags.parse(argv.split()), device, world)

    assert fits("--vocab 100 --data random").vocab == 100
    assert fits("--vocab 100 --data bin:x").vocab == 100
    assert fits("--mode hybrid_shard", world=4).replicas == 2
    assert fits("--attn flex", "cuda").attn == "flex"
    assert fits("--sdpa efficient", "cuda").sdpa == "efficient"
    with pytest.raises(ValueError, match="--sdpa math: .* --attn flex"):
        fits("--attn flex --sdpa math", "cuda")
    for argv in ("--wrapper fsdp2 --compile blocks", "--world 2", "-vv", "--explain-memory",
                 "--optim in-backward --clip 0 --compile none"):  # fmt: skip
        with pytest.raises(ValueError, match=f"--cuda-graph: .*{argv.split()[0]}"):
            fits(f"--cuda-graph {argv}", "cuda")
    assert fits("--cuda-graph", "cuda").cuda_graph
    assert fits("--wrapper none").param_dtype == "fp32"
    assert fits("--remat both --remat-core --no-remat-norm", "cuda").remat_core  # the published policy
    assert fits("--remat both --remat-core --wrapper none").remat_core
    assert fits("--mlp lean --mlp-chunk 64 --remat block --optim in-backward --clip 0 --compile blocks").mlp == "lean"
    assert fits("--wrapper ddp --compile none", world=2).mode == "replicate"
    assert fits("--lr 1", "cuda").lr == 1 and fits("", "cuda").param_dtype == "bf16"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--dpeth 3", r"--dpeth[\s\S]*Perhaps you meant:[\s\S]*--depth"),
        ("--remat_ration 1", "--remat-ratio"),
        ("--no-such-thing", "--no-such-thing"),
        ("--reshard False", "False"),
        ("--depth", "--depth"),
        ("stray", "stray"),
        ("--depth 0", "--depth 0: must be at least 1"),
        ("--lr -1", "--lr -1.0: must be a positive number"),
        ("--world 0", "--world 0: must be at least 1"),
        ("--world 8 --link token-ring", "--link token-ring: must be a100-nvlink,"),
        ("--mode zero", "--mode"),
    ],
)
def test_a_bad_command_line_exits_2_with_one_box_and_imports_no_torch(argv, expected):
    done = python(*argv.split())
    assert done.code == 2 and done.out == ""
    assert done.err.count("For full helptext") == 1 and re.search(expected, done.err), done.err
    assert "torch" not in done.imports


def test_a_value_that_only_the_device_refuses_exits_2(tmp_path):
    done = python("--width", 100, "--device", "cpu", "--results", tmp_path / "rows.jsonl", trace=False)
    assert done.code == 2 and one_line(done.err) == "error: --width 100: must be a multiple of --head-dim 32"
    assert not (tmp_path / "rows.jsonl").exists()


# --------------------------------------------------------------------------------------------------------- environment


@pytest.mark.parametrize("there", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "RANK WORLD_SIZE LOCAL_RANK",
                                   "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"])  # fmt: skip
def test_part_of_torchruns_environment_is_an_error_that_lists_the_rest(there, monkeypatch, capsys):
    for name in there.split():
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as exit:
        flags.ranks()
    assert exit.value.code == 2
    given, missing = one_line(capsys.readouterr().err).split("set but not")
    for name in TORCHRUN:
        if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            assert (re.search(rf"\b{name}\b", missing) is None) == (name in there.split()), name


def test_a_rank_without_a_world_size_exits_2_before_torch_is_imported():
    done = python(*TINY, env={"RANK": "0"})
    assert done.code == 2 and "torch" not in done.imports
    assert "WORLD_SIZE" in one_line(done.err)


@pytest.mark.parametrize(("name", "value"), [("RANK", "one"), ("WORLD_SIZE", "2x"), ("WORLD_SIZE", "0"), ("RANK", "2")])
def test_an_environment_that_makes_no_sense_is_one_line(name, value, monkeypatch, capsys):
    good = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    for key, text in (good | {name: value}).items():
        monkeypatch.setenv(key, text)
    with pytest.raises(SystemExit) as exit:
        flags.ranks()
    assert exit.value.code == 2 and name in one_line(capsys.readouterr().err)


def test_without_torchrun_there_is_one_rank_and_with_it_what_it_says(monkeypatch):
    assert flags.ranks() == (0, 0, 1)
    for i, name in enumerate(("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        monkeypatch.setenv(name, str(5 + i))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert flags.ranks() == (5, 6, 7)


def test_a_port_in_use_is_one_line_and_exit_2(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        done = python(*TINY, "--results", tmp_path / "rows.jsonl", env=env, trace=False)
    assert done.code == 2 and done.out == ""
    line = one_line(done.err)
    assert f"127.0.0.1:{port}" in line and "in use" in line and "another port" in line


def gpus(monkeypatch, count, nccl=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda *_: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("waits for ranks that never come"))
    monkeypatch.setattr(flags.time, "sleep", lambda _: None)


def test_more_ranks_than_gpus_are_told_by_rank_0_which_has_one(train, monkeypatch):
    gpus(monkeypatch, 1)
    sizes = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    for name, value in (sizes | dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")).items():
        monkeypatch.setenv(name, value)
    done = train("--device", "cuda", world=2)
    assert done.code == 2
    line = one_line(done.err)
    assert "--nproc-per-node" in line and "1" in line


def test_a_torch_without_nccl_is_one_line(train, monkeypatch):
    gpus(monkeypatch, 8, nccl=False)
    done = train("--device", "cuda")
    assert done.code == 2 and "NCCL" in (line := one_line(done.err)) and "--device cpu" in line


def test_a_fault_that_only_another_rank_has_is_told_by_that_rank(train, monkeypatch):
    monkeypatch.setattr(flags.time, "sleep", lambda _: None)
    monkeypatch.setattr(main, "connect", lambda *_: torch.device("cpu"))
    done = train("--data", "bin:/absent/here.bin", rank=1, world=2)
    assert done.code == 3 and "/absent/here.bin" in one_line(done.err)


# ----------------------------------------------------------------------------------------------------------- bad data


def header(count, magic=20240520, version=1):
    return struct.pack("<3i", magic, version, count).ljust(1024, b"\0")


DATA = {  # --data, the file's bytes (None: no file), what the line names beside the file
    "missing bin": ("bin", None, "none"),
    "missing text": ("text", None, "No such file"),
    "empty bin": ("bin", b"", "byte 0"),
    "empty text": ("text", b"", "byte 0"),
    "one token too short": ("bin", bytes(2 * 16), "token 16"),
    "one byte too short": ("text", b"x" * 16, "token 16"),
    "wrong magic": ("bin", header(50, magic=20240521) + bytes(100), "byte 0"),
    "wrong version": ("bin", header(50, version=2) + bytes(100), "byte 4"),
    "cut off": ("bin", header(50) + bytes(98), "byte 8"),
    "odd length": ("bin", bytes(101), "byte 100"),
    "id of the vocabulary's size": ("bin", struct.pack("<40H", *[7] * 33, 256, *[7] * 6), "token 33"),
}


@pytest.mark.parametrize("case", DATA)
def test_a_bad_data_file_exits_3_naming_file_and_place(case, train, tmp_path):
    form, content, place = DATA[case]
    path = tmp_path / "planted.bin"
    if content is not None:
        path.write_bytes(content)
    done = train("--data", f"{form}:{path}")
    assert done.code == 3 and done.row is None
    line = one_line(done.err)
    assert str(path) in line and place in line, line


def test_data_just_long_enough_is_trained_on(train, tmp_path):
    (tmp_path / "planted.bin").write_bytes(struct.pack("<17H", *range(17)))
    assert train("--data", f"bin:{tmp_path}/planted.bin", "--steps", 1).code == 0


# ------------------------------------------------------------------------------------------------------------ one rank


def test_a_run_of_one_step_ends_well_and_claims_no_statistics(train):
    done = train("--steps", 1)
    assert done.code == 0 and done.err == ""
    assert done.row["n"] == 0 and done.row["step_ms"] is None and done.row["tok_s"] is None
    assert [s["step"] for s in done.steps] == [1] and done.row["loss"] == done.steps[0]["loss"]


def test_the_learning_rate_warms_up_and_decays_to_a_tenth():
    c = flags.resolve(flags.parse("--lr 1 --warmup 4 --steps 104".split()), "cpu", 1)
    lr = [main.Run.lr(SimpleNamespace(c=c), k) for k in range(104)]
    assert lr[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a > b for a, b in zip(lr[4:], lr[5:], strict=False))
    assert lr[54] == pytest.approx(0.55) and 0.1 < lr[-1] < 0.101


def test_equal_global_batches_give_equal_losses_however_they_are_cut(train):
    whole = train("--batch", 4, "--log-every", 1)
    cut = train("--batch", 2, "--grad-accum", 2, "--log-every", 1)
    assert whole.code == cut.code == 0 and len(whole.steps) == 6
    for a, b in zip(whole.steps, cut.steps, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5), a["step"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4), a["step"]


SYSTEM = {  # flags that must not change the loss: values, relative tolerance over six steps
    "wrapper none": ("--wrapper none", 0), "replicate": ("--mode replicate", 0),
    "hybrid": ("--mode hybrid_shard --replicas 1", 0), "no reshard": ("--no-reshard", 0),
    "min shard": ("--min-shard-mib 0.001", 0), "mlp": ("--remat mlp", 0), "attn": ("--remat attn", 0),
    "both": ("--remat both", 0), "block": ("--remat block", 0), "pointwise": ("--remat pointwise", 0),
    "half": ("--depth 2 --remat block --remat-ratio 0.5", 0), "chunked": ("--loss chunked --chunk 7", 1e-6),
    "flash": ("--sdpa flash", 0), "math": ("--sdpa math --remat block", 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("case", SYSTEM)
def test_a_system_flag_does_not_change_the_loss(case, train):
    argv, tolerance = SYSTEM[case]
    plain = train("--depth", 2, "--log-every", 1)
    other = train("--depth", 2, *argv.split(), "--log-every", 1)
    assert plain.code == other.code == 0
    for a, b in zip(plain.steps, other.steps, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance, abs=0), a["step"]


def test_bf16_runs_and_stays_near_fp32(train):
    exact = train("--log-every", 1)
    half = train("--param-dtype", "bf16", "--reduce-dtype", "bf16", "--adam-dtype", "bf16", "--log-every", 1)
    assert half.code == 0 and half.row["param_dtype"] == half.row["reduce_dtype"] == "bf16"
    for a, b in zip(exact.steps, half.steps, strict=True):
        assert 0 < abs(a["loss"] - b["loss"]) < 0.02, a["step"]


def test_overfit_learns_its_batch(train):
    done = train("--data", "overfit", "--steps", 60, "--lr", "0.02", "--seqlen", 8)
    assert done.code == 0 and done.row["loss"] < done.steps[0]["loss"] / 2


def test_profiled_steps_leave_a_trace_and_enter_no_statistic(train, tmp_path):
    plain = train("--steps", 9)
    done = train("--steps", 9, "--profile", tmp_path / "traces")
    assert (plain.row["n"], done.row["n"]) == (6, 3)
    trace = tmp_path / "traces" / "rank0.trace.json.gz"
    assert str(trace) in done.out and "memory snapshot: it needs CUDA" in done.out
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"step 3", "step 4", "step 5", "aten::mm"} <= names and not {"step 2", "step 6"} & names


def test_v_prints_stages_and_placements_and_vv_writes_norms(train):
    quiet, v, vv = train(), train("-v"), train("-vv", "--log-every", 2)
    stages = ["model", "wrap", "to_empty", "init", "optimizer", "mask", "first step"]
    patterns = [rf"^{stage} +[\d']+ +[\d']+$" for stage in stages]
    patterns += [r"^ +blocks\.0\.mlp\.up\.weight +\(128, 32\) +Shard\(dim=0\)"]
    for done, says in ((quiet, False), (v, True), (vv, True)):
        assert done.code == 0 and done.err == ""
        assert [bool(re.search(pattern, done.out, re.MULTILINE)) for pattern in patterns] == [says] * 8
    assert not any(key.startswith(("norm/", "grad/")) for step in v.steps for key in step)
    assert [step["step"] for step in vv.steps] == [1, 2, 4, 6]
    for step in vv.steps:
        grads = {key: value for key, value in step.items() if key.startswith("grad/")}
        norms = {key: value for key, value in step.items() if key.startswith("norm/")}
        assert len(grads) == len(norms) == 16 and "grad/blocks.0.attn.q.weight" in grads
        assert math.sqrt(sum(g * g for g in grads.values())) == pytest.approx(step["grad_norm"], rel=1e-5)
        assert norms["norm/norm.weight"] == pytest.approx(math.sqrt(32), rel=0.05)
    assert [s["loss"] for s in vv.steps if s["step"] in (1, 6)] == [s["loss"] for s in quiet.steps]


def test_compile_options_are_read_as_python_literals():
    parsed = flags.parse("--compile-options max_autotune=True a.b=2 name=triton eq=x=1".split())
    assert flags.compile_options(parsed) == {"max_autotune": True, "a.b": 2, "name": "triton", "eq": "x=1"}
    assert flags.compile_options(flags.parse([])) is None
    assert flags.compile_options(flags.parse("--compile-options plain a=b".split())) == {"plain": True, "a": "b"}


@pytest.mark.parametrize("plain", [[], ["plain"]])
@pytest.mark.parametrize("mode", ["blocks", "model", "fwdbwd", "step"])
def test_compile_options_reach_every_graph_of_the_model(mode, plain, train, monkeypatch):
    ran, compile = [], torch.compile

    def record(fn=None, options=None, **how):
        compiled, name = compile(fn, **{**how, "backend": "eager"}), getattr(fn, "__name__", type(fn).__name__)

        def run(*args, **kwargs):
            ran.append((name, options))
            return compiled(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", record)
    ours = ["max_autotune=False", "triton.cudagraphs=False"]
    done = train("--compile", mode, "--compile-options", *plain, *ours, "--steps", 2)
    assert done.code == 0, done.err
    options = {"max_autotune": False, "triton.cudagraphs": False}
    graphs = [how for name, how in ran if name != "update"]  # the optimizer's graph has none of them
    assert graphs and all(how.items() >= options.items() for how in graphs), ran
    assert all((how == options) == bool(plain) for how in graphs), ran
    assert done.row["compile"] == mode and done.row["flags"]["compile_options"] == [*plain, *ours]


def test_debug_shows_the_traceback(train, monkeypatch):
    planted(monkeypatch, "fwd", RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        train("--debug")


# --------------------------------------------------------------------------------------------- what ends a started run


def planted(monkeypatch, where, error, call=1):
    """Raise `error` in the `call`-th forward, backward or update, or while weights are initialised."""
    built, count = main.Run.build, []

    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise error

    def due():
        count.append(0)
        return len(count) == call

    def build(run):
        built(run)
        step = run.step
        loss_fn, update_fn = step.loss_fn, step.update_fn

        def loss(*batch):
            if where == "bwd":
                return Raise.apply(loss_fn(*batch)) if due() else loss_fn(*batch)
            if where == "fwd" and due():
                raise error
            return loss_fn(*batch)

        def update(grads):
            if where == "step" and due():
                raise error
            return update_fn(grads)

        step.loss_fn, step.update_fn = loss, update

    def init(_):
        raise error

    monkeypatch.setattr(main.Run, "build", build)
    if where == "init":
        monkeypatch.setattr(Transformer, "init_weights", init)


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")


@pytest.mark.parametrize("where", ["init", "fwd", "bwd", "step"])
def test_out_of_memory_exits_6_with_the_phase_in_the_row_and_what_to_turn(where, train, monkeypatch):
    planted(monkeypatch, where, OOM, call=1 if where == "init" else 3)
    done = train("--log-every", 1)
    assert done.code == 6 and done.row["outcome"] == f"OOM {where}"
    assert [s["step"] for s in done.steps] == ([] if where == "init" else [1, 2])
    assert done.row["n"] == 0 and done.row["step_ms"] is None and done.row["world"] == 1
    assert set(KEYS) <= done.row.keys()
    line = one_line(done.err)
    assert f"OOM {where}" in line and "2.00 GiB" in line, f"neither where nor the wanted bytes: {line}"
    assert all(knob in line for knob in ("--batch", "--remat", "ranks")), f"no way out: {line}"


def test_memory_that_the_system_refuses_is_out_of_memory_too(train, monkeypatch):
    planted(monkeypatch, "fwd", RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"))
    done = train()
    assert (done.code, done.row["outcome"]) == (6, "OOM fwd")


def test_any_other_error_is_one_line_exit_1_and_a_row(train, monkeypatch):
    planted(monkeypatch, "bwd", ValueError("planted\nin two lines"), call=2)
    done = train("--log-every", 1)
    assert done.code == 1 and done.row["outcome"] == "failed: ValueError: planted in two lines"
    assert "ValueError: planted in two lines" in one_line(done.err)
    assert done.row["loss"] == done.steps[0]["loss"] and len(done.steps) == 1


def test_data_that_turns_out_bad_in_mid_run_exits_3_with_a_row(train, monkeypatch):
    def bad(self):
        raise main.DataError("file.bin, token 5: expected an id below --vocab 256, found 300")

    monkeypatch.setattr(main.Batches, "__next__", bad)
    done = train()
    assert done.code == 3 and "file.bin, token 5" in one_line(done.err) and "file.bin, token 5" in done.row["outcome"]


def test_a_gradient_that_is_not_finite_exits_5_with_a_row(train):
    done = train("--lr", "1e20")
    assert done.code == 5 and done.row["outcome"].startswith("failed: ") and done.row["loss"] == "nan"
    line = one_line(done.err)
    assert "nan" in line and "step 6" in line and "--lr 1e+20" in line


def test_a_gradient_that_is_not_finite_is_told_by_rank_0_alone(train):
    done = train("--lr", "1e20", rank=1)  # the norm is the same on every rank
    assert (done.code, done.out, done.err, done.row) == (5, "", "", None)


def test_a_results_file_that_is_lost_in_mid_run_costs_a_warning_and_not_the_run(train, monkeypatch):
    built = main.Run.build

    def build(run):  # after the check at the start: the file becomes a folder
        Path(run.c.results).unlink()
        Path(run.c.results).mkdir()
        built(run)

    monkeypatch.setattr(main.Run, "build", build)
    done = train()
    assert done.code == 0 and "outcome  ok" in done.out
    assert all(line.startswith("warning: ") for line in done.err.splitlines())
    assert "results file: IsADirectoryError" in done.err and '"outcome": "ok"' in done.err, "the row is lost"


# ----------------------------------------------------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    argv = [*TINY, "--log-every", 1, "--wandb", "offline", "--tags", "a", "b", "--group", "g"]
    done = torchrun(*argv, "--results", folder / "deep" / "rows.jsonl", cwd=folder)
    assert done.code == 0, done.err
    return SimpleNamespace(out=done.out, err=done.err, folder=folder, results=folder / "deep" / "rows.jsonl")


def test_two_ranks_print_the_header_the_steps_and_the_result_once(two_ranks):
    lines = two_ranks.out.splitlines()
    expected = [r"commit [0-9a-f]{12}(?: \(dirty\))?, torch \S+, CPU .*, 2 ranks", r".*\bdepth=1\b.*\bcompile=none\b.*",
                r"attention: sdpa flash \(auto\)",
                r"data stdlib, .* tokens, .*", r"28'000 parameters, .* MiB on this rank; 0 of 16 replicated.*",
                r"[\d.]+ MFLOP per token \(causal; PaLM [\d.]+\), \S+ TFLOP per step and rank", r"ln V = 5\.5452",
                *(rf"step {k}/6  loss \d\.\d{{4}}  lr \S+  \|g\| \S+  .* ms  .* tok/s" for k in range(1, 7)),
                r"outcome  ok, loss \d\.\d{4}", r"memory   .* MiB resident, .*",
                r"step     .* ms median \[.*\] n 3, compile n/a s", r"speed    .* tok/s, .* tok/s/rank",
                r"MFU, %   n/a causal, n/a PaLM, n/a HFU"]  # fmt: skip
    assert len(lines) == len(expected), two_ranks.out
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (pattern, line)


def test_two_ranks_append_one_row_with_every_key_and_the_steps(two_ranks):
    row, steps = read(two_ranks.results)
    assert set(KEYS) <= row.keys(), set(KEYS) - row.keys()
    settings = dict(world=2, outcome="ok", wrapper="simple", mode="fully_shard", compile="none", attn="sdpa",
                    remat="none", remat_ratio=1.0, loss_kind="full", depth=1, width=32, seqlen=16, batch=2,
                    grad_accum=1, param_dtype="fp32", reduce_dtype="fp32", n=3, compile_s=None, mfu=None,
                    mfu_palm=None, hfu=None)  # fmt: skip
    assert {key: row[key] for key in settings} == settings
    assert row["flags"] == dict(depth=1, width=32, head_dim=16, grouping=2, seqlen=16, steps=6, batch=2, compile="none",
                                wandb="offline", group="g", tags=["a", "b"])  # fmt: skip
    assert re.fullmatch("[0-9a-f]{40}", row["commit"]) and isinstance(row["dirty"], bool)
    assert row["torch"] == torch.__version__ and row["device"].startswith("CPU")
    assert row["step_ms_min"] <= row["step_ms"] <= row["step_ms_max"] and row["peak_rss_mib"] > 100
    assert row["tok_s"] == pytest.approx(2 * 2 * 16 / row["step_ms"] * 1e3)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    assert all({"loss", "lr", "grad_norm", "ms", "tok_s"} <= s.keys() for s in steps)
    assert row["loss"] == steps[-1]["loss"] and abs(steps[0]["loss"] - math.log(256)) < 0.1


def test_two_ranks_train_as_one_with_the_same_global_batch(two_ranks, train):
    _, two = read(two_ranks.results)
    one = train("--batch", 4, "--log-every", 1).steps
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), a["step"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4), a["step"]


def test_wandb_offline_writes_one_run_beside_the_results(two_ranks):
    (run,) = two_ranks.results.parent.glob("wandb/offline-run-*")
    assert list(run.glob("*.wandb"))
    assert "warning:" not in two_ranks.err and not (two_ranks.folder / "wandb").exists()


@pytest.mark.parametrize(
    ("argv", "code", "pattern"),
    [("--depth 0", 2, "--depth 0: must be at least 1"), ("--data bin:/absent.bin", 3, "error: .*/absent.bin")],
)
def test_two_ranks_print_an_error_that_both_have_once(argv, code, pattern, tmp_path):
    done = torchrun(*TINY, "--results", tmp_path / "rows.jsonl", *argv.split())
    assert done.code == code
    assert len(re.findall(pattern, done.err)) == 1, f"not once: {done.err}"
    assert "Traceback" not in done.err and done.out == ""


# -------------------------------------------------------------------------------------------------------------- source


def test_checks_survive_python_O_and_main_stays_within_250_lines():
    for module in (main, flags, steps_of):
        source = Path(module.__file__).read_text()
        asserts = [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
        assert not asserts, (module.__name__, asserts)
    assert len(Path(main.__file__).read_text().splitlines()) <= 250


@pytest.mark.parametrize("how", ["", "--wrapper fsdp2", "--wrapper ddp", "--mode hybrid_shard --replicas 2"])
def test_a_simulated_world_trains_and_its_row_says_so(how, train):
    done = train("--world", 8, "--link", "20:370", "--steps", 5, "--compile", "none", *how.split())
    assert done.code == 0 and done.row["outcome"] == "ok", done.err
    assert done.row["world"] == "8(sim 20:370)" and "8(sim 20:370) ranks" in done.out
    moved = done.row["collectives"]
    assert ("all_gather" in moved) == ("reduce_scatter" in moved) == ("ddp" not in how)
    assert all(each["n"] > 0 and each["mib"] >= 0 and each["ms"] >= 0.02 * each["n"] for each in moved.values())
    assert done.row["tok_s"] == pytest.approx(8 * done.row["tok_s_rank"])
    assert abs(done.row["loss"] - math.log(256)) < 0.5  # equal shards: a model that can learn little
    assert "collectives" not in train("--compile", "none").row  # and afterwards a real group
