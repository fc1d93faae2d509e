"""What lies around a run and breaks: torchrun, homes, caches, numbers of a command line.

    pytest tests/test_faults_around.py        # no GPU; a few seconds
"""

import ast
import errno
import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import typing
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from fixtures import outcome
from running import ROOT, TINY, fails, one_line, ran
from tyro.conf import Suppress

import plan
from lab.planning import architecture
from lab.planning.search import Plan
from lab.report import history
from trainer import checks, data
from trainer import config as flags
from trainer.checkpoint import lock, save
from trainer.checkpoint.manifest import CheckpointError
from trainer.collective_time import measured
from trainer.data import DataError
from trainer.data import check_files as check_data
from trainer.distributed import launch
from trainer.finetuning import chat, examples, sources, templates
from trainer.finetuning import checks as own
from trainer.finetuning import config as tuning
from trainer.logging import check_writable
from trainer.terminal import output
from trainer.terminal.command_line import flag
from trainer.terminal.output import Parser, regular

pytestmark = pytest.mark.usefixtures("isolated")
LAUNCH = dict(PYTHON=sys.executable, NO_INSTALL="1")  # the environment of ./launch.sh


@pytest.mark.long
@pytest.mark.parametrize("alive", [True, False])
def test_a_rank_whose_launcher_was_killed_before_it_could_know_it_ends(alive, monkeypatch, environ):
    """It was a child of another process from its first line on; the store of torchrun tells."""
    ended = threading.Event()
    connected = threading.Event()
    monkeypatch.setattr("os._exit", lambda code: (ended.set(), connected.set()))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        environ(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        if not alive:
            server.close()
        threading.Timer(2 if alive else 60, connected.set).start()
        launch.end_without_launcher(connected)
    assert ended.is_set() == (not alive)


# ------------------------------------------------------------------------------------------------- homes, caches, disks


def tokens(folder, tokenizer, **cache):
    """Of one line of chat data, by another tokenizer if the folder has another name."""
    path = folder / "chat.jsonl"
    path.write_text(json.dumps(dict(text="What is kept in a cache?")) + "\n")
    data = examples.tokenised([path], tokenizer, examples.Rules(), **cache)
    return data[0][0].tolist()


def test_without_a_home_each_process_tokenises_for_itself(tmp_path, tokenizer, monkeypatch, capsys):
    """As of a user whom a container does not know."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert tokens(tmp_path, tokenizer("qwen2.5"))
    assert not (tmp_path / "~").exists()
    assert "the home directory is not known; set HOME or XDG_CACHE_HOME" in capsys.readouterr().out


def test_a_cache_under_the_name_of_another_is_made_again(tmp_path, tokenizer, capsys):
    one = tokenizer("qwen2.5")
    other = tokenizer("qwen2.5", eos="<|begin|>")
    cache = tmp_path / "cache"
    right = tokens(tmp_path, one, cache=str(cache))
    (first,) = filter(Path.is_dir, cache.iterdir())
    assert tokens(tmp_path, other, cache=str(cache)) != right
    (second,) = {*filter(Path.is_dir, cache.iterdir())} - {first}
    shutil.rmtree(first)
    shutil.copytree(second, first)
    assert tokens(tmp_path, one, cache=str(cache)) == right
    assert "is built again" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "before", "after"), [
    ("dataset_info.json", '"num_examples": 2', '"num_examples": 1'), ("seal", None, None),
])  # fmt: skip
def test_what_a_cache_says_of_its_examples_is_checked_as_they_are(name, before, after, tmp_path, tokenizer, capsys):
    """Fewer of them were trained on in silence, or a checkpoint's data were taken for other data."""
    data = tmp_path / "chat.jsonl"
    data.write_text('{"text": "What is kept"}\n{"text": "in a cache?"}\n')
    make = partial(examples.tokenised, [data], tokenizer("qwen2.5"), examples.Rules(), cache=str(tmp_path / "cache"))
    right = make()
    [path] = (tmp_path / "cache").rglob(name)
    held = path.read_text()
    path.write_text(held.replace(before or held[:1], after or f"{held[0] == '0':d}", 1))
    assert path.read_text() != held
    again = make()
    assert (again.sizes.tolist(), again.digest) == (right.sizes.tolist(), right.digest)
    assert "is built again" in capsys.readouterr().out


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ESTALE, errno.EIO])
def test_a_cache_on_a_file_system_that_fails_to_lock_is_not_used(error, tmp_path, tokenizer, monkeypatch, capsys):
    right = tokens(tmp_path, tokenizer("qwen2.5"), cache=str(tmp_path / "other"))
    flock = fcntl.flock

    def fails_there(file, how):
        if f"{tmp_path}/cache/" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(error, os.strerror(error))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", fails_there)
    assert tokens(tmp_path, tokenizer("qwen2.5"), cache=str(tmp_path / "cache")) == right
    told = f"cache: {tmp_path}/cache: OSError: [Errno {error}] {os.strerror(error)}"
    assert f"{told}; every process tokenises the data for itself" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["*.arrow", "dataset_info.json", "seal"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_in_a_cache_is_not_read_for_ever(kind, name, tmp_path, tokenizer, capsys):
    cache = tmp_path / "cache"
    right = tokens(tmp_path, tokenizer("qwen2.5"), cache=str(cache))
    [path] = cache.rglob(name)
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    assert tokens(tmp_path, tokenizer("qwen2.5"), cache=str(cache)) == right
    assert "is built again" in capsys.readouterr().out


def test_a_pipe_in_place_of_a_caches_folder_is_not_opened(tmp_path, tokenizer, capsys):
    cache = tmp_path / "cache"
    right = tokens(tmp_path, tokenizer("qwen2.5"), cache=str(cache))
    [folder] = filter(Path.is_dir, cache.iterdir())
    shutil.rmtree(folder)
    os.mkfifo(folder)
    assert tokens(tmp_path, tokenizer("qwen2.5"), cache=str(cache)) == right
    assert "is a pipe or device" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("cut", [0, 0.5])
@pytest.mark.parametrize("flags", [[], ["--eval-every", 1]])
def test_a_cache_that_shrinks_while_it_is_read_exits_3_after_saving(cut, flags, tune, tmp_path, monkeypatch):
    """It is mapped: a page that is no longer there would end the process with SIGBUS."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    real = chat.ChatBatches.__next__

    def shrink(self):
        if self.sample == 8:
            (path,) = (tmp_path / "cache").rglob("*.arrow")
            os.truncate(path, int(cut * path.stat().st_size))
        return real(self)

    monkeypatch.setattr(chat.ChatBatches, "__next__", shrink)
    done = tune("--steps", 1000, "--log-every", 1, "--save", tmp_path / "run", *flags)
    fails(done, 3, "the file has shrunk: run the same command again")
    (step,) = (tmp_path / "run").glob("step-*")
    assert f"failed: {tmp_path}/cache/simple_fsdp/chat-" in done.err
    assert done.steps[-1]["step"] == int(step.name[5:])
    monkeypatch.setattr(chat.ChatBatches, "__next__", real)
    again = tune("--steps", int(step.name[5:]) + 2, "--save", tmp_path / "run", *flags)
    assert again.code == 0
    assert "is damaged and is built again" in again.out


OVERWRITTEN = {  # what is in place of a table's bytes, in as many
    "other tokens": lambda held, ids: held.replace(ids.tobytes(), (ids ^ 1).tobytes()),
    "nothing": lambda held, ids: bytes(len(held)),
    "large numbers": lambda held, ids: b"\x7f" * len(held),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", OVERWRITTEN)
@pytest.mark.parametrize("flags", [[], ["--eval-every", 1]])
def test_a_cache_that_is_written_over_while_it_is_read_exits_3_after_saving(kind, flags, tune, tmp_path, monkeypatch):
    """What says where an example begins is in the file as well: the program must not follow it out of its tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    real = chat.ChatBatches.__next__

    def overwrite(self):
        if self.sample == 8:
            (path,) = (tmp_path / "cache").rglob("*.arrow")
            ids, _ = self.data.data[0]
            held = path.read_bytes()
            other = OVERWRITTEN[kind](held, ids)
            assert len(other) == len(held) and other != held
            with open(path, "r+b") as file:
                file.write(other)
        return real(self)

    monkeypatch.setattr(chat.ChatBatches, "__next__", overwrite)
    done = tune("--steps", 1000, "--log-every", 1, "--save", tmp_path / "run", *flags)
    fails(done, 3, "expected the tokens of when the run began, found other tokens; the file was overwritten: run")
    (step,) = (tmp_path / "run").glob("step-*")
    assert f"failed: {tmp_path}/cache/simple_fsdp/chat-" in done.err
    assert done.steps[-1]["step"] == int(step.name[5:])
    monkeypatch.setattr(chat.ChatBatches, "__next__", real)
    again = tune("--steps", int(step.name[5:]) + 2, "--save", tmp_path / "run", *flags)
    assert again.code == 0
    assert "is damaged and is built again" in again.out


def test_a_table_that_shrinks_while_it_is_read_is_read_from_its_copy(tmp_path):
    """A mapped file would end the process with SIGBUS."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": [f"{i}" * 99 for i in range(9999)]})
    path = tmp_path / "a.arrow"
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table, max_chunksize=99)
    found = sources.records(path)
    next(found)
    os.truncate(path, path.stat().st_size // 3)
    assert len([*found]) == 9998


@pytest.fixture
def full(tmp_path):
    """A folder on a disk that is full."""
    (tmp_path / "full").mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path / "full"], capture_output=True)
    if mount.returncode:
        pytest.skip("needs root, to mount a small disk")
    (tmp_path / "full/room").write_bytes(bytes(64 << 10))
    yield tmp_path / "full"
    subprocess.run(["umount", "-l", tmp_path / "full"], check=True)


@pytest.fixture
def mounted(tmp_path):
    """make(size) -> a folder on a disk of that size."""
    folder = tmp_path / "mounted"

    def make(size):
        folder.mkdir()
        how = ["-t", "tmpfs", "-o", f"size={size}"]
        if subprocess.run(["mount", *how, "none", folder], capture_output=True).returncode:
            pytest.skip("needs root, to mount a small disk")
        return folder

    yield make
    subprocess.run(["umount", "-l", folder], capture_output=True)  # a test may have done it


@pytest.mark.parametrize("rows", [99, 9999])  # whose tokens have no room, or the copy of the table has none
def test_a_full_disk_under_the_token_cache_is_told_by_its_folder(rows, mounted, tokenizer, tmp_path):
    small = mounted("300k")
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": [" ".join(map(str, range(i, i + 700 * (rows < 1000) + 9))) for i in range(rows)]})
    path = tmp_path / "a.arrow"
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    with pytest.raises(DataError) as error:
        examples.tokenised([path], tokenizer("qwen2.5"), examples.Rules(), cache=str(small / "cache"))
    told = str(error.value)
    expected = f"{small}/cache/chat-.*: expected room for .*No space left on device; free some space, or"
    assert re.match(expected, told), told


@pytest.mark.parametrize("errors", ["stop", "warn"])
def test_a_file_system_that_is_unmounted_in_mid_run_gets_no_save_below_it(errors, mounted, train, monkeypatch):
    small = mounted("9m")
    begin = save._begin

    def unmounted(folder, name, needs):
        if name == "step-00000004":
            subprocess.run(["umount", "-l", small], check=True)
            (small / "run").mkdir()  # below it, as where a mount has hidden an older run
        return begin(folder, name, needs)

    monkeypatch.setattr(save, "_begin", unmounted)
    done = train("--save", small / "run", "--save-every", 2, "--save-errors", errors)
    told = f"{small}/run: is not the directory that this run locked, as if its file system was unmounted; mount it"
    assert done.code == 4 and told in done.err, done.err  # the last save must succeed
    assert [*(small / "run").iterdir()] == []


def test_a_folder_that_was_replaced_is_noticed_and_one_that_was_moved_back_is_not(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    assert lock.acquire(folder) is None
    folder.rename(tmp_path / "aside")
    folder.mkdir()
    with pytest.raises(CheckpointError, match="run: is not the directory that this run locked"):
        lock.renew(folder)
    assert [*folder.iterdir()] == []
    folder.rmdir()
    (tmp_path / "aside").rename(folder)
    lock.renew(folder)
    (folder / "lock").unlink()  # by hand
    lock.renew(folder)
    assert (folder / "lock").exists()
    lock.release(folder)


def test_a_disk_without_room_for_a_lock_is_named_and_leaves_none(full, train):
    fails(train("--save", full / "run"), 4, f"{full}/run/lock: No space left on device")
    assert not (full / "run/lock").exists(), "an empty one would be waited for"


def test_a_quota_that_is_told_of_when_a_lock_is_synced_leaves_none(train, tmp_path, monkeypatch):
    """As NFS does."""
    sync = os.fsync

    def fails_there(file):
        if os.readlink(f"/proc/self/fd/{file}").endswith("/lock"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        sync(file)

    monkeypatch.setattr(os, "fsync", fails_there)
    fails(train("--save", "run"), 4, "run/lock: Disk quota exceeded; free some space, or name a directory")
    assert not (tmp_path / "run/lock").exists(), "it would be waited for"


@pytest.mark.long
def test_an_export_onto_a_full_disk_exits_4_and_is_not_taken_for_another_run(full, tune):
    for argv in (["--export", full / "out"], ["--prepared", full / "prepared"]):
        done = tune("--steps", 1, *argv)
        assert done.code == 4 and "No space left on device" in done.err and "another run" not in done.out, done.err


def test_a_folder_of_traces_that_cannot_be_written_is_refused_at_the_start(train, tmp_path):
    (tmp_path / "file").write_text("")
    fails(train("--profile", tmp_path / "file"), 2, f"error: --profile {tmp_path}/file: Not a directory")


def test_a_compile_cache_that_cannot_be_made_is_one_line_and_no_traceback_of_torchs_import(tmp_path):
    (tmp_path / "file").write_text("")
    env = LAUNCH | dict(TORCHINDUCTOR_CACHE_DIR=f"{tmp_path}/file/x", NPROC="1")
    for command in ([sys.executable, "main.py"], ["./launch.sh", "run"]):
        done = ran(*command, *TINY, **env)
        (line,) = done.err.splitlines()  # launch.sh's own begins with its name
        assert done.code == 2
        assert re.search(f"TORCHINDUCTOR_CACHE_DIR.{tmp_path}/file/x: ", line), line


slow = pytest.mark.slow


@pytest.mark.long
@pytest.mark.parametrize("words", ["main.py --help", *(pytest.param(words, marks=slow) for words in (
    "finetune.py --help", "plan.py --help", "plan.py --gpus 8", "-m lab.report --help"))])  # fmt: skip
def test_an_answer_that_nobody_can_read_is_one_line_or_none_and_no_success(words):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # with it argparse itself is silent
    read, unread = os.pipe()
    os.close(read)
    for out, code, told in ((os.open("/dev/full", os.O_WRONLY), 2, "error: standard output: No space left on device"),
                            (unread, 128 + signal.SIGPIPE, "")):  # fmt: skip
        done = subprocess.run([sys.executable, *words.split()], cwd=ROOT, env=env, stdout=out, stderr=subprocess.PIPE)
        os.close(out)
        line = done.stderr.decode()
        assert (done.returncode, line.count("\n")) == (code, int(code == 2)) and line.startswith(told), line


@pytest.mark.long
@pytest.mark.parametrize(("name", "value", "told"), [
    ("TORCH_DISTRIBUTED_DEBUG", "some", "must be OFF, INFO, or DETAIL.; correct the environment variables of torch"),
    pytest.param("TORCH_LOGS", "some", "Invalid log settings: some, ", marks=slow),
    pytest.param("PYTHONUTF8", "0", "'ascii' codec can't decode .*; set PYTHONUTF8=1", marks=slow),
])  # fmt: skip
@pytest.mark.parametrize("program", [["main.py"], pytest.param(["./launch.sh", "run"], marks=slow)])
def test_a_torch_that_cannot_be_imported_in_this_environment_is_one_line(program, name, value, told):
    env = LAUNCH | dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", NPROC="2") | {name: value}
    done = ran(*[sys.executable] * (program == ["main.py"]), *program, *TINY, **env)
    assert re.match(f"error: torch cannot be imported: .*{told}", fails(done, 2))


def test_a_network_interface_that_is_not_there_is_named(train):
    fails(train(GLOO_SOCKET_IFNAME="none0"), 2, "error: GLOO_SOCKET_IFNAME=none0: gloo found no address")


def test_a_limit_of_threads_is_told_where_ranks_meet(train, monkeypatch):
    """As of ulimit -u or -v, which nothing can set for root, or for this process alone."""

    refuse = mock.Mock(side_effect=RuntimeError("Resource temporarily unavailable"))
    monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    fails(train(), 2, "Resource temporarily unavailable; raise the limits of files")


@pytest.fixture
def few_files():
    """This process may open 20 more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_shards_than_a_process_may_open_are_told_by_that_limit(tmp_path, few_files):
    for number in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        (tmp_path / f"{number}.bin").write_bytes(bytes(2 * 99))
    with pytest.raises(DataError, match=r"Too many open files; raise the limits of files, .*ulimit -n \d+, ") as error:
        data.open_source(f"bin:{tmp_path}/*.bin", 256)
    assert re.search(r"\(ulimit -n \d+, -u \w+, -v \w+\)", str(error.value)) and "permissions" not in str(error.value)


LIMITS = OSError(24, "Too many open files"), RuntimeError("can't start new thread")


@pytest.mark.parametrize("error", LIMITS, ids=str)
def test_a_limit_that_is_met_anywhere_in_a_run_is_one_line(error, train, monkeypatch):
    monkeypatch.setattr("main.wrap", mock.Mock(side_effect=error))
    fails(train(), 2, str(error).split("] ")[-1], "raise the limits of files, processes and memory (ulimit -n ")


@pytest.mark.parametrize("error", LIMITS, ids=str)
def test_a_limit_before_a_run_begins_is_one_line(error):
    """While torch is imported, and where nobody has looked for it."""
    code = f"""
import sys
from trainer.terminal import output
error = {type(error).__name__}(*{error.args!r})
if sys.argv[1:]:
    sys.modules["torch"] = None
    sys.meta_path.insert(0, type("Finder", (), dict(find_spec=staticmethod(lambda *_: (_ for _ in ()).throw(error)))))
    del sys.modules["torch"]
    output.import_torch(0)
output.filter_libraries()
raise error
"""
    for argv, exit_code in (([], 1), (["import"], 2)):
        done = ran(sys.executable, "-c", code, *argv)
        assert "raise the limits of files, processes and memory (ulimit -n " in fails(done, exit_code)


def test_a_word_that_the_locale_has_no_bytes_for_is_named(capfd):
    """As in a locale of EUC-JP, in which Python reads some names of UTF-8 as texts that it cannot write."""
    done = outcome(capfd, lambda: flags.parse(["--data", "text:\ud800"]))
    fails(done, 2, "is no text in utf-8, the encoding of this locale; set PYTHONUTF8=1")


# -------------------------------------------------------------------------------------------------------------- numbers


def largest(held):
    """tokenizer.json with a token of its vocabulary at a number far above the others."""
    vocab = held["model"]["vocab"]
    return held | dict(model=held["model"] | dict(vocab=vocab | {list(vocab)[-1]: 3 * 10**9}))


ABSURD = {  # a file of a tokenizer; what it holds
    "a vocabulary": ("tokenizer.json", largest),
    "an added token": ("tokenizer.json", lambda held: held | dict(
        added_tokens=[*held["added_tokens"], held["added_tokens"][0] | dict(id=3 * 10**9, content="<|far|>")])),
    "what is put around": ("tokenizer.json", lambda held: held | dict(
        post_processor=dict(special_tokens={"<|pad|>": dict(ids=[3 * 10**9])}))),
    "its config": ("tokenizer_config.json", lambda held: held | dict(added_tokens_decoder={"3000000000": {}})),
    "another file": ("added_tokens.json", lambda held: {"<|far|>": 3 * 10**9}),
}  # fmt: skip


@pytest.mark.parametrize("kind", ABSURD)
def test_token_ids_that_no_vocabulary_has_are_refused_before_the_library_reads_them(kind, tune, qwen, tmp_path):
    folder = shutil.copytree(qwen, tmp_path / "copy")
    name, change = ABSURD[kind]
    held = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(change(held)))
    with mock.patch("transformers.AutoTokenizer.from_pretrained", side_effect=AssertionError("it was read")):
        done = tune("--steps", 1, model=folder)
    fails(done, 3, f"{folder}/{name}: expected token ids below 2097152, found 3000000000")


