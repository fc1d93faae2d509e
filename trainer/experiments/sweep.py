"""Ablations: each cell (a line of flags) is a run of main.py of its own; a row stands for each, whatever its end.

    ./launch.sh sweep variants --small       a named axis, at sizes for a CPU
    ./launch.sh sweep all --wandb offline    every published table, each cell once, in one file of results
    ./launch.sh sweep cells.txt --steps 30   a file: one cell per line, '#' comments, nproc=N before the flags

main.py writes the row and copies $SWEEP_CELL into it. Where it ended without one (killed, crashed, too slow), this
program writes `failed: ...` in its place. A second call runs what has no row yet, then tries again what failed; a bad
shape and out of memory are results. Ranks that an axis names and the machine lacks are simulated: `world` in the row is
8(sim h100-nvlink). --world for a sweep is for cells that name no ranks, as --nproc is. With --wandb the cells are runs
of one group, and one more run in it holds a table of rows per study.
"""

import argparse
import contextlib
import ctypes
import functools
import importlib.metadata
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

from trainer.experiments.logging import append_jsonl, log_tables, read_rows

ROOT = Path(__file__).resolve().parents[2]
TINY = "--device cpu --width 128 --depth 2 --head-dim 16 --vocab 512 --seqlen 64 --batch 2 --steps 6".split()
# No part of what a cell is: given on the command line they go to every run.
OUTPUT = {"--wandb", "--group", "--tags", "--profile", "--log-every", "--verbose", "-v", "-vv", "--debug"}
COLUMNS = {"peak_alloc_mib": ("peak MiB", 0), "peak_rss_mib": ("peak RSS MiB", 0), "step_ms": ("step ms", 1),
           "mfu": ("MFU %", 1), "loss": ("loss", 4)}
GRACE_S = 10  # from SIGTERM to SIGKILL
VMSTAT = Path("/proc/vmstat")
Flags = dict[str, tuple[str, ...]]  # {"--depth": ("8",), "--no-reshard": ()}


def join(flags: Flags) -> str:
    return shlex.join(word for flag in sorted(flags) for word in (flag, *flags[flag]))


