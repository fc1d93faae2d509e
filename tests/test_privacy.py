"""Who ran it, where, and from which remote is in nothing that a run leaves: neither in its rows, nor in an offline W&B
run, a trace or a checkpoint; nor are keys of the environment, which it does not print. The names are planted:
host, user and home, a git remote, absolute paths below the home.

    pytest tests/test_privacy.py        # about 15 s; one process, no network
"""

import gzip
import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest
from running import ROOT, TINY, ran
from test_sinks import records

pytestmark = pytest.mark.long

# In no random name of a run or a trace, which have lower case letters, or upper case ones up to F; and long enough
# that no weights in a checkpoint hold them by chance, as two letters were.
HOST = "Zq-hostname"
USER = "Qxj-user"
REMOTE = "Wk9-remote"
SECRET = "sesame"
RUN = """
import socket, sys
if sys.argv[1]:
    socket.sethostname(sys.argv[1])
import main
from trainer import config
sys.exit(main.main(config.parse(sys.argv[2:]), 0, 0, 1))
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """(host name, what the run left: name -> bytes). The host's is its real one where the system lets nobody set it."""
    home = tmp_path_factory.mktemp("homes") / USER
    where = home / "checkout"
    where.mkdir(parents=True)
    git = ["git", "-C", str(where), "-c", "user.name=a", "-c", "user.email=a@b"]
    remote = f"https://example.invalid/{REMOTE}.git"
    for words in (["init", "-q"], ["remote", "add", "origin", remote], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    (home / "data.txt").write_text("some words " * 200)
    apart = ["unshare", "--map-root-user", "--uts"]
    planted = bool(shutil.which("unshare")) and subprocess.run([*apart, "true"], capture_output=True).returncode == 0
    python_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = dict(HOME=str(home), USER=USER, LOGNAME=USER, PYTHONPATH=os.pathsep.join(python_path), TMPDIR=str(home))
    env |= dict(WANDB_SILENT="true")
    env |= dict.fromkeys("WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN AWS_SECRET_ACCESS_KEY".split(), SECRET * 8)
    there = [kind for kind in ("wandb", "trackio", "tensorboard") if importlib.util.find_spec(kind)]
    env |= dict(TRACKIO_DIR=f"{where}/trackio")
    argv = [*TINY, "--results", f"{where}/out/rows.jsonl", "--profile", f"{where}/traces"]
    argv += ["--tracker", *there, "--wandb-mode", "offline"]
    # A checkpoint has the data as it was typed; where it is saved does not need to be typed so.
    argv += ["--data", "text:../data.txt", "--log-every", "1", "--save", f"{where}/saved", "-vv"]
    command = [*apart * planted, sys.executable, "-c", RUN, HOST * planted, *argv]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        done = ran(*command, cwd=where, **env)
    assert done.code == 0 and "warning: " not in done.err, done.err
    assert SECRET not in done.out + done.err
    found = {}
    for path in where.rglob("*"):
        name = str(path.relative_to(where))
        if path.is_symlink():
            found[name] = os.fsencode(os.readlink(path))
        elif path.is_file() and not name.startswith(".git/"):
            found[name] = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if path.suffix == ".wandb":
            found[f"{name}, decoded"] = "\n".join(map(str, records(path))).encode()
    return HOST if planted else os.uname().nodename, found


def test_a_run_leaves_rows_steps_a_wandb_run_a_trace_and_a_checkpoint(left):
    ends = {name.rpartition(".")[2] for name in left[1]}
    assert {"jsonl", "wandb", "gz", "wandb, decoded", "distcp", "metadata"} <= ends
    (trace,) = (content for name, content in left[1].items() if name.endswith(".gz"))
    assert b"ProfilerStep" in trace or b"aten::" in trace
    (record,) = (content for name, content in left[1].items() if name.endswith("decoded"))
    assert b'"text:data.txt\\"' in record  # of a path what it names, not where that is


@pytest.mark.parametrize("who", ["host", "user", "remote", "secret"])
def test_nothing_in_it_names_host_user_remote_or_secret(left, who):
    word = dict(host=left[0], user=USER, remote=REMOTE, secret=SECRET)[who].encode()
    told = re.compile(word if who == "secret" else rb"(?<![A-Za-z0-9])%b(?![A-Za-z0-9])" % re.escape(word))
    assert not [name for name, content in left[1].items() if told.search(name.encode() + b"\n" + content)]