def test_the_ids_of_tokenizers_as_they_are_pass(qwen):
    own.check_token_ids(str(qwen))


ODD = ["nan", "inf", "-inf", "-1", "0", "-0.0", "0.5", "1e-320", "1e308", "1_0", "0x10", "", "True", "-" + "9" * 30]
HUGE = ["1" * 30, "9" * 4000, str(2**31 - 1), str(2**31), str(2**64)]


def number_of(kind):
    """int or float, of a flag whose values are such; else None."""
    return next((each for each in (kind, *typing.get_args(kind)) if each in (int, float)), None)


def start(c):
    """What refuses values of main.py's flags before a model is built."""
    checks.check_fits(flags.resolve(c, "cpu", 1), 1, 1)


HF = ["--model", "absent", "--data", "absent"]
PROGRAMS = {  # groups of flags; what reads them
    "main.py": ([flags.Training, flags.System, flags.Output], lambda words: start(flags.parse(words, 0, 1))),
    "finetune.py": ([tuning.Tuning, tuning.System, tuning.Output],
                    lambda words: flags.resolve(tuning.parse([*HF, *words], 0, 1), "cpu", 1)),
    "plan.py": ([flags.Training, flags.System, Plan], plan.main),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("program", ["main.py", *(pytest.param(p, marks=pytest.mark.slow) for p in [*PROGRAMS][1:])])
def test_any_number_of_any_flag_is_taken_or_refused_in_a_message_that_names_a_flag(program, capsys):
    groups, read = PROGRAMS[program]
    kinds = {name: kind for group in groups for name, kind in typing.get_type_hints(group, include_extras=True).items()}
    hidden = {name for name, kind in kinds.items() if Suppress in getattr(kind, "__metadata__", ())}
    names = [name for group in groups for name, kind in typing.get_type_hints(group).items()
             if number_of(kind) and name not in {"verbose", *hidden}]  # fmt: skip
    for name in names:
        other, values = flags.ONLY_WITH.get(name, ("", ()))
        beside = [f"{flag(other)}={values[0 if 'block' not in values else values.index('block')]}"] if other else []
        for value in (*random.Random(name).sample(ODD, 2), *random.Random(name).sample(HUGE, 2)):
            told = ""
            try:
                read([*beside, f"{flag(name)}={value}"])
            except ValueError as error:  # of `resolve`, which programs print
                told = f"error: {error}"
            except SystemExit as error:
                told = one_line(capsys.readouterr().err)
                assert error.code == 2, (name, value, told)
            if told.startswith("error: "):
                assert re.match("error: .{0,90}--", told) and len(told) < 500, (name, value, told)
            else:  # tyro's
                assert not told or flag(name) in told, (name, value, told)
            capsys.readouterr()
    assert len(names) > 25


# ---------------------------------------------------------------------------------------------------------------- links


def test_a_pattern_takes_each_file_once_and_no_link_leads_in_circles(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", "sub/b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    files = [tmp_path / "a.jsonl", tmp_path / "sub/b.jsonl"]
    for pattern in ("**", "**/*.jsonl"):
        assert sorted(sources.check_files(f"{tmp_path}/{pattern}")) == files
    for name in ("one", "other"):  # by both there are more paths than anybody can count
        (tmp_path / "sub" / name).symlink_to(tmp_path)
    for find in (sources.check_files, lambda pattern: check_data(f"bin:{pattern}", 16)):
        with pytest.raises(DataError, match="expected each file once, .* which are the same file; remove the link"):
            find(f"{tmp_path}/**/*")


@pytest.mark.parametrize(("argv", "told"), [
    ("--data text:own --save own/run", "--save own/run: lies in own, whose files are the data"),
    ("--data text:link --save own/deep/run", "--save own/deep/run: lies in link, "),
    ("--data text:own --save own", "--save own: lies in own, "),
    ("--data text:own --save run --profile own/traces", "--profile own/traces: lies in own, "),
    ("--data text:own --save run --results own/rows.jsonl", "--results own/rows.jsonl: lies in own, "),
    ("--data text:own/t.pt --results own/t.pt", "--results own/t.pt: is a file that this run reads"),
    ("--data bin:o*n/*.pt --results link/t.pt", "--results link/t.pt: is a file that this run reads"),
    ("--init own/t.pt --results own/t.pt", "--results own/t.pt: is a file that this run reads"),
    ("--data text:own --save own-too/run", ""),
    ("--data text:own --save own/.run --results own/.rows", ""),
    ("--data text:own --results own/rows.jsonl", ""),  # nothing is resumed
])  # fmt: skip
def test_what_a_run_writes_is_none_of_what_it_reads(argv, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "own/t.pt").write_bytes(bytes(9000))
    with suppress(SystemExit):
        argv = [*TINY, *argv.split(), *["--results", "r"] * ("--results" not in argv)]
        checks.check_before_torch(flags.parse(argv), 1)
    err = capsys.readouterr().err
    assert err.startswith(f"error: {told}") if told else err == "", err
    assert (tmp_path / "own/t.pt").read_bytes() == bytes(9000)
    assert not told or sorted(each.name for each in tmp_path.iterdir()) == ["link", "own"]


def test_finetune_writes_none_of_what_it_reads(qwen, tmp_path, capfd):
    (tmp_path / "own").mkdir()
    file = Path(shutil.copy(qwen.parent / "chat.jsonl", tmp_path / "own"))
    before = file.read_bytes()
    for argv, told in ((["--results", file], f"--results {file}: is a file that this run reads"),
                       (["--data", file.parent, "--save", file.parent / "run"], f"--save {file.parent}/run: lies in ")):
        words = [*map(str, ["--model", qwen, "--data", file, "--results", tmp_path / "rows", *argv])]
        done = outcome(capfd, lambda words=words: own.check_before_torch(tuning.parse(words, 0, 1), 1))
        assert fails(done, 2, f"error: {told}")
        assert file.read_bytes() == before


def test_an_error_is_one_line_whatever_a_file_is_called(train):
    fails(train("--data", "a\nb"), 2, "error: --data a\\nb: expected one of ")


def test_the_name_of_a_file_controls_no_terminal(tmp_path, train):
    done = train("--data", f"text:{tmp_path}/\x1b]52;c;eA==\x07\x9b2J\udcff")
    fails(done, 3, "]52;c;eA==", "\\udcff")
    assert not {*done.err} & {*"\x1b\x07\x9b"}


@pytest.mark.parametrize("words", [
    ["--a\x1b[2J"], ["--\ra=1"], ["--mode", "\x1b[2J"], ["--depth", "\x9b2J"], ["\x1b[2J"],
])  # fmt: skip
def test_a_bad_command_line_controls_no_terminal(words, capfd):
    done = outcome(capfd, lambda: flags.parse(words))
    assert done.code == 2 and not {*done.err} & {*"\x1b\x9b\r"}, done.err


def test_a_bad_command_line_of_any_program_controls_no_terminal(capfd):
    parse = Parser(prog="report").parse_args
    done = outcome(capfd, lambda: parse(["--a\x1b[2J\x9b2J"]))
    assert done.code == 2 and "unrecognized arguments" in done.err and not {*done.err} & {*"\x1b\x9b"}
    files = [file for folder in ("trainer", "lab") for file in (ROOT / folder).rglob("*.py")]
    assert not [file for file in files if re.search(r"= argparse\.ArgumentParser\(", file.read_text())]


CONTROLS = "\x1b]52;c;eA==\x07\x9b2J\u202e"  # writes into a clipboard, clears, turns the text that follows round


def test_what_a_run_prints_controls_no_terminal(trains, tmp_path, environ):
    """The names of data and of the folder stand in its lines; torchrun prints the file of its error again."""
    data = tmp_path / f"a{CONTROLS}.txt"
    data.write_bytes(bytes(range(65, 91)) * 99)
    done = trains("--data", f"text:{data}", "--save", tmp_path / f"run{CONTROLS}")
    assert "a\ufffd]52;c;eA==" in done.out and not {*done.out, *done.err} & {*"\x1b\x07\x9b\u202e"}
    environ(TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    output.tell_error(CONTROLS)
    told = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert "]52;c;eA==" in told and not {*told} & {*"\x1b\x07\x9b\u202e"}


def test_what_libraries_print_controls_no_terminal():
    """Warnings of matplotlib, for instance, name characters that rows have and a font lacks."""
    code = f"""
import logging, sys, warnings
from trainer.terminal.output import filter_libraries
filter_libraries()
warnings.warn({CONTROLS!r})
logging.warning("%s", {CONTROLS!r})
raise ValueError({CONTROLS!r})
"""
    done = ran(sys.executable, "-c", code)
    assert done.err.count("]52;c;eA==") == 3 and not {*done.err} & {*"\x1b\x07\x9b\u202e"}, done.err


def test_a_warning_of_a_library_about_an_error_is_one_line_without_a_traceback():
    code = """
import logging
from trainer.terminal.output import filter_libraries
filter_libraries()
try:
    1 / 0
except Exception:
    logging.warning("a file of the cache is made again", exc_info=True)
"""
    done = ran(sys.executable, "-c", code)
    assert done.err == "WARNING:root:a file of the cache is made again (ZeroDivisionError: division by zero)\n"


def test_texts_of_any_script_stay_as_they_are():
    for text in ("\u00e4 \u6f22\u3000\u5b57\u00a0\U0001f600\n\ta", "plain"):
        assert output.shown(text) == text


def test_everything_that_is_printed_goes_through_one_function():
    """output.put; what a shell reads is printed as it is, and a file of the watchdog is none of the terminal's."""
    own = {"trainer/terminal/output.py": 1, "trainer/fault_tolerance/watchdog.py": 1,
           "lab/sweeps/slurm.py": 1, "lab/sweeps/sweep.py": 1}  # fmt: skip
    files = [file for folder in ("", "trainer/**/", "lab/**/") for file in ROOT.glob(f"{folder}*.py")]
    found = {}
    for file in files:
        name = str(file.relative_to(ROOT))
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = [getattr(call, "id", None) or getattr(call, "attr", None) for call in calls]
        prints = sum(each in ("print", "print_exc", "print_exception", "pprint") for each in names)
        if prints and "tests" not in file.parts:
            found[name] = prints
    assert found == own


READERS = {  # what opens a file that a flag or a folder names
    "--link": lambda path: measured(f"measured:{path}"),
    "--hf": architecture.read,
    "--template": lambda path: templates._template_of(path, None),
    "--results": check_writable,
    "a lock of --save": lambda path: lock._read(path),
    "--model": lambda path: own.check_folder(os.path.dirname(path)),
    "a folder of templates": lambda path: own.check_folder(os.path.dirname(os.path.dirname(path))),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_device_in_place_of_a_file_is_refused_and_not_read_for_ever(name, tmp_path):
    """A stranger's archive may hold links to devices, too."""
    folder = tmp_path / own.TEMPLATES
    folder.mkdir()
    os.mkfifo(folder / "a.json")
    signal.alarm(60)  # ends the process, where opening a pipe waits for its other end
    with pytest.raises((ValueError, OSError, DataError), match="a.json.* is a pipe|is a pipe or device.*a.json"):
        READERS[name](f"{folder}/a.json")
    signal.alarm(0)
    (folder / "b.json").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="is a pipe or device"):
        regular(folder / "b.json")


def test_settings_of_a_run_that_are_a_pipe_are_as_none(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    os.mkfifo(tmp_path / "a.settings.json")
    signal.alarm(60)
    assert history.parts(tmp_path / "a.jsonl") == [(tmp_path / "a.jsonl", float("inf"))]
    signal.alarm(0)
