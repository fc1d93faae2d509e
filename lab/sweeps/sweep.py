"""Ablations: each setting (a line of flags) is a run of main.py of its own, and leaves one row, however it ends.

    ./launch.sh sweep variants --small       a named axis (a file of settings/axes), at sizes for a CPU
    ./launch.sh sweep all --tracker wandb    every published table, each setting once, in one file of results
    ./launch.sh sweep settings.txt --steps 30   any file; `setting_of` and `settings_of` say what a line may hold
    ./launch.sh sweep depth --lr 1e-3 3e-3 --seed 0 1 2    each setting with every combination; seeds are summed up
    ./launch.sh sweep --lr 1e-3 3e-3 --seed 0 1            such combinations alone, of main.py's defaults
    ./launch.sh sweep depth --slurm | sbatch               a task of SLURM per setting that is missing (slurm.py)

main.py writes the row; where it ended without one (killed, too slow), this program writes `failed: ...`. A second call
runs what has no row of this commit and device yet, then tries again what failed; a bad shape and out of memory are
results. Calls at the same time share the settings: none runs one that another is running.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import io
import itertools
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path

from lab.sweeps import slurm
from lab.sweeps.processes import Forked, end_at_signals, follow_parent, oom_kills, stop
from trainer import config
from trainer.logging import (
    append_jsonl,
    check_writable,
    log_tables,
    page_command,
    page_flags,
    read_rows,
)
from trainer.terminal.output import Parser, put, tell
from trainer.terminal.text import did_you_mean, grouped, markdown
from trainer.trackers import TrackerOptions

ROOT = Path(__file__).resolve().parents[2]
TINY = "--device cpu --width 128 --depth 2 --head-dim 16 --vocab 512 --seqlen 64 --batch 2 --steps 6".split()
# These flags are no part of a setting's name. Given on the command line they go to every run.
OUTPUT = {
    "--tracker",
    "--tracker-group",
    "--wandb-mode",
    "--wandb-tags",
    "--profile",
    "--explain-memory",
    "--log-every",
    "--verbose",
    "-v",
    "-vv",
    "--debug",
}
COLUMNS = {
    "simulated_mib": ("simulated MiB", 0),
    "peak_alloc_mib": ("peak MiB", 0),
    "peak_rss_mib": ("peak RSS MiB", 0),
    "step_ms": ("step ms", 1),
    "mfu": ("MFU %", 1),
    "loss": ("loss", 4),
    "eval_loss": ("held-out loss", 4),
}
GRID = "grid"  # the name of a sweep without an axis: every combination of the flags' values
LISTS = {"--compile-options", "--tracker", "--wandb-tags"}  # take several values in one run
MOST_SETTINGS = 10_000  # of one call: more are a slip, and would run for months
Flags = dict[str, tuple[str, ...]]  # {"--depth": ("8",), "--no-reshard": ()}


def join(flags: Flags) -> str:
    """{"--depth": ("8",), "--no-reshard": ()} -> --depth 8 --no-reshard, in alphabetical order, quoted for a shell."""
    return shlex.join(word for flag in sorted(flags) for word in (flag, *flags[flag]))


@functools.cache
def gpus() -> int:
    """GPUs that a run may use, counted as launch.sh does; 0 without any. SWEEP_GPUS tells those of another machine."""
    if count := os.environ.get("SWEEP_GPUS"):
        return int(count)
    seen = len(re.findall("^GPU", subprocess.getoutput("nvidia-smi -L"), re.M))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        seen
        if not seen or visible is None
        else len([index for index in visible.split(",") if index])
    )


def commit() -> str:
    """The commit of this checkout, as rows name it."""
    unknown, text = subprocess.getstatusoutput(f"git -C {shlex.quote(str(ROOT))} rev-parse HEAD")
    return "unknown" if unknown else text


def current(rows: dict[str, dict], relaxed: bool) -> dict[str, dict]:
    """The rows that count as results of this checkout on this machine. relaxed: those of other commits too."""
    head = commit()
    gpu = re.search(
        r"^GPU \d+: (.+?) \(", subprocess.getoutput("nvidia-smi -L") * bool(gpus()), re.M
    )

    # A run that died names no device; what is simulated or counted has none.
    def here(setting: str, row: dict) -> bool:
        with contextlib.suppress(ValueError):  # its setting is none of a sweep
            flags = parse(shlex.split(setting))[1]
            device = row.get("device")
            on_cpu = flags.get("--device") == ("cpu",) or not gpus()
            nowhere = not device or device.startswith(("simulated", "no device"))
            right = (
                nowhere
                or device.startswith("CPU") == on_cpu
                and (on_cpu or not gpu or device == gpu[1])
            )
            return right and (relaxed or row.get("commit", head) == head)
        return False

    return {setting: row for setting, row in rows.items() if here(setting, row)}


def words(setting: str) -> list[str]:
    """The words of a setting, as of shlex.split, which takes 0.1 ms where most settings have nothing to unquote."""
    return shlex.split(setting) if re.search(r"[^ !#-&(-[\]-~]", setting) else setting.split()


def axes() -> dict[str, Path]:
    """The named sweeps and their files."""
    return {path.stem: path for path in sorted((ROOT / "settings" / "axes").glob("*.txt"))}


def parse(words: list[str]) -> tuple[int, Flags]:
    """nproc=2 --depth 8 --no-reshard -> (2, {"--depth": ("8",), "--no-reshard": ()}); of two equal flags the last."""
    nproc = 1
    flags = {}
    last = None
    for word in words:
        if re.fullmatch(r"nproc=[1-9]\d*", word):
            nproc = int(word[6:])
            last = None
        elif re.match(r"--?[A-Za-z]", word):
            name, *value = word.split("=", 1)
            last = name.replace("_", "-")
            if last == "--results":
                raise ValueError(
                    "--results cannot stand in a line of a sweep: give it on the command line"
                )
            flags.pop(
                last.replace("--no-", "--")
                if last.startswith("--no-")
                else last.replace("--", "--no-"),
                None,
            )
            flags[last] = value
        elif last is None:
            raise ValueError(f"expected nproc=N (N >= 1) or a flag, got '{word}'")
        else:
            flags[last].append(word)
    if missing := [flag for flag in ("--world", "--link", "--tracker") if flags.get(flag) == []]:
        raise ValueError(f"{missing[0]}: needs a value")
    flags = {flag: tuple(values) for flag, values in flags.items()}
    return 1 if "--world" in flags else nproc, flags  # simulated ranks are one process


def world(nproc: int, flags: Flags) -> int | str:
    """Ranks of a setting; of simulated ones "8(sim h100-nvlink)", as main.py writes it."""
    return (
        f"{flags['--world'][-1]}(sim {flags.get('--link', ['h100-nvlink'])[-1]})"
        if "--world" in flags
        else nproc
    )


def setting_of(line: str, small: bool, nproc: int, extra: Flags) -> str:
    """The name of a line's setting, `nproc=N --flag value ...` with sorted flags, so that it has one name everywhere.
    ranks=N becomes nproc=N (processes) or, above the machine's GPUs (with --small: above 2), N simulated ranks. `nproc`
    and --world of `extra` are for lines that name no ranks. ValueError for what is no line of flags."""

    def started(ranks: re.Match) -> str:
        most = 2 if small else max(1, gpus())
        return ("nproc=" if int(ranks[1]) <= most else "--link h100-nvlink --world ") + ranks[1]

    parts = shlex.split(re.sub(r"(?<!\S)ranks=(\d+)", started, line), comments=True)
    named = "--world" in parse(parts)[1] or any(word.startswith("nproc=") for word in parts)
    more = {flag: value for flag, value in extra.items() if flag != "--world" or not named}
    n, flags = parse([f"nproc={nproc}"] + TINY * small + parts + shlex.split(join(more)))
    if small:  # FlexAttention does not train on a CPU
        flags |= {"--device": ("cpu",)} | (
            {"--attn": ("auto",)} if flags.get("--attn") == ("flex",) else {}
        )
    return f"nproc={n} {join(flags)}".strip()


def check_number(number: int) -> None:
    """ValueError for more settings than any sweep runs."""
    if number > MOST_SETTINGS:
        raise ValueError(
            f"more than {grouped(MOST_SETTINGS)} settings; name fewer values, or split the file"
        )


def grid(flags: Flags) -> list[Flags]:
    """{"--lr": ("1e-3", "3e-3"), "--seed": ("0", "1")} -> the four combinations of one value each."""
    apart = [
        [values] if flag in LISTS or len(values) < 2 else [(v,) for v in values]
        for flag, values in flags.items()
    ]
    check_number(math.prod(map(len, apart)))
    return [dict(zip(flags, chosen, strict=True)) for chosen in itertools.product(*apart)]


def settings_of(study: str, small: bool, nproc: int, extra: Flags) -> list[str]:
    """The settings of an axis or a file, each once: those of its lines for this size, with the flags that stand beside
    [full] or [small]; `--depth {2,4}` makes two of a line. ValueError names the file and the line."""
    settings = {}
    shared = ""
    wanted = True
    combinations = grid(extra)
    made = 0
    for number, line in enumerate(
        axes().get(study, Path(study)).read_text(errors="replace").splitlines(), 1
    ):
        if section := re.match(r"\[(full|small)\]", line):
            shared = line[section.end() :]
            wanted = (section[1] == "small") == small
        elif wanted and line.strip() and not line.lstrip().startswith("#"):
            # Every second one is a list of alternatives.
            parts = re.split(r"\{(.*?)\}", f"{shared} {line}")
            choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
            try:
                made += math.prod(map(len, choices)) * len(combinations)
                check_number(made)
                for chosen, more in itertools.product(itertools.product(*choices), combinations):
                    settings[setting_of("".join(chosen), small, nproc, more)] = None
            except ValueError as error:
                raise ValueError(f"{study}:{number}: {error}") from None
    if not settings:
        raise ValueError(
            f"{study}: no settings found; expected lines of flags, such as --depth 2 --lr 3e-3"
        )
    return list(settings)


def studies(target: str, small: bool, nproc: int, extra: list[str]) -> dict[str, list[str]]:
    """Study -> settings of an axis, a file, or (`all`) each axis but ./launch.sh gpu's. ValueError as `settings_of`."""
    if target == GRID:
        return {
            GRID: list(
                dict.fromkeys(
                    setting_of("", small, nproc, flags) for flags in grid(parse(extra)[1])
                )
            )
        }
    named = axes()
    if target not in {"all", *named} and not Path(target).is_file():
        like = did_you_mean(target, ["all", *named, *map(str, Path(target).parent.glob("*.txt"))])
        raise ValueError(
            f"unknown axis '{target}': expected a file, all, or one of {', '.join(named)}{like}"
        )
    chosen = (
        [axis for axis in named if not axis.startswith("gpu-")] if target == "all" else [target]
    )
    return {Path(study).stem: settings_of(study, small, nproc, parse(extra)[1]) for study in chosen}


