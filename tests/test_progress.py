"""Signs of life: what main.py says before torch is imported and while the compiler works, on a terminal and off one.

    pytest tests/test_progress.py        # about 20 s on one core, no GPU
"""

import io
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from running import ROOT, TINY, TORCHRUN, python, ran, resolved

from trainer import checks, summary
from trainer.logging import append_jsonl
from trainer.summary import notes, progress_text
from trainer.terminal.output import tell
from trainer.terminal.progress import Progress
from trainer.terminal.text import folded

pytestmark = pytest.mark.long

STUB = """raise SystemExit("torch is being imported")\n"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def xterm(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stub(tmp_path):
    """PYTHONPATH of a torch that ends the process where it is imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(STUB)
    return dict(PYTHONPATH=str(tmp_path))


def test_something_is_said_before_torch_is_imported(stub):
    done = python(env=stub, trace=False)
    note, words = done.out.splitlines()
    assert note.startswith("note: compiles for about ") and words == "importing torch"
    assert done.err == "torch is being imported\n"


def test_a_run_says_at_once_how_long_it_will_compile_on_a_cpu_by_published_rows(tmp_path):
    rows = tmp_path / "rows.jsonl"

    def told(argv, world=1):
        return checks.compile_note(resolved(f"--device cpu {argv}", world), world, rows)

    assert told("--world 8") == "", "no rows"
    cold = [("fwdbwd", 4, 60), ("fwdbwd", 16, 120), ("blocks", 4, 20), ("blocks", 4, 30)]
    for mode, depth, seconds in cold:
        row = dict(cache="cold", compile=mode, depth=depth, first_step_cpu_s=seconds, flags={})
        append_jsonl(rows, row)
        append_jsonl(rows, row | dict(cache="warm", first_step_cpu_s=1))
        append_jsonl(rows, row | dict(flags=dict(model="a"), first_step_cpu_s=900))
    blocks = "unless cached; --compile blocks: 25 s, none: 0 s"
    assert told("--world 8") == f"note: compiles for about 60 s of CPU time {blocks}"
    assert told("--depth 10", 2) == f"note: compiles for about 90 s of CPU time a rank {blocks}"
    assert told("--compile model") == f"note: compiles for minutes {blocks}"
    assert told("--compile blocks --depth 64").endswith("about 25 s of CPU time unless cached; --compile none: 0 s")
    assert told("--world 8 --compile none") == ""
    own = checks.compile_note(resolved("--depth 99 --device cpu", 64), 64)
    assert re.search(r"about \d+ s of CPU time a rank unless cached; --compile blocks: \d+ s", own) and len(own) <= 100


LARGE = "torch", "numpy", "triton", "pandas", "pyarrow", "matplotlib", "transformers", "wandb"


def test_launch_says_its_first_line_before_anything_is_imported_that_takes_seconds(tmp_path):
    """Each of LARGE ends what imports it; flags are checked before any of them, too."""
    for name in LARGE:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"""raise SystemExit("{name} is being imported")\n""")
    env = dict(PYTHONPATH=str(tmp_path), NO_INSTALL="1", PYTHON=sys.executable, NPROC="2")
    for flags_given, out, err in (([], "importing torch, to start 2 ranks\n", {"torch is being imported"}),
                                  (["--width", "65"], "", set())):  # fmt: skip
        done = ran("bash", "launch.sh", "run", "--device", "cpu", *flags_given, **env)
        said = set(done.err.splitlines())
        assert done.out == out and {line for line in said if "imported" in line} == err, done.err
        assert flags_given == [] or "error: --width 65: must be" in done.err