@functools.cache
def gpus() -> int:
    """GPUs that a run may use, counted as launch.sh does; 0 without any."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 0
    seen, visible = len(re.findall("^GPU", listed, re.M)), os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen if not seen or visible is None else len([each for each in visible.split(",") if each])


def axes(small: bool) -> dict[str, list[str]]:
    """The named sweeps as lines of a file. The full sizes, and the flags in `scaling`, are the published tables'. Every
    line says all that any of them varies: a cell that two tables share has one name."""

    def grid(line, *values):
        return [line.format(*each) for each in itertools.product(*values)]

    def pick(full, tiny):
        return tiny if small else full

    def on(ranks):
        return f"nproc={ranks}" if ranks <= pick(max(1, gpus()), 2) else f"--world {ranks} --link h100-nvlink"

    base = pick("--batch 8 --depth 4 --param-dtype bf16 --seqlen 4096 --width 4096", "--param-dtype fp32")
    base += " --attn sdpa --grouping 4 --min-shard-mib 0 --mode fully_shard --remat none --wrapper simple"
    compiled = f"--compile {pick('fwdbwd', 'none')}"  # to compile takes a CPU longer than all else
    scaling = f"{compiled} --remat both --attn flex"
    remats, attns = ("none", "mlp", "attn", "both", "block", "pointwise"), ("sdpa", "flex")
    widths = pick((768, 1024, 2048, 4096, 6144, 8192, 12288, 16384), (96, 128, 256, 2048))  # 768, 96: a bad shape
    local, total = pick((8, 64), (2, 16))
    shapes = [f"{on(pick(4, 2))} {each}" for each in pick(("--depth 8", "--depth 32 --seqlen 128"), ("--depth 2",))]
    shapes += [f"--world 8 --link 4090-pcie {each}" for each in pick(("", "--depth 32 --seqlen 128"), ("--depth 4",))]
    mfu = ("both --mode fully_shard", "both --mode replicate", "both --grouping 1", f"both --depth {pick(8, 4)}",
           f"both --seqlen {pick(512, 32)}", "none")  # fmt: skip
    modes = ("replicate", "fully_shard", "fully_shard --no-reshard", "hybrid_shard --replicas 2")
    wrappers = ("simple --compile fwdbwd", "simple --compile blocks", "fsdp2 --compile blocks", "ddp --compile blocks")
    kernels = pick(("flex", "sdpa --sdpa flash", "sdpa --sdpa cudnn"), ("sdpa", "sdpa --sdpa math"))
    lengths = pick(("4096 --batch 8", "8192 --batch 4", "16384 --batch 2"), ("64", "128"))
    card = "--device cuda --steps 30 --compile {} --remat {} --attn {} --loss {}"
    steps = f"--device cuda --batch 8 --depth 4 --param-dtype bf16 --seqlen 4096 --width 4096 --steps {{}} {scaling}"
    rungs = ("--remat-core --no-remat-norm", "--remat-core --no-remat-norm --loss chunked", "--remat-core",
             "--remat-core --loss chunked", "--remat-core --loss chunked --mlp lean",
             "--remat-core --loss chunked --mlp lean --mlp-chunk 8192", "--remat block --loss chunked --mlp lean",
             "--remat-core --remat block --loss chunked --mlp lean",
             "--remat-core --remat block --loss chunked --mlp lean --adam-dtype bf16",
             "--remat-core --remat block --loss chunked --mlp lean --adam-dtype bf16 --optim in-backward --clip 0 "
             f"--compile {pick('blocks', 'none')}")  # fmt: skip
    published = {
        "variants": grid("--remat {} --compile {} --attn {}", pick(remats, ("none", "both", "block")),
                         ("fwdbwd", "model"), attns),
        "seqlen": grid(scaling + " --seqlen {}", pick([2**i for i in range(9, 16)], (32, 64, 128))),
        "depth": grid(scaling + " --depth {}", pick((2, 4, 6, 8, 12, 16, 24, 32), (1, 2, 4))),
        "width": grid(scaling + " --width {}", widths),
        "gpus": [f"{on(n)} {scaling} --batch {local}" for n in pick((1, 2, 3, 4, 6, 8), (1, 2, 4, 8))]
        + [f"{on(n)} {scaling} --batch {total // n}" for n in (1, 2, 4, 8)],  # the same batch per rank, then in all
        "small-params": grid("{} " + scaling + " --min-shard-mib {}", shapes, (pick(1, 0.01), 0)),
        "mfu": grid(f"{on(pick(4, 2))} {compiled} --attn {{}} --remat {{}}", attns, mfu),
        "modes": grid(on(4) + " --compile {} --mode {}", ("none", "fwdbwd"), modes),
        "wrappers": grid("{} --wrapper {}", (on(1), on(8)), wrappers)  # the bare model computes in fp32
        + grid(on(1) + " --wrapper {} --compile fwdbwd --param-dtype fp32", ("simple", "none")),
        "attention": grid(f"{compiled} --attn {{}} --seqlen {{}}", kernels, lengths),
    }  # fmt: skip
    return {axis: [f"{base} {line}" for line in lines] for axis, lines in published.items()} | {
        "gpu-compile": grid(card, ("fwdbwd", "model", "blocks", "none", "step"), ["none"], ["sdpa"], ["full"]),
        "gpu-remat": grid(card, ["fwdbwd"], remats, attns, ["full"]),
        "gpu-ladder": grid(f"{{}} {steps.format(13)} {{}}", map(on, (1, 2, 8)), rungs),
        "gpu-mfu": grid(f"{on(1)} {steps.format(53).replace(scaling, '{}')}", [
            *(f"--attn {attn} --wrapper simple --compile fwdbwd {remat}" for attn in attns for remat in (
                "--remat both", "--remat block --loss chunked --mlp lean", "--remat pointwise --loss chunked", "")),
            "--attn sdpa --wrapper fsdp2 --compile blocks --remat both",
            "--attn sdpa --wrapper none --compile fwdbwd --remat both --param-dtype fp32"]),
        "gpu-compile-depth": grid("--device cuda --steps 6 --compile {} --depth {}",
                                  ("blocks", "model", "fwdbwd", "step"), (4, 8, 16, 32)),
        "gpu-memory": grid(card, ["fwdbwd"], ("none", "both", "block", "pointwise"), ["sdpa"], ("full", "chunked")),
    }


def parse(words: list[str]) -> tuple[int, Flags]:
    """nproc=2 --depth 8 --no-reshard -> (2, {"--depth": ("8",), "--no-reshard": ()}); of two equal flags the last."""
    nproc, flags, last = 1, {}, None
    for word in words:
        if re.fullmatch(r"nproc=[1-9]\d*", word):
            nproc, last = int(word[6:]), None
        elif re.match(r"--?[A-Za-z]", word):
            name, *value = word.split("=", 1)
            last = name.replace("_", "-")
            if last == "--results":
                raise ValueError("--results is one for the whole sweep: give it on the command line")
            flags.pop(last.replace("--no-", "--") if last.startswith("--no-") else last.replace("--", "--no-"), None)
            flags[last] = tuple(value)
        elif last is None:
            raise ValueError(f"expected nproc=N (N >= 1) or a flag, got '{word}'")
        else:
            flags[last] += (word,)
    return 1 if "--world" in flags else nproc, flags  # simulated ranks are one process


def world(nproc: int, flags: Flags) -> int | str:
    """Ranks of a cell; of simulated ones "8(sim h100-nvlink)", as main.py writes it."""
    return f"{flags['--world'][-1]}(sim {flags.get('--link', ['h100-nvlink'])[-1]})" if "--world" in flags else nproc


def studies(target: str, small: bool, nproc: int, extra: list[str]) -> dict[str, list[str]]:
    """Study -> cells of a named axis, of a file, or (`all`) of each axis but those of ./launch.sh gpu, each as
    `nproc=N --flag value ...`, in alphabetical order: the same cell has the same name everywhere. ValueError names the
    file and the line."""
    named, found = axes(small), {}
    if target not in {"all", *named} and not Path(target).is_file():
        raise ValueError(f"unknown axis '{target}': expected a file, all, or one of {', '.join(named)}")
    for study in [axis for axis in named if not axis.startswith("gpu-")] if target == "all" else [target]:
        cells = {}
        for number, line in enumerate(named.get(study) or Path(study).read_text().splitlines(), 1):
            try:
                own = shlex.split(line, comments=True)
                ranks = "--world" in parse(own)[1] or any(word.startswith("nproc=") for word in own)
                more = {flag: value for flag, value in parse(extra)[1].items() if flag != "--world" or not ranks}
                n, flags = parse([f"nproc={nproc}"] + TINY * small + own + shlex.split(join(more)))
            except ValueError as error:
                raise ValueError(f"{study}:{number}: {error}") from None
            if small:  # FlexAttention does not train on a CPU
                flags |= {"--device": ("cpu",)} | ({"--attn": ("sdpa",)} if flags.get("--attn") == ("flex",) else {})
            if own:
                cells[f"nproc={n} {join(flags)}".strip()] = None
        found[Path(study).stem] = list(cells)
        if not cells:
            raise ValueError(f"{study}: no cell in it")
    return found


def read_cells(target: str, small: bool, nproc: int, extra: list[str]) -> list[str]:
    """The cells of `studies`, each once."""
    return list(dict.fromkeys(itertools.chain(*studies(target, small, nproc, extra).values())))


def unfinished(cells: list[str], rows: dict[str, dict]) -> list[str]:
    return [cell for cell in cells if not re.match(r"ok$|OOM|badshape", rows.get(cell, {}).get("outcome", ""))]


def stop(child: subprocess.Popen, token: str):
    """End a cell's processes. torchrun's workers lead sessions of their own: they are found by their environment."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    for environ in Path("/proc").glob("[0-9]*/environ"):  # none on macOS, where the process group has to do
        with contextlib.suppress(OSError):
            if token.encode() in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def oom_kills() -> int:
    """Processes that the kernel has ended to free memory since it started; 0 where it does not tell (not Linux)."""
    with contextlib.suppress(OSError, TypeError):
        return int(re.search(r"^oom_kill (\d+)", VMSTAT.read_text(), re.M)[1])
    return 0