def read_settings(target: str, small: bool, nproc: int, extra: list[str]) -> list[str]:
    """The settings of `studies`, each once."""
    return list(dict.fromkeys(itertools.chain(*studies(target, small, nproc, extra).values())))


def unfinished(settings: list[str], rows: dict[str, dict]) -> list[str]:
    """Settings without a row, or whose row says that the run failed. A bad shape and out of memory are results."""
    return [
        setting
        for setting in settings
        if not re.match(r"ok$|OOM|badshape", rows.get(setting, {}).get("outcome", ""))
    ]


def run(setting: str, program: list[str], timeout: float, log: Path, name: str = "") -> str | None:
    """Run one setting, for W&B under `name`. Returns None if it ended with status 0, else how it ended."""
    nproc, flags = parse(shlex.split(setting))
    token = f"{os.getpid()}.{time.time_ns()}"
    env = os.environ | {
        "SWEEP_LINE": setting,
        "SWEEP_NAME": name,
        "SWEEP_TOKEN": token,
        "PYTHONUNBUFFERED": "1",
    }
    kills = oom_kills()
    command = [sys.executable, *program, *shlex.split(join(flags))]
    on_cpu = flags.get("--device") == ("cpu",) or not gpus()
    if nproc > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        if nproc == 1 and on_cpu and program[0] == str(ROOT / "main.py"):
            child = Forked(command[1:], out, env)
        else:
            start = {
                "stdin": subprocess.DEVNULL,
                "stdout": out,
                "stderr": out,
                "start_new_session": True,
            }
            child = subprocess.Popen(command, preexec_fn=follow_parent, env=env, **start)
    try:
        code = child.wait(timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        stop(child, token)
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-")]
    # Torchrun says that.
    says = re.compile(r"(\[.*?\]:? *)?(error:|[\w.]*(Error|Exception)\b(?<!ChildFailedError))")
    errors = [line for line in lines if says.match(line)]
    reason = (errors or lines or ["no output"])[-1].replace(f"{ROOT}/", "")[:200]
    killed = code == -signal.SIGKILL or code and "exitcode: -9" in text  # torchrun's word for it
    reason = (
        f"while the kernel freed memory: {reason}" if killed and oom_kills() > kills else reason
    )
    return (
        f"exit {code}{f' ({signal.Signals(-code).name})' if code < 0 else ''}: {reason}"
        if code
        else None
    )


def main_setting(setting: str) -> dict:
    """What main.py makes of a setting's flags, as its own row would say it; empty where it does not accept them."""
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        nproc, flags = parse(shlex.split(setting))
        resolved = config.parse(shlex.split(join(flags)))
        machine = "cuda" if gpus() else "cpu"
        return config.setting(
            config.filled(
                resolved, machine if resolved.device == "auto" else resolved.device
            ).with_batch_sizes_for(resolved.world or nproc)
        )
    return {}


def values_of(flags: Flags) -> dict:
    """{"--depth": ("8",), "--no-reshard": ()} -> {"depth": 8, "reshard": False}."""
    parsed_values = {}
    for flag, texts in flags.items():
        values = [int(text) if text.isdigit() else text for text in texts] or [
            not flag.startswith("--no-")
        ]
        parsed_values[flag.strip("-").removeprefix("no-").replace("-", "_")] = (
            values[0] if len(values) == 1 else values
        )
    return parsed_values


def failed_row(setting: str, end: str, resolved: dict | None = None) -> dict:
    """The row of a run that wrote none. `end`: as of `run`. `resolved`: the flags of a program but main.py."""
    nproc, flags = parse(shlex.split(setting))
    resolved = resolved or main_setting(setting) or main_setting("") | values_of(flags)
    # As in main.py's rows, where `device` is a machine's, `world` says whether it is simulated, and `loss` is a figure.
    known = {
        {"loss": "loss_kind"}.get(name, name): value
        for name, value in resolved.items()
        if name != "device"
    }
    known |= {"world": world(nproc, flags), "flags": resolved, "error": end, "line": setting}
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())}
    about |= {"commit": commit(), "torch": importlib.metadata.version("torch")}
    oom = (
        "OOM ?"
        if "while the kernel freed memory" in end
        else re.search(r"error: rank \d+: (OOM \w+)|$", end)[1]
    )
    outcome = (
        "badshape"
        if re.search(r"error: --(width|head-dim|grouping) ", end)
        else oom or f"failed: {end}"
    )
    return about | known | {"outcome": outcome}