@pytest.mark.parametrize(("more", "said"), [
    ((), ["note: compiles for minutes on a CPU unless cached; --compile none does not"]), (("--compile", "none"), []),
    (("--preview",), []),
])  # fmt: skip
def test_fine_tuning_on_a_cpu_says_at_once_that_it_compiles(more, said, stub, tmp_path):
    data = tmp_path / "chat.jsonl"
    data.write_text('{"text": "a"}\n')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    argv = ["--model", tmp_path, "--data", data, "--random", "--device", "cpu", *more]
    argv += ["--results", tmp_path / "rows.jsonl"]
    done = ran(sys.executable, "finetune.py", *argv, cwd=ROOT, **stub)
    assert done.out.splitlines() == [*said, "importing torch and transformers"], done.err


@pytest.mark.parametrize("program", ["main.py", "finetune.py"])
def test_without_packages_one_line_says_what_to_do(program):
    done = ran(sys.executable, "-E", "-S", program, "--depth", "2", cwd=ROOT)  # -S: without site-packages
    assert (done.code, done.out) == (2, "")
    fix = "source .venv/bin/activate (./launch.sh install makes .venv)"
    assert done.err == f"error: {program} needs torch: {fix}\n"


def test_other_ranks_say_nothing(stub):
    env = dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511") | stub
    assert python(env=env, trace=False).out == ""