def run(cell: str, program: list[str], timeout: float, log: Path, name: str = "") -> str | None:
    """Run one cell, for W&B under `name`. Returns None when it ended by itself with status 0, else in a few words how
    it ended. Should this program be killed, so is the cell (Linux)."""
    (nproc, flags), token = parse(shlex.split(cell)), f"{os.getpid()}.{time.time_ns()}"
    env = os.environ | {"SWEEP_CELL": cell, "SWEEP_NAME": name, "SWEEP_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    kills, prctl = oom_kills(), getattr(ctypes.CDLL(None), "prctl", None)
    command = [sys.executable, *program, *shlex.split(join(flags))]
    if nproc > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        start = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "env": env, "start_new_session": True}
        follow = prctl and (lambda: prctl(1, signal.SIGTERM))  # PR_SET_PDEATHSIG; torchrun hands the signal on
        child = subprocess.Popen(command, preexec_fn=follow, **start)
    try:
        code = child.wait(timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        stop(child, token)
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-")]
    says = re.compile(r"(\[.*?\]:? *)?(error:|[\w.]*(Error|Exception)\b(?<!ChildFailedError))")  # torchrun says that
    errors = [line for line in lines if says.match(line)]
    reason = (errors or lines or ["no output"])[-1].replace(f"{ROOT}/", "")[:200]
    killed = code == -signal.SIGKILL or code and "exitcode: -9" in text  # torchrun's word for it
    reason = f"while the kernel freed memory: {reason}" if killed and oom_kills() > kills else reason
    return f"exit {code}{f' ({signal.Signals(-code).name})' if code < 0 else ''}: {reason}" if code else None


def failed_row(cell: str, end: str) -> dict:
    """The row of a run that wrote none: what is known from outside. Flags stand under the keys that main.py uses."""
    (nproc, flags), given = parse(shlex.split(cell)), {}
    for flag, values in flags.items():
        key = flag.replace("--no-", "").strip("-").replace("-", "_").replace("loss", "loss_kind")
        values = [int(value) if value.isdigit() else value for value in values] or [not flag.startswith("--no-")]
        given[key] = values[0] if len(values) == 1 else values
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), "commit": "unknown"}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = ["git", "-C", ROOT, "rev-parse", "HEAD"]
        about["commit"] = subprocess.check_output(git, stderr=subprocess.DEVNULL, text=True).strip()
    given["world"] = world(nproc, flags)
    known = {key: value for key, value in given.items() if key != "device"}  # the row's is a device's name
    about |= {"torch": importlib.metadata.version("torch"), **known, "flags": given, "error": end}
    oom = "OOM ?" if "while the kernel freed memory" in end else re.search(r"error: rank \d+: (OOM \w+)|$", end)[1]
    bad_shape = re.search(r"error: --(width|head-dim|grouping) ", end)
    return about | {"outcome": "badshape" if bad_shape else oom or f"failed: {end}", "cell": cell}


