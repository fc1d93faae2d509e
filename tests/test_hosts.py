"""Training on two hosts (tests/two_hosts.py), mostly with clocks ten minutes apart: the losses of one, what a pulled
cable and a dead host lead to, how a host comes back; and what the speed test of a network says of a slow one."""

import re
import signal
import time
from pathlib import Path

import pytest
from forked import Job
from running import rows_of
from saved import logged_losses, state_of
from two_hosts import AHEAD_S, missing, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.hosts]
TINY = "--device cpu --width 64 --depth 2 --head-dim 16 --vocab 257 --seqlen 32 --batch 2 --compile none --log-every 1"


@pytest.fixture
def pair(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def apart(pair):
    """Two hosts whose clocks differ by minutes."""
    pair[1].set_clock()
    return pair


def start(hosts, flags, **how):
    """The same command on these hosts, each with results of its own; HOST in the flags: the host's own folder."""
    for host in hosts:
        words = flags.replace("HOST", str(host.folder))
        host.start(f"{TINY} {words} --results {host.folder}/rows.jsonl", **how)


def ends(hosts, seconds=120):
    """The exit codes of the last runs, and those of ranks that failed first."""
    return [(host.runs[-1].wait(seconds), host.ranks()) for host in hosts]


def asked_to_end(pid):
    """Whether a process that is stopped will find a SIGTERM when it goes on."""
    waiting = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(waiting, 16) >> signal.SIGTERM - 1 & 1


def tails(hosts):
    """The end of what each has said, for a failure."""
    return [host.said()[-3000:] for host in hosts]


def losses(text):
    return dict(re.findall(r"^step +(\d+)/\d+ +loss ([\d.]+)", text, re.M))


def test_two_hosts_train_to_the_losses_of_one(apart, tmp_path):
    modes = dict(fully_shard="--steps 4", hybrid_shard="--steps 4 --mode hybrid_shard --replicas 2")
    found = {}
    now = [float(host.run("date", "+%s")) for host in apart]
    assert abs(now[1] - now[0] - AHEAD_S) < 60, now
    for mode, flags in modes.items():
        alone = tmp_path / f"{mode}.txt"
        argv = [*TINY.split(), *flags.split(), "--results", str(tmp_path / f"{mode}.jsonl")]
        assert Job(4, argv, alone).wait(200) == [0] * 4, alone.read_text()
        start(apart, f"{flags} --profile HOST/traces")  # what rank 0 or a host alone uses may be its own
        assert ends(apart) == [(0, set()), (0, set())], tails(apart)
        found[mode] = losses(alone.read_text())
        assert len(found[mode]) == 4 and losses(apart[0].said()) == found[mode], alone.read_text()
        (apart[0].folder / "out.txt").write_text("")
    rows = rows_of(apart[0].folder / "rows.jsonl")
    assert [(row["mode"], row["world"], row["outcome"]) for row in rows] == [(mode, 4, "ok") for mode in modes]
    assert (apart[1].folder / "rows.jsonl").read_text() == ""  # rank 0 alone writes, and its path may be of its host
    traces = [sorted(path.name[:5] for path in host.folder.glob("traces/*.trace.json.gz")) for host in apart]
    assert traces == [["rank0", "rank1"], ["rank2", "rank3"]]


def test_a_cable_out_for_five_seconds_costs_these_and_one_that_stays_out_ends_both_and_the_same_line_resumes(
    apart, tmp_path
):
    flags = f"--steps 200 --timeout 20 --save {tmp_path}/saved --save-every 5"
    start(apart, flags)
    apart[0].wait_for(" 5/200 ")
    apart[1].link("down")
    time.sleep(1)  # what was on its way
    seen = losses(apart[0].said())
    time.sleep(5)
    assert losses(apart[0].said()) == seen  # nobody trains on alone
    apart[1].link("up")
    apart[0].wait_for(f" {max(map(int, seen)) + 7}/200 ")
    apart[1].link("down")
    for host, (code, ranks) in zip(apart, ends(apart), strict=True):
        told = re.search("^error: (no progress|lost the connection).* ranks? [0-9]", host.said(), re.M)
        assert code == 7 and "7" in ranks and told, host.said()[-3000:]
    apart[1].link("up")
    seen = losses(apart[0].said())
    saved = max(int(path.name[5:]) for path in (tmp_path / "saved").glob("step-*"))
    (apart[0].folder / "out.txt").write_text("")
    start(apart, flags)
    assert [code for code, _ in ends(apart, 240)] == [0, 0], tails(apart)
    again = losses(apart[0].said())
    first = min(map(int, again))
    assert first == saved + 1 > 10
    assert len(again) == 200 - saved
    assert all(again[k] == seen[k] for k in again.keys() & seen.keys())  # steps that were done twice


def test_a_dead_host_comes_back_by_its_own_line_and_without_the_first_both_end_and_their_lines_resume(apart, tmp_path):
    flags = f"--steps 150 --timeout 20 --save {tmp_path}/saved --save-every 5"
    gone = "^error: lost the connection to .*: no answer from ranks ([0-9, ]+);"
    start(apart, flags, MAX_RESTARTS="1")
    apart[0].wait_for(" 7/150 ")
    apart[1].die()
    said = apart[0].wait_for("error: lost the connection to ")
    seen = losses(said)
    named = re.findall(gone, said, re.M)
    assert named and {*named[0].split(", ")} >= {"2", "3"}, said[-3000:]
    start(apart[1:], flags, MAX_RESTARTS="1")  # the host is there again
    said = apart[0].wait_for(f" {max(map(int, seen)) + 3}/150 ")[len(said) :]
    again = losses(said)
    assert re.search("resuming after step [0-9]+", said)
    assert 5 < min(map(int, again)) <= max(map(int, seen)) + 1
    assert all(again[k] == seen[k] for k in again.keys() & seen.keys())
    apart[0].die()  # and with it the store by which the hosts meet
    assert apart[1].runs[-1].wait(60) == 1, apart[1].said()[-3000:]
    told = re.findall("^torchrun: the first host, by which all meet, does not answer; ", apart[1].said(), re.M)
    named = re.findall(gone, apart[1].said(), re.M)
    assert told and named and {*named[0].split(", ")} >= {"0", "1"}, apart[1].said()[-3000:]
    last = losses(apart[0].said())
    saved = max(int(path.name[5:]) for path in (tmp_path / "saved").glob("step-*"))
    (apart[0].folder / "out.txt").write_text("")
    start(apart, flags)
    assert [code for code, _ in ends(apart)] == [0, 0], tails(apart)
    again = losses(apart[0].said())
    assert min(map(int, again)) == saved + 1 > 5
    assert len(again) == 150 - saved
    assert all(again[k] == last[k] for k in again.keys() & last.keys())


def test_the_speed_test_of_a_slow_network_takes_the_time_of_its_bytes(pair):
    for host in pair:
        host.throttle(0.01)
    start(pair, "--network slow --mb 0.1 1 --repeat 3 --steps 5", command="nodes")
    assert [code for code, _ in ends(pair, 240)] == [0, 0], tails(pair)
    rows = rows_of(pair[0].folder / "rows.jsonl")
    links = [row for row in rows if "setting" in row]
    modes = [row for row in rows if "line" in row]
    assert [(row["setting"]["link"], row["setting"]["ranks"]) for row in links] == [
        ("inside", 2), ("across", 2), ("all", 4)]  # fmt: skip
    for row in links[1:]:  # half a megabyte or more crosses the cable, 16 KiB of it at once
        assert min(op["ms_min"][1] for op in row["ops"].values()) >= (5e5 - 2**14) / 1e4, row
    assert [row["line"] for row in modes] == ["replicate", "fully_shard", "hybrid_shard:2"]
    assert all(row["n"] == 2 and row["world"] == 4 and row["nodes"] == 2 for row in modes)
    assert all(row["simulated_ms_min"] >= row["link_ms"] > 0 for row in modes)
    hybrid = modes[2]["collectives"]  # the parts of two ranks are reduced across the hosts
    assert hybrid["all_reduce"]["mib"] < 0.6 * hybrid["reduce_scatter"]["mib"]
    assert re.search("^(replicate|fully_shard|hybrid_shard:2) is fastest on this network: ", pair[0].said(), re.M)


def test_a_host_that_dies_and_comes_back_leaves_the_losses_of_the_undisturbed_run(pair, tmp_path):
    """A rank on each, then one alone, then two again: each step has the same 8 samples and their loss."""
    flags = "--steps 150 --effective-batch 8"
    one = tmp_path / "one"
    how = dict(NNODES="1:2", NPROC="1")
    one.mkdir()
    assert Job(2, [*TINY.split(), *flags.split(), "--results", one / "rows.jsonl"], one / "log").wait(200) == [0, 0]
    flags += f" --save {tmp_path}/saved --save-every 5"
    start(pair, flags, **how)
    pair[0].wait_for(" 12/150 ")
    pair[1].die()
    by_two = len(pair[0].wait_for("ranks 2 (now 1)"))
    while len(losses(pair[0].said()[by_two:])) < 3:
        assert pair[0].runs[-1].poll() is None, pair[0].said()[-3000:]
        time.sleep(0.1)
    with pair[0].stopped() as ranks:  # or it might have done the rest before the other one is there
        pair[1].start(f"{TINY} {flags} --results {pair[1].folder}/rows.jsonl", **how)
        while not all(asked_to_end(rank) for rank in ranks):
            assert pair[1].runs[-1].poll() is None, pair[1].said()[-3000:]
            time.sleep(0.1)
    assert ends(pair) == [(0, set()), (0, set())], tails(pair)
    begun = [int(step) for step in re.findall("resuming after step ([0-9]+)", pair[0].said())]
    assert len(begun) == 2 and 10 <= begun[0] < begun[1] < 150, pair[0].said()[-3000:]
    expected, found = dict(logged_losses(one)), logged_losses(pair[0].folder)  # steps that were done twice, too
    off = max(abs(loss / expected[step] - 1) for step, loss in found)
    print(f"2 ranks, 1 from step {begun[0]} on, 2 from {begun[1]}: losses within {off:.1e} of the undisturbed run")
    assert dict(found).keys() == expected.keys()
    assert off <= 2e-6
    state = state_of(tmp_path / "saved/step-00000150")
    assert state["samples"] == 150 * 8
    assert state["global_batch"] == 8


def test_a_folder_for_checkpoints_that_is_another_on_each_host_is_refused(pair, tmp_path):
    (tmp_path / "saved").mkdir()
    start(pair, f"--steps 4 --save {tmp_path}/saved", private=tmp_path / "saved")
    assert ends(pair) == [(2, {"2"})] * 2
    told = "what rank 0 wrote there is not seen by rank 2, 3; name a directory that all nodes share"
    assert any(told in host.said() for host in pair), tails(pair)