@pytest.mark.parametrize(("argv", "code", "says"), [
    ("--device cpu --width 100", 2, "--width 100: must be a multiple of --head-dim 32"),
    ("--dpeth 3", 2, "Unrecognized options: --dpeth"),
    ("--data text:empty.txt", 3, "empty.txt, byte 0: expected text, found 0 bytes in 1 file"),
    ("--data text:short.txt --seqlen 16", 3, "token 16: expected at least 17 tokens"),
    ("--data bin:odd.bin", 3, "odd.bin, byte 2: expected an even number of bytes"),
    ("--data bin:absent*", 3, "at least one token file, found none"),
    ("--save empty.txt", 2, "--save empty.txt: Not a directory"),
    ("--results .", 2, "--results .: Is a directory"),
])  # fmt: skip
def test_what_torch_is_not_needed_for_is_answered_before_it_is_imported(argv, code, says, stub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, size in dict(empty=0, short=16).items():
        (tmp_path / f"{name}.txt").write_bytes(bytes(size))
    (tmp_path / "odd.bin").write_bytes(bytes(3))
    done = python(*argv.split(), env=stub, trace=False)
    assert done.code == code and done.out == "" and says in done.err, done.err
    assert done.err.startswith("error: ") or "dpeth" in says, done.err  # tyro's message is in a frame


def test_memory_that_the_machine_lacks_is_refused_with_what_would_fit_unless_forced(monkeypatch):
    def asked(argv, ranks=1, here=1, device="cpu"):
        checks.check_fits(resolved(argv, ranks, device), ranks, here)

    monkeypatch.setattr(checks, "available", lambda: 8 << 30)
    with pytest.raises(ValueError, match=r"--batch 100000: a step would take about 5\d\d\.\d GiB, .* 8\.0 GiB") as told:
        asked("--batch 100000")
    batch, accum = map(int, re.search(r"--batch (\d+) --grad-accum (\d+) would fit", str(told.value)).groups())
    assert 1000 < batch < 1500
    assert 0 <= batch * accum - 100000 < batch
    asked(f"--batch {batch} --grad-accum {accum}")
    asked("--batch 100000 --force")
    asked("--batch 100000", device="cuda")
    with pytest.raises(ValueError, match=f"--batch {batch}: 4 ranks would take"):
        asked(f"--batch {batch}", ranks=4, here=4)
    asked(f"--batch {batch}", ranks=4)  # on four machines
    with pytest.raises(ValueError, match="lower one of them"):
        asked("--width 32768 --depth 8")


@pytest.mark.parametrize("line, own, all_of_it", [
    ("0::/job/7\n", "job/7/memory.max", 3),
    ("4:cpu,memory:/slurm/step\n", "memory/slurm/step/memory.limit_in_bytes", 3),
    ("9:name=systemd:/x\n8:pids:/\n0::/\n", "memory.max", 1),
])  # fmt: skip
def test_the_limit_of_a_jobs_control_group_counts_and_those_around_it(line, own, all_of_it, tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text(line)
    found = checks.memory_limits(tmp_path / "cgroup")
    assert str(found[0]) == f"/sys/fs/cgroup/{own}"
    assert len(found) == all_of_it
    (tmp_path / "limit").write_text("1048576\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(checks, "memory_limits", lambda: [tmp_path / each for each in ("none", "absent", "limit")])
    assert checks.available() == 1 << 20


def test_off_a_terminal_a_stage_that_lasts_is_a_line_with_its_seconds(monkeypatch):
    monkeypatch.setattr(Progress, "EVERY_S", 0.01)
    now = SimpleNamespace(monotonic=lambda: time.monotonic() * 1000, sleep=time.sleep)  # a second is a millisecond
    monkeypatch.setattr("trainer.terminal.progress.time", now)
    out = io.StringIO()
    with Progress("importing torch", stream=out) as progress:
        progress.stage("compiling; minutes the first time")
        end = time.monotonic() + 20
        while len(re.findall(r"compiling, \d+ s", out.getvalue())) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        progress.stage(lambda: "")
    first, *rest = out.getvalue().splitlines()
    assert first == "importing torch"
    lasted = [line for line in rest if re.fullmatch(r"compiling, \d+ s; minutes the first time", line)]
    others = {re.sub(r", \d+ s", "", line) for line in rest} - {"importing torch", "compiling; minutes the first time"}
    assert len(lasted) >= 2 and not others  # where threads are late the first stage is told again, or the second at 0 s
    assert "\x1b" not in out.getvalue()
    told = out.getvalue()
    time.sleep(0.05)
    assert out.getvalue() == told, "it goes on after its end"


def test_a_stage_that_is_told_while_it_begins_has_no_seconds_yet(monkeypatch):
    progress = Progress("first", speak=False)
    told = []

    def monotonic():  # another thread comes meanwhile
        if not told:
            told.append("")
            told.append(f"{progress}")
        return 1e6

    monkeypatch.setattr("trainer.terminal.progress.time", SimpleNamespace(monotonic=monotonic))
    progress.stage("second")
    assert told[1] == f"{progress}" == "second"


def test_on_a_terminal_the_line_stays_below_what_is_printed_and_goes(xterm, monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    with Progress("compiling", stream=out) as progress:
        tell("step 1/2  loss 3.2")
        progress.stage("step 2/2")
        tell("step 2/2  loss 3.1")
    progress.__exit__()
    shown = out.getvalue()
    order = ["compiling", "loss 3.2\n", "compiling", "loss 3.1\n", "step 2/2"]
    assert re.search(".*".join(map(re.escape, order)), shown, re.DOTALL), repr(shown)
    assert sys.stdout is out and shown.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the line and the hidden cursor stay"


@pytest.mark.parametrize("name", ["dumb", "silent"])
def test_a_dumb_terminal_gets_lines_and_another_rank_nothing(name, xterm, monkeypatch):
    monkeypatch.setenv("TERM", name)
    out = Terminal()
    with Progress("importing torch", stream=out, speak=name == "dumb") as progress:
        assert progress.live is None
    assert out.getvalue() == "importing torch\n" * (name == "dumb")


def test_what_a_run_does_is_told_from_its_watchdog(monkeypatch):
    c = resolved("--steps 400")
    dog = SimpleNamespace(begun=False, step=1, place="step")
    run = SimpleNamespace(config=c, watchdog=dog, finite=SimpleNamespace(loss=None))
    now = SimpleNamespace(monotonic=lambda: 0.2 * dog.step)
    monkeypatch.setattr(summary, "time", now)
    shown = progress_text(run, True)
    piped = progress_text(run, False)
    assert shown() == piped() == "compiling forward and backward; minutes the first time, seconds when cached"
    dog.begun = True
    dog.step = 2
    assert shown() == "step 2/400"
    assert piped() == ""
    dog.step, dog.place, run.finite.loss = 12, "save", 3.25
    assert shown() == "step 12/400, loss 3.2500, about 78 s left, saving"
    now.monotonic = lambda: 2.0 * dog.step
    dog.place = "step"
    assert shown() == "step 12/400, loss 3.2500, about 15 min left"


def test_flags_that_do_less_than_they_say_are_noted():
    def told(argv):
        return notes(resolved(argv))

    assert told("") == told("--warmup 10 --steps 11") == []
    assert told("--warmup 50 --steps 10 --lr 1") == [
        "note: --warmup 50 leaves none of --steps 10 after warm-up: the learning rate ends at 0.2"
    ]
    assert "--mode is replicate" in told("--wrapper ddp --mode fully_shard --compile none")[0]
    (line,) = told("--warmup-ratio 1 --steps 10 --lr 1")
    assert line.startswith("note: --warmup-ratio 1.0 leaves none of --steps 10 after")


def screen(words, act=lambda pid, shown: None, **env):
    """(what a terminal has got from a process, its exit code). act(its pid, the text so far): after each part."""
    pid, terminal_fd = pty.fork()
    if pid == 0:
        clean = {k: v for k, v in os.environ.items() if k not in (*TORCHRUN, "NO_COLOR")}
        os.execve(words[0], words, clean | dict(TERM="xterm", OMP_NUM_THREADS="1", COLUMNS="200") | env)
    shown = b""
    try:
        while block := os.read(terminal_fd, 1 << 16):
            shown += block
            act(pid, shown.decode("utf-8", "replace"))
    except OSError:  # how a terminal ends
        pass
    os.close(terminal_fd)
    return shown.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def left_on_the_last_line(shown):
    """What is visible on the line in which the shell will write its prompt."""
    last = shown.rpartition("\n")[2].rpartition("\x1b[2K")[2]
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r", "", last).strip()


@pytest.mark.parametrize(("signum", "when", "code"), [
    (signal.SIGINT, "importing torch", -signal.SIGINT), (signal.SIGTERM, "importing torch", -signal.SIGTERM),
    (signal.SIGINT, "compiling", 130), (signal.SIGTERM, "compiling", 143), (signal.SIGTERM, "saving", 143),
])  # fmt: skip
def test_a_signal_leaves_no_spinner_before_the_prompt(signum, when, code, tmp_path):
    sent = []

    def act(pid, shown):
        if when in shown and not sent:
            sent.append(time.sleep(0.5))
            os.kill(pid, signum)

    argv = [*TINY, "--compile", "blocks" if when == "compiling" else "none", "--results", f"{tmp_path}/rows.jsonl"]
    argv += ["--save", f"{tmp_path}/a", "--save-every", "1", "--steps", "5000"] * (when == "saving")
    env = dict(TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    shown, status = screen([sys.executable, f"{ROOT}/main.py", *argv], act, **env)
    assert status == code, shown
    assert left_on_the_last_line(shown) == "", repr(shown[-300:])


def test_colour_is_for_errors_notes_and_the_outcome_on_a_terminal_that_wants_it(xterm, monkeypatch):
    text = "error: a\nstep 1  outcome\nnote: b\nnotes\noutcome  ok, loss 1\noutcome  OOM fwd, loss 1\nwarning: c"
    plain = io.StringIO()
    tell(text, plain)
    assert plain.getvalue() == f"{text}\n"
    terminal = Terminal()
    tell(text, terminal)
    assert terminal.getvalue().splitlines() == [
        "\x1b[1;31merror\x1b[0m: a", "step 1  outcome", "\x1b[36mnote\x1b[0m: b", "notes",
        "\x1b[1;32moutcome  ok\x1b[0m, loss 1", "\x1b[1;31moutcome\x1b[0m  OOM fwd, loss 1",
        "\x1b[33mwarning\x1b[0m: c",
    ]  # fmt: skip
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            tell(text, other := Terminal())
            assert other.getvalue() == f"{text}\n"
    tell("error: \x1b[31m of a file's name", terminal)
    assert "\x1b[31m" not in terminal.getvalue()


LINES = {
    "step 10/40  loss 3.8406  lr 0.003  |g| 2.825  353.0 ms  17'403 tok/s":
        ["step 10/40  loss 3.8406  lr 0.003  |g| 2.825  353.0 ms", "    17'403 tok/s"],
    "sample   64 bytes of training data, then after | 60 that the model wrote:":
        ["sample   64 bytes of training data, then after | 60 that the", "         model wrote:"],
    "repeat   python main.py --config 'my runs/a.steps/20261129T025837.settings.json'":
        ["repeat   python main.py --config \\", "         'my runs/a.steps/20261129T025837.settings.json'"],
    "next     ./launch.sh run --depth 8 --save runs/a       # Ctrl-C saves and ends":
        ["next     ./launch.sh run --depth 8 --save runs/a", "         # Ctrl-C saves and ends"],
    "error: --data text:/nowhere: no such file; name a file, or a folder of files":
        ["error: --data text:/nowhere: no such file; name a file, or a", "    folder of files"],
    "curve    /a/folder/whose/name/is/longer/than/the/terminal/is/wide.jsonl":
        ["curve    /a/folder/whose/name/is/longer/than/the/terminal/is/wide.jsonl"],
    "of 60 columns" + "." * 47: ["of 60 columns" + "." * 47],
    "x" * 70: ["x" * 70],
}  # fmt: skip


def test_a_line_wider_than_a_terminal_breaks_between_its_facts_and_a_command_can_be_pasted(xterm, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for line, parts in LINES.items():
        assert folded(line, 60) == "\n".join(parts)
        tell(line, terminal := Terminal())
        assert re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines() == parts
        tell(line, pipe := io.StringIO())
        assert pipe.getvalue() == f"{line}\n", "a file has one line for each"
        assert folded(line, 100) == line
    monkeypatch.setenv("COLUMNS", "200")
    tell("word " * 30, terminal := Terminal())
    assert max(map(len, terminal.getvalue().splitlines())) <= 100


@pytest.mark.slow
def test_at_60_columns_the_line_that_repeats_a_run_can_be_pasted_though_a_spinner_is_below(tmp_path):
    argv = [sys.executable, f"{ROOT}/main.py", *TINY, "--results", f"{tmp_path}/rows.jsonl"]
    text, code = screen(argv, NO_COLOR="1", COLUMNS="60")
    assert code == 0, text
    seen = [line.rpartition("\x1b[2K")[2] for line in text.splitlines()]
    lines = [re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r", "", line) for line in seen]
    first = next(i for i, line in enumerate(lines) if "repeat   " in line)
    last = next(i for i in range(first, len(lines)) if not lines[i].endswith("\\"))
    assert last > first, lines[first:]
    pasted = "\n".join(lines[first : last + 1]).partition("repeat   ")[2]
    words = shlex.split(subprocess.check_output(["bash", "-c", f"set -- {pasted}; echo $*"], text=True))
    python = sys.executable.removeprefix(f"{os.getcwd()}/")
    assert words[:3] == [python, "main.py", "--config"] and os.path.exists(words[3]) and len(words) == 4
    results = lines[next(i for i, line in enumerate(lines) if "outcome  " in line) + 1 :]
    wide = [re.sub(r"^(\w+( it)?)? +| \\$", "", line) for line in results if len(line) > 60]
    assert not [line for line in wide if " " in line], "which could have been broken"


def test_on_a_real_terminal_a_run_ends_with_its_result_and_a_clean_line(tmp_path):
    argv = [sys.executable, f"{ROOT}/main.py", *TINY, "--results", f"{tmp_path}/rows.jsonl"]
    text, code = screen(argv, NO_COLOR="1")
    assert code == 0
    assert text.index("importing torch") < text.index("commit ") < text.index("step 1/6  loss") < text.index("outcome ")
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K") and not re.search(r"\x1b\[\d*m", text), "cursor, or colours"