def labels(cells: list[str]) -> tuple[str, dict[str, tuple[str, str]]]:
    """The flags that all cells share; of each cell its ranks and its other flags."""
    parsed = {cell: parse(shlex.split(cell)) for cell in cells}
    shared = set.intersection(*(set(flags.items()) for _, flags in parsed.values())) if len(parsed) > 1 else set()
    apart = {flag for flag, _ in shared} | {"--world", "--link"}
    own = {cell: join({k: v for k, v in flags.items() if k not in apart}) for cell, (_, flags) in parsed.items()}
    return join(dict(shared)), {cell: (str(world(*parsed[cell])), flags) for cell, flags in own.items()}


def table(cells: list[str], rows: dict[str, dict]) -> str:
    """Markdown, a line per cell; flags that all share stand once above it, columns without a value are left out."""
    found = [rows.get(cell, {"outcome": "not run"}) for cell in cells]
    columns = {title: (key, d) for key, (title, d) in COLUMNS.items() if any(row.get(key) is not None for row in found)}
    lines = [["n", "flags", "outcome", *columns], ["---"] * 3 + ["---:"] * len(columns)]
    shared, names = labels(cells)
    for cell, row in zip(cells, found, strict=True):
        values = [(row.get(key), digits) for key, digits in columns.values()]
        numbers = [f"{v:,.{d}f}".replace(",", "'") if isinstance(v, int | float) else str(v or "") for v, d in values]
        n, own = names[cell]
        lines.append([str(row.get("world", n)), own, row["outcome"].replace("|", "/"), *numbers])
    return f"all: {shared}\n\n" * bool(shared) + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sweep(tables: dict[str, list[str]], args: argparse.Namespace) -> bool:
    """Run every cell that has no finished row, those never tried first. True: all are finished."""
    cells, rows = list(dict.fromkeys(itertools.chain(*tables.values()))), read_rows(args.results)
    todo, names = sorted(unfinished(cells, rows), key=lambda cell: cell in rows), {}
    for study, own in tables.items():
        names = {cell: f"{study} n={n} {flags}" for cell, (n, flags) in labels(own)[1].items()} | names
    print(f"{len(cells)} cells, {len(cells) - len(todo)} finished before; rows in {args.results}", flush=True)
    deadline = time.monotonic() + args.budget
    for i, cell in enumerate(todo, 1):
        started = time.monotonic()
        left = min(args.timeout, deadline - started)
        if left <= 0:
            break
        print(f"[{i}/{len(todo)}] {names[cell]}", flush=True)
        size = args.results.stat().st_size if args.results.exists() else 0
        log = args.results.parent / "runs" / args.results.stem / f"{zlib.crc32(cell.encode()):08x}.log"
        end = run(cell, [args.program, "--results", str(args.results), *args.output], left, log, names[cell])
        row = read_rows(args.results, size).get(cell)
        if row is None and end == "timeout" and left < args.timeout:
            print(f"    cut short by --budget {args.budget:g}: not counted")
            break
        if row is None:
            row = failed_row(cell, end or "exit 0 without a row")
            append_jsonl(args.results, row)
        elif end:
            print(f"    after its row: {end}")
        print(f"    {row['outcome']} ({time.monotonic() - started:.0f} s, log {log})", flush=True)
    rows = read_rows(args.results)
    for study, own in tables.items():
        print(f"\n## {study}\n" * (len(tables) > 1) + f"\n{table(own, rows)}", flush=True)
    if "--wandb" in (given := parse(args.output)[1]):
        found = {study: [rows[cell] for cell in own if cell in rows] for study, own in tables.items()}
        log_tables(found, args.results, given["--wandb"][-1], given["--group"][-1], given.get("--tags", ()))
    if missing := unfinished(cells, rows):
        print(f"\n{len(missing)} of {len(cells)} cells without a result: the same command tries them again")
    return not missing


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, usage="launch.sh sweep AXIS|all|FILE [options] [main.py's]")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--results", type=Path, help="default: results/sweep-AXIS.jsonl")
    parser.add_argument("--nproc", type=int, default=os.environ.get("NPROC", 1), help="for cells that name none")
    parser.add_argument("--timeout", type=float, default=os.environ.get("CELL_TIMEOUT", 1800), help="seconds, a cell")
    parser.add_argument("--budget", type=float, default="inf", help="seconds, the call; the next one goes on")
    parser.add_argument("--program", default=str(ROOT / "main.py"))
    parser.add_argument("--list", action="store_true", help="print the cells, run nothing")
    target, *rest = sys.argv[1:] or ["-h"]
    args, extra = parser.parse_known_args([target, *rest] if target in ("-h", "--help") else rest)
    try:
        nproc, flags = parse([f"nproc={args.nproc}", *extra])
        output = {flag: flags.pop(flag) for flag in OUTPUT & flags.keys()}
        tables = studies(target, args.small, nproc, shlex.split(join(flags)))
    except ValueError as error:
        parser.exit(2, f"sweep: {error}\n")
    if args.list:
        return print("\n".join(read_cells(target, args.small, nproc, shlex.split(join(flags)))))
    name = f"sweep-{Path(target).stem}{'-small' * args.small}"
    args.results = args.results or Path(f"results/{name}.jsonl")
    if "--wandb" in output:
        output.setdefault("--group", (name,))
    args.output = shlex.split(join(output))
    if args.small:  # at such sizes threads wait for each other more than they compute
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    def end(signum, frame):
        for each in ends:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + signum)  # run() stops its child on the way out

    ends = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    for each in ends:
        signal.signal(each, end)
    sys.exit(0 if sweep(tables, args) else 1)


if __name__ == "__main__":
    main()
