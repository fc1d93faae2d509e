"""Training on two hosts (tests/two_hosts.py): the losses of one, and what a pulled cable and a dead host lead to."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
import soak
from forked import Job
from two_hosts import missing, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.hosts]
TINY = "--device cpu --width 64 --depth 2 --head-dim 16 --vocab 257 --seqlen 32 --batch 2 --compile none --log-every 1"


@pytest.fixture
def pair(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    with two_hosts(tmp_path) as hosts:
        yield hosts


def start(hosts, flags, **how):
    """The same command on both hosts, each with results of its own."""
    for host in hosts:
        host.start(f"{TINY} {flags} --results {host.folder}/rows.jsonl", **how)


def ends(hosts, seconds=120):
    """The exit codes of the last runs: launch.sh's, which is torchrun's 1 for any failure, and the ranks' own."""
    return [(host.runs[-1].wait(seconds), host.ranks()) for host in hosts]


def asked_to_end(pid):
    """Whether a process that is stopped will find a SIGTERM when it goes on."""
    waiting = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(waiting, 16) >> signal.SIGTERM - 1 & 1


def losses(text):
    return dict(re.findall(r"^step +(\d+)/\d+ +loss ([\d.]+)", text, re.M))


def test_two_hosts_train_to_the_losses_of_one(pair, tmp_path):
    modes = dict(fully_shard="--steps 4", hybrid_shard="--steps 4 --mode hybrid_shard --replicas 2")
    found = {}
    for mode, flags in modes.items():
        alone = tmp_path / f"{mode}.txt"
        argv = [*TINY.split(), *flags.split(), "--results", str(tmp_path / f"{mode}.jsonl")]
        assert Job(4, argv, alone).wait(200) == [0] * 4, alone.read_text()
        start(pair, flags)
        assert ends(pair) == [(0, set()), (0, set())], [host.said()[-2000:] for host in pair]
        found[mode] = losses(alone.read_text())
        assert len(found[mode]) == 4 and losses(pair[0].said()) == found[mode], alone.read_text()
        (pair[0].folder / "out.txt").write_text("")
    rows = [json.loads(line) for line in (pair[0].folder / "rows.jsonl").read_text().splitlines()]
    assert [(row["mode"], row["world"], row["outcome"]) for row in rows] == [(mode, 4, "ok") for mode in modes]
    assert (pair[1].folder / "rows.jsonl").read_text() == ""  # rank 0 alone writes, and its path may be of its host


def test_a_cable_out_for_five_seconds_costs_these_and_one_that_stays_out_ends_both_and_the_same_line_resumes(
    pair, tmp_path
):
    flags = f"--steps 70 --timeout 20 --save {tmp_path}/saved --save-every 5"
    start(pair, flags)
    pair[0].wait_for(" 5/70 ")
    pair[1].link("down")
    time.sleep(1)  # what was on its way
    seen = losses(pair[0].said())
    time.sleep(5)
    assert losses(pair[0].said()) == seen  # nobody trains on alone
    pair[1].link("up")
    pair[0].wait_for(f" {max(map(int, seen)) + 7}/70 ")
    pair[1].link("down")
    for host, (code, ranks) in zip(pair, ends(pair), strict=True):
        # torchrun ends the other rank of a host when one has ended, so that a rank's code may be that of SIGTERM
        told = re.search("^error: (no progress|lost the connection).* ranks? [0-9]", host.said(), re.M)
        assert code == 1 and "7" in ranks and told, host.said()[-3000:]
    pair[1].link("up")
    seen, saved = losses(pair[0].said()), max(int(path.name[5:]) for path in (tmp_path / "saved").glob("step-*"))
    (pair[0].folder / "out.txt").write_text("")
    start(pair, flags)
    assert [code for code, _ in ends(pair, 240)] == [0, 0], [host.said()[-3000:] for host in pair]
    again = losses(pair[0].said())
    first = min(map(int, again))
    assert first == saved + 1 > 10 and len(again) == 70 - saved
    assert all(again[k] == seen[k] for k in again.keys() & seen.keys())  # steps that were done twice


@pytest.mark.parametrize("dead", [1, 0])
def test_a_dead_host_ends_the_other_and_names_the_ranks_that_are_gone(pair, dead):
    start(pair, "--steps 400 --timeout 20")
    pair[0].wait_for(" 5/400 ")
    pair[dead].die()
    alive = pair[1 - dead]
    assert alive.runs[-1].wait(60) == 1 and alive.ranks() == {"7"}
    told = re.findall("^error: lost the connection to .*: no answer from ranks ([0-9, ]+);", alive.said(), re.M)
    assert told and set(told[0].split(", ")) >= {str(2 * dead), str(2 * dead + 1)}, alive.said()[-3000:]


def test_a_host_that_dies_and_comes_back_leaves_the_losses_of_the_undisturbed_run(pair, tmp_path):
    """A rank on each, then one alone, then two again: each step has the same 8 samples and their loss."""
    flags, one, how = "--steps 40 --effective-batch 8", tmp_path / "one", dict(NNODES="1:2", NPROC="1")
    one.mkdir()
    assert Job(2, [*TINY.split(), *flags.split(), "--results", one / "rows.jsonl"], one / "log").wait(200) == [0, 0]
    flags += f" --save {tmp_path}/saved --save-every 5"
    start(pair, flags, **how)
    pair[0].wait_for(" 12/40 ")
    pair[1].die()
    pair[0].wait_for("ranks 2 (now 1)")
    pair[0].wait_for(" 15/40 ")  # by one rank: the run of two had not come so far
    with pair[0].stopped() as ranks:  # or it might have done the rest before the other one is there
        pair[1].start(f"{TINY} {flags} --results {pair[1].folder}/rows.jsonl", **how)
        while not all(asked_to_end(rank) for rank in ranks):
            assert pair[1].runs[-1].poll() is None, pair[1].said()[-3000:]
            time.sleep(0.1)
    assert ends(pair) == [(0, set()), (0, set())], [host.said()[-3000:] for host in pair]
    begun = [int(step) for step in re.findall("resuming after step ([0-9]+)", pair[0].said())]
    assert len(begun) == 2 and 10 <= begun[0] < begun[1] < 40, pair[0].said()[-3000:]
    expected, found = dict(soak.losses(one)), soak.losses(pair[0].folder)  # steps that were done twice, too
    off = max(abs(loss / expected[step] - 1) for step, loss in found)
    print(f"2 ranks, 1 from step {begun[0]} on, 2 from {begun[1]}: losses within {off:.1e} of the undisturbed run")
    assert dict(found).keys() == expected.keys() and off <= 2e-6
    state = json.loads((tmp_path / "saved/step-00000040/train_state.json").read_text())
    assert state["samples"] == 40 * 8 and state["global_batch"] == 8


def test_a_folder_for_checkpoints_that_is_another_on_each_host_is_refused(pair, tmp_path):
    (tmp_path / "saved").mkdir()
    start(pair, f"--steps 4 --save {tmp_path}/saved", private=tmp_path / "saved")
    assert all(code == 1 and "2" in ranks for code, ranks in ends(pair))
    told = "what rank 0 wrote there is not seen by rank 2, 3; name a directory that all nodes share"
    assert any(told in host.said() for host in pair), [host.said()[-3000:] for host in pair]