def labels(settings: list[str]) -> tuple[str, dict[str, tuple[str, str]]]:
    """The flags that all settings share; of each setting its ranks and its other flags."""
    parsed = {setting: parse(shlex.split(setting)) for setting in settings}
    shared = (
        set.intersection(*(set(flags.items()) for _, flags in parsed.values()))
        if len(parsed) > 1
        else set()
    )
    apart = {flag for flag, _ in shared} | {"--world", "--link"}
    varying = {
        setting: join({k: v for k, v in flags.items() if k not in apart})
        for setting, (_, flags) in parsed.items()
    }
    return join(dict(shared)), {
        setting: (str(world(*parsed[setting])), flags) for setting, flags in varying.items()
    }


def outcome(row: dict) -> str:
    """How a run ended, for a table: of a bad shape also why it is one."""
    why = (row.get("error") or "").partition("error: ")[2]
    return row["outcome"] + f": {why}" * (row["outcome"] == "badshape")


def figure(row: dict, key: str) -> float | str | None:
    """An entry of a row for a table; of simulated ranks, which all hold the same, no loss."""
    return None if "loss" in key and "(sim" in str(row.get("world")) else row.get(key)


def write_page(results: Path) -> str:
    """Writes the rows of a file as a page beside it, in a new process. Returns the line that says where it is, or why
    there is none."""
    arguments = page_flags(results.absolute())
    done = subprocess.run(
        [sys.executable, "-m", "lab.report", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        why = (done.stderr.splitlines() or ["no reason given"])[-1]
        return f"warning: no page is written: {why}"
    return f"page     {page_flags(results)[-1]}"


def table(settings: list[str], rows: dict[str, dict]) -> str:
    """Markdown, a line per setting; flags that all share stand once above it, columns without a value are left out."""
    shown = [rows.get(setting, {"outcome": "not run"}) for setting in settings]
    shared, names = labels(settings)
    ranks = [
        str(row.get("world", names[setting][0]))
        for setting, row in zip(settings, shown, strict=True)
    ]
    columns = [
        ("n", ranks),
        ("flags", [names[setting][1] for setting in settings]),
        ("outcome", [outcome(row) for row in shown]),
    ]
    for key, (title, digits) in COLUMNS.items():
        if any(figure(row, key) is not None for row in shown):
            columns.append(
                (title, [grouped(figure(row, key), digits, missing="") for row in shown])
            )
    return f"all: {shared}\n\n" * bool(shared) + markdown(columns)


def spread(figures: list[float | str], digits: int) -> str:
    """Mean and sample standard deviation of two or more; where some are not finite, in how many runs."""
    if odd := [figure for figure in figures if isinstance(figure, str)]:
        return f"{odd[0]} in {len(odd)} of {len(figures)}"
    if len(figures) < 2:
        return ""
    return f"{grouped(statistics.mean(figures), digits)} +- {grouped(statistics.stdev(figures), digits)}"


def over_seeds(settings: list[str], rows: dict[str, dict]) -> str:
    """Markdown, a line for the settings that differ in --seed alone: mean and sample standard deviation; else empty."""
    alike = {}
    for setting in settings:
        alike.setdefault(re.sub(r" --seed \S+", "", setting), []).append(setting)
    alike = {name: of_seeds for name, of_seeds in alike.items() if len(of_seeds) > 1}
    names = [flags for _, flags in labels([*alike])[1].values()] if alike else []
    columns = [
        ("flags", names),
        ("seeds", [str(sum(one in rows for one in of_seeds)) for of_seeds in alike.values()]),
    ]
    for key, (title, digits) in COLUMNS.items():
        figures = [
            [rows[one][key] for one in of_seeds if figure(rows.get(one, {}), key) is not None]
            for of_seeds in alike.values()
        ]
        texts = [spread(column, digits) for column in figures]
        columns += [(title, texts)] * any(texts)
    return markdown(columns) if alike else ""


def place(setting: str, results: Path) -> Path:
    """The folder of a setting's lock; what its run printed is beside it, with the suffix .log."""
    folder = results.parent / "runs" if results.absolute().parent.name != "runs" else results.parent
    return folder / results.stem / f"{zlib.crc32(setting.encode()):08x}"


def attempt(
    setting: str, args: argparse.Namespace, limit: float, name: str, resolved: dict | None = None
) -> dict | None:
    """Run one setting for at most `limit` seconds: the row that it leaves, if need be one of this program. None: it was
    cut short by --budget. name, resolved: as of `run` and `failed_row`."""
    size = args.results.stat().st_size if args.results.exists() else 0
    started = time.monotonic()
    log = place(setting, args.results).with_suffix(".log")
    end = run(
        setting, [*args.program, "--results", str(args.results), *args.output], limit, log, name
    )
    row = read_rows(args.results, size).get(setting)
    if row is None and end == "timeout" and limit < args.timeout:
        return put(f"    cut short by --budget {args.budget:g}: not counted")
    if row is None:
        row = failed_row(setting, end or "exit 0 without a row", resolved)
        append_jsonl(args.results, row)
    elif end:
        put(f"    after its row: {end}")
    put(f"    {row['outcome']} ({time.monotonic() - started:.0f} s, log {log})")
    return row


def sweep(
    tables: dict[str, list[str]],
    args: argparse.Namespace,
    resolved: dict[str, dict] | None = None,
    one: str | None = None,
) -> bool:
    """Run every setting that has no finished row (--fresh: every one), those never tried first. True: all are finished.
    `resolved`: setting -> its resolved flags, if the program is not main.py. one: the only setting to run."""
    names = {}
    stored = read_rows(args.results)
    for study, of_study in tables.items():
        names = {
            setting: f"{study} n={n} {flags}" for setting, (n, flags) in labels(of_study)[1].items()
        } | names
    tables = (
        {study: [one] for study, of_study in tables.items() if one in of_study} if one else tables
    )
    settings = list(dict.fromkeys(itertools.chain(*tables.values())))
    rows = current(stored, args.any_commit)
    todo = (
        settings
        if args.fresh
        else sorted(unfinished(settings, rows), key=lambda setting: setting in rows)
    )
    others = sum(setting in stored and setting not in rows for setting in todo)
    others = f", {others} by another commit or device (--any-commit keeps other commits')" * bool(
        others
    )
    done = f"{len(settings) - len(todo)} finished before{others}"
    put(f"{len(settings)} settings, {done}; rows in {args.results}")
    deadline = time.monotonic() + args.budget
    for i, setting in enumerate(todo, 1):
        left = min(args.timeout, deadline - time.monotonic())
        if left <= 0:
            break
        put(f"[{i}/{len(todo)}] {names[setting]}")
        with slurm.claimed(place(setting, args.results), wait=one is not None) as free:
            known = (
                {} if args.fresh or not free else current(read_rows(args.results), args.any_commit)
            )
            if free and unfinished([setting], known):  # no other call has finished it meanwhile
                if (
                    attempt(setting, args, left, names[setting], (resolved or {}).get(setting))
                    is None
                ):
                    break
    rows = current(read_rows(args.results), args.any_commit)
    texts = {
        study: "\n\n".join(filter(None, [table(of_study, rows), over_seeds(of_study, rows)]))
        for study, of_study in tables.items()
    }
    for study, text in texts.items():
        put(f"\n## {study}\n" * (len(tables) > 1) + f"\n{text}")
    output = config.parse(args.output)
    if "wandb" in output.tracker and not one:
        tables_of_rows = {
            study: [rows[setting] for setting in of_study if setting in rows]
            for study, of_study in tables.items()
        }
        log_tables(
            tables_of_rows,
            args.results,
            TrackerOptions(
                ("wandb",), output.wandb_mode, output.tracker_group, tags=output.wandb_tags
            ),
        )
    if missing := unfinished(settings, rows):
        put(
            f"\n{len(missing)} of {len(settings)} settings without a result: the same command tries them again"
        )
    if args.report:
        put(write_page(args.results))
    elif any(setting in rows for setting in settings):
        put(f"\nto draw them: {page_command(args.results)}")
    return not missing


def command(argv: list[str]) -> int | None:
    """The command line; returns the exit code. ValueError, one line, for bad input."""
    parser = Parser(
        allow_abbrev=False, usage="launch.sh sweep [AXIS|all|FILE] [options] [main.py's]"
    )
    parser.add_argument("--small", action="store_true", help="use sizes that a CPU can run")
    parser.add_argument(
        "--results", type=Path, help="JSONL file for the rows (default: runs/sweep-AXIS.jsonl)"
    )
    parser.add_argument(
        "--nproc",
        type=int,
        default=os.environ.get("NPROC", 1),
        help="ranks of settings that do not name any (default: $NPROC, else 1)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=os.environ.get("SETTING_TIMEOUT", 1800),
        help="seconds that one setting may take (default: $SETTING_TIMEOUT, else 1800)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default="inf",
        help="seconds after which this call ends; a setting cut short has no row, the next call repeats it",
    )
    parser.add_argument(
        "--program",
        default=str(ROOT / "main.py"),
        help="program to run: a file, or '-m MODULE' (default: main.py)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="also run settings that already have a row"
    )
    parser.add_argument(
        "--any-commit",
        action="store_true",
        help="skip settings that have a row of any commit, not only of this one",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="at the end write one page with tables and figures, RESULTS.html",
    )
    parser.add_argument("--list", action="store_true", help="print the settings, run nothing")
    parser.add_argument(
        "--slurm", action="store_true", help="print a SLURM array job, to pipe into sbatch"
    )
    parser.add_argument("--setting", help="run only this setting, as a task of the array job does")
    target, *rest = argv or ["-h"]
    if target.startswith("-") and target not in ("-h", "--help"):
        target = GRID
        rest = argv
    args, extra = parser.parse_known_args([target, *rest] if target in ("-h", "--help") else rest)
    for name in ("timeout", "budget"):
        if not getattr(args, name) > 0:  # nor is nan
            raise ValueError(
                f"--{name} {getattr(args, name):g}: must be a number of seconds above 0; inf for no limit"
            )
    try:
        args.program = shlex.split(args.program)
    except ValueError as error:
        raise ValueError(f"--program {args.program}: {error}") from None
    if not args.program:
        raise ValueError("--program: expected a file, or '-m MODULE'")
    if args.slurm:  # the settings are those of its nodes, not of this machine
        chosen, extra = slurm.split(extra)
        options = slurm.for_settings(chosen, args.small, args.timeout)
        os.environ["SWEEP_GPUS"] = str(slurm.gpus(options))
        args.nproc = min(args.nproc, gpus() or args.nproc)
    nproc, flags = parse([f"nproc={args.nproc}", *extra])
    output = {flag: flags.pop(flag) for flag in OUTPUT & flags.keys()}
    tables = studies(target, args.small, nproc, shlex.split(join(flags)))
    settings = list(dict.fromkeys(itertools.chain(*tables.values())))
    if args.setting is not None and args.setting not in settings:
        raise ValueError(
            f"--setting '{args.setting}': not a setting of {target} on a machine with {gpus()} GPUs; --list prints them"
        )
    if args.list:
        return put("\n".join(settings))
    name = f"sweep-{Path(target).stem}{'-small' * args.small}"
    args.results = args.results or Path(f"runs/{name}.jsonl")
    logged = config.parse(shlex.split(join(output)))
    if logged.tracker and logged.tracker_group is None:
        output["--tracker-group"] = (name,)
    args.output = shlex.split(join(output))
    if args.slurm:
        rows = current(read_rows(args.results), args.any_commit)
        todo = (
            settings
            if args.fresh
            else sorted(unfinished(settings, rows), key=lambda setting: setting in rows)
        )
        words = [word for word in slurm.split(rest)[1] if word != "--slurm"]
        words = [target, *words, f"--nproc={nproc}", f"--timeout={args.timeout:g}"]
        tell(
            f"{len(settings)} settings, {len(settings) - len(todo)} finished before; rows in {args.results}",
            sys.stderr,
        )
        return print(slurm.array(todo, options, words)) if todo else None
    check_writable(args.results)
    if args.small:  # at such sizes threads wait for each other more than they compute
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    end_at_signals()  # run() stops its child on the way out
    return 0 if sweep(tables, args, one=args.setting) else 1


def main() -> None:
    """The command line. Exit codes: 0 every setting is finished, 1 some are not, 2 bad input, 128 + signal."""
    try:
        sys.exit(command(sys.argv[1:]))
    except (ValueError, OSError) as error:
        tell(f"sweep: {error}", sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
