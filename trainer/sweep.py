"""Ablations: each cell (a line of flags) is a run of main.py of its own; a row stands for each, whatever its end.

    ./launch.sh sweep variants --small       a named axis, at sizes for a CPU
    ./launch.sh sweep cells.txt --steps 30   a file: one cell per line, '#' comments, nproc=N before the flags

main.py writes the row and copies $SWEEP_CELL into it. Where it ended without one (killed, crashed, too slow), this
program writes `failed: ...` in its place. A second call runs what has no row yet, then tries again what failed.
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

from trainer.sinks import append_jsonl

ROOT = Path(__file__).resolve().parents[1]
TINY = "--device cpu --width 128 --depth 2 --head-dim 16 --vocab 512 --seqlen 64 --batch 2 --steps 6".split()
# No part of what a cell is: given on the command line they go to every run.
OUTPUT = {"--wandb", "--group", "--tags", "--profile", "--log-every", "--verbose", "-v", "-vv", "--debug"}
COLUMNS = {"peak_alloc_mib": ("peak MiB", 0), "peak_rss_mib": ("peak RSS MiB", 0), "step_ms": ("step ms", 1),
           "mfu": ("MFU %", 1), "loss": ("loss", 4)}
GRACE_S = 10  # from SIGTERM to SIGKILL
Flags = dict[str, tuple[str, ...]]  # {"--depth": ("8",), "--no-reshard": ()}


def join(flags: Flags) -> str:
    return shlex.join(word for flag in sorted(flags) for word in (flag, *flags[flag]))


def axes(small: bool) -> dict[str, list[str]]:
    """The named sweeps as lines of a file. The full sizes, and the flags in `scaling`, are the published tables'."""

    def grid(line, *values):
        return [line.format(*each) for each in itertools.product(*values)]

    def pick(full, tiny):
        return tiny if small else full

    scaling = "--remat both --attn flex --compile fwdbwd"
    remats, attns = ("none", "mlp", "attn", "both", "block", "pointwise"), ("sdpa", "flex")
    widths = pick((768, 1024, 2048, 4096, 6144, 8192, 12288, 16384), (96, 64, 128, 256))  # 768, 96: a bad shape
    gpus, batch = pick(((1, 2, 4, 6, 8), 8), ((1, 2), 2))
    shapes = pick(("8 --seqlen 4096", "32 --seqlen 128", "4", "32"), ("2", "8 --seqlen 32"))
    mfu = ("--mode fully_shard", "--mode replicate", "--grouping 1", f"--depth {pick(8, 4)}", pick("--seqlen 512", ""))
    modes = ("replicate", "fully_shard", "fully_shard --no-reshard", "hybrid_shard --replicas 2")
    card = "--device cuda --steps 30 --compile {} --remat {} --attn {} --loss {}"
    return {
        "variants": grid("--remat {} --compile {} --attn {}", remats, ("fwdbwd", "model"), attns),
        "seqlen": grid(scaling + " --seqlen {}", pick([2**i for i in range(9, 16)], (32, 64, 128))),
        "depth": grid(scaling + " --depth {}", pick((2, 4, 6, 8, 12, 16, 24, 32), (1, 2, 4))),
        "width": grid(scaling + " --width {}", widths),
        "gpus": [f"nproc={n} {scaling} --batch {batch}" for n in gpus]  # the same batch per rank, then the same in all
        + [f"nproc={n} {scaling} --batch {gpus[-1] * batch // n}" for n in gpus if gpus[-1] % n == 0],
        "small-params": grid(scaling + " --depth {} --min-shard-mib {}", shapes, (1, 0)),
        "mfu": grid("--compile fwdbwd --attn {} --remat {}", attns, ("none", *(f"both {each}" for each in mfu))),
        "modes": grid("--compile {} --mode {}", ("none", "fwdbwd"), modes),
        "gpu-compile": grid(card, ("fwdbwd", "model", "blocks", "none", "step"), ["none"], ["sdpa"], ["full"]),
        "gpu-remat": grid(card, ["fwdbwd"], remats, attns, ["full"]),
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
    return nproc, flags


def read_cells(target: str, small: bool, nproc: int, extra: list[str]) -> list[str]:
    """The cells of a named axis or of a file, each once, as `nproc=N --flag value ...` in alphabetical order: the same
    cell has the same name in every call. ValueError names the file and the line."""
    named = axes(small)
    if target not in named and not Path(target).is_file():
        raise ValueError(f"unknown axis '{target}': expected a file or one of {', '.join(named)}")
    cells = {}
    for number, line in enumerate(named.get(target) or Path(target).read_text().splitlines(), 1):
        try:
            own = shlex.split(line, comments=True)
            n, flags = parse([f"nproc={nproc}"] + TINY * small + own + extra)
        except ValueError as error:
            raise ValueError(f"{target}:{number}: {error}") from None
        if small:  # FlexAttention does not train on a CPU
            flags |= {"--device": ("cpu",)} | ({"--attn": ("sdpa",)} if flags.get("--attn") == ("flex",) else {})
        if own:
            cells[f"nproc={n} {join(flags)}".strip()] = None
    if not cells:
        raise ValueError(f"{target}: no cell in it")
    return list(cells)


def read_rows(path: Path, start: int = 0) -> dict[str, dict]:
    """Cell name -> its last row after byte `start`. Lines cut short by a killed run are passed over."""
    rows = {}
    for line in path.read_bytes()[start:].splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            rows[row["cell"]] = row
    return rows


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


def run(cell: str, program: list[str], timeout: float, log: Path) -> str | None:
    """Run one cell. Returns None when it ended by itself with status 0, else in a few words how it ended."""
    (nproc, flags), token = parse(shlex.split(cell)), f"{os.getpid()}.{time.time_ns()}"
    env = os.environ | {"SWEEP_CELL": cell, "SWEEP_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *program, *shlex.split(join(flags))]
    if nproc > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        start = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "env": env, "start_new_session": True}
        child = subprocess.Popen(command, **start)
    try:
        code = child.wait(timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        stop(child, token)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip(" =-")]
    says = re.compile(r"(\[.*?\]:? *)?(error:|[\w.]*(Error|Exception)\b(?<!ChildFailedError))")  # torchrun says that
    errors = [line for line in lines if says.match(line)]
    reason = (errors or lines or ["no output"])[-1].replace(f"{ROOT}/", "")[:200]
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
    about |= {"torch": importlib.metadata.version("torch"), "world": nproc, **given, "flags": given, "error": end}
    bad_shape = re.search(r"error: --(width|head-dim|grouping) ", end)
    return about | {"outcome": "badshape" if bad_shape else f"failed: {end}", "cell": cell}


def table(cells: list[str], rows: dict[str, dict]) -> str:
    """Markdown, a line per cell; flags that all share stand once above it, columns without a value are left out."""
    found = [rows.get(cell, {"outcome": "not run"}) for cell in cells]
    columns = {title: (key, d) for key, (title, d) in COLUMNS.items() if any(row.get(key) is not None for row in found)}
    parsed = [parse(shlex.split(cell)) for cell in cells]
    shared = set.intersection(*(set(flags.items()) for _, flags in parsed)) if len(cells) > 1 else set()
    lines = [["n", "flags", "outcome", *columns], ["---"] * 3 + ["---:"] * len(columns)]
    for (nproc, flags), row in zip(parsed, found, strict=True):
        values = [(row.get(key), digits) for key, digits in columns.values()]
        numbers = [f"{v:,.{d}f}".replace(",", "'") if isinstance(v, int | float) else str(v or "") for v, d in values]
        own = join(dict(flags.items() - shared))
        lines.append([str(nproc), own, row["outcome"].replace("|", "/"), *numbers])
    above = f"all: {join(dict(shared))}\n\n" if shared else ""
    return above + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sweep(cells: list[str], args: argparse.Namespace) -> bool:
    """Run every cell that has no finished row, those never tried first. True: all are finished."""
    rows = read_rows(args.results)
    todo = sorted(unfinished(cells, rows), key=lambda cell: cell in rows)
    print(f"{len(cells)} cells, {len(cells) - len(todo)} finished before; rows in {args.results}", flush=True)
    deadline = time.monotonic() + args.budget
    for i, cell in enumerate(todo, 1):
        started = time.monotonic()
        left = min(args.timeout, deadline - started)
        if left <= 0:
            break
        print(f"[{i}/{len(todo)}] {cell}", flush=True)
        size = args.results.stat().st_size if args.results.exists() else 0
        log = args.results.parent / "runs" / args.results.stem / f"{zlib.crc32(cell.encode()):08x}.log"
        end = run(cell, [args.program, "--results", str(args.results), *args.output], left, log)
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
    missing = unfinished(cells, rows)
    print(f"\n{table(cells, rows)}")
    if missing:
        print(f"\n{len(missing)} of {len(cells)} cells without a result: the same command tries them again")
    return not missing


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, usage="launch.sh sweep AXIS|FILE [options] [FLAGS of main.py]")
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
        args.output = shlex.split(join({flag: flags.pop(flag) for flag in OUTPUT & flags.keys()}))
        cells = read_cells(target, args.small, nproc, shlex.split(join(flags)))
    except ValueError as error:
        parser.exit(2, f"sweep: {error}\n")
    if args.list:
        return print("\n".join(cells))
    args.results = args.results or Path(f"results/sweep-{Path(target).stem}{'-small' * args.small}.jsonl")

    def end(signum, frame):
        for each in ends:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + signum)  # run() stops its child on the way out

    ends = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    for each in ends:
        signal.signal(each, end)
    sys.exit(0 if sweep(cells, args) else 1)


if __name__ == "__main__":
    main()
