"""The speed test of a network (lab/benchmarks/nodes.py): flags, kinds of links, tables; slow: two ranks of a host."""

import argparse
import os
import subprocess
import sys

import pytest
import torch
from running import ROOT, module, one_line, rows_of

from lab.benchmarks import nodes
from lab.report.tables import LAYOUTS
from trainer import collective_time
from trainer import config as flags
from trainer.distributed import simulated_world

TINY = "--device cpu --width 64 --depth 2 --head-dim 16 --vocab 257 --seqlen 32 --batch 2 --compile none".split()
ROWS = ROOT / "results/nodes_cpu.jsonl"


@pytest.mark.parametrize("argv, message", [
    ("--modes replicate hybrid_shard", "--modes hybrid_shard: must be replicate, fully_shard or hybrid_shard:REPLICAS"),
    ("--repeat 0", "--repeat 0 --mb None: must be above 0"), ("--mb 0", "--repeat 10 --mb [0.0]: must be above 0"),
    ("--repeat x", "--repeat: invalid int value: 'x'"),
    ("--depht 2", "Unrecognized options Unrecognized options: --depht, 2 "),
])  # fmt: skip
def test_bad_flags_are_one_line_of_launch_sh_which_starts_nothing(argv, message):
    env = os.environ | dict(PYTHON=sys.executable, NO_INSTALL="1", PYTHONPATH=str(ROOT))
    done = subprocess.run([ROOT / "launch.sh", "nodes", *argv.split()], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and one_line(done.stderr).removeprefix("error: ").startswith(message)


@pytest.mark.parametrize("name, value, expected", [
    ("MAX_RESTARTS", "often", "a whole number, 0 or more"), ("NPROC", "00", "a number of processes, at least 1"),
    ("NPROC", "9" * 20, "a number of processes, at least 1"), ("NODE_RANK", "-1", "a whole number, 0 or more"),
    ("NODE_RANK", "a\nb\x1b[2J", "a whole number, 0 or more"),
    *(("MASTER_PORT", port, "a port from 1 to 65535") for port in ("0", "65536", "x")),
])  # fmt: skip
def test_a_number_in_the_environment_that_is_none_is_one_line_of_launch_sh(name, value, expected):
    env = os.environ | {"PYTHON": sys.executable, "NO_INSTALL": "1", name: value}
    done = subprocess.run([ROOT / "launch.sh", "run"], env=env, capture_output=True, text=True)
    shown = value.replace("\n", "?").replace("\x1b", "?")
    assert (done.returncode, done.stderr) == (2, f"launch.sh: {name}={shown}: expected {expected}\n")


@pytest.mark.parametrize("rank", ["2", "08"])
def test_a_node_that_the_job_does_not_have_does_not_wait_for_the_first_one(rank):
    env = os.environ | dict(PYTHON=sys.executable, NO_INSTALL="1", NNODES="2", NODE_RANK=rank, MASTER_ADDR="127.0.0.1")
    done = subprocess.run([ROOT / "launch.sh", "run"], env=env, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (2, f"launch.sh: NODE_RANK={rank}: expected a number below NNODES=2\n")


@pytest.mark.parametrize("given, missing", [({}, "NODE_RANK"), ({"NODE_RANK": "1"}, "MASTER_ADDR")])
def test_several_nodes_without_a_rank_or_the_first_one_are_one_line_of_launch_sh(given, missing):
    env = os.environ | {"PYTHON": sys.executable, "NO_INSTALL": "1", "NNODES": "2"} | given
    done = subprocess.run([ROOT / "launch.sh", "run"], env=env, capture_output=True, text=True)
    said = f"launch.sh: NNODES=2: needs {missing}; set it to "
    assert done.returncode == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1, done.stderr


def test_launch_sh_heeds_no_cdpath_and_takes_no_value_for_help(tmp_path):
    """Its own folder is where it lies, whatever `cd` is told to look for."""
    (tmp_path / "elsewhere" / ROOT.name).mkdir(parents=True)
    env = os.environ | dict(PYTHON=sys.executable, NO_INSTALL="1", CDPATH=f"{tmp_path}/elsewhere")
    how = dict(cwd=ROOT.parent, env=env, capture_output=True, text=True)
    done = subprocess.run(["bash", f"{ROOT.name}/launch.sh", "help"], **how)
    assert done.stdout.startswith("Install once") and done.stderr == ""
    done = subprocess.run(["bash", f"{ROOT.name}/launch.sh", "run", "--tracker", "wandb", "--tracker-group", "a -h b",
                           "--depth", "0"], **how)  # fmt: skip
    assert (done.returncode, one_line(done.stderr)) == (2, "error: --depth 0: must be at least 1"), done.stdout


def test_launch_sh_reads_texts_as_utf_8_whatever_the_locale_unless_told(tmp_path):
    """A program of ASCII cannot import torch 2.13."""
    (tmp_path / "python").write_text("#!/bin/sh\necho $PYTHONUTF8\n")
    (tmp_path / "python").chmod(0o755)
    for own, told in (({}, "1"), (dict(PYTHONUTF8="0"), "0")):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONUTF8"} | own
        env |= dict(PYTHON=f"{tmp_path}/python", NO_INSTALL="1", LC_ALL="ja_JP.eucJP")
        done = subprocess.run(["bash", ROOT / "launch.sh", "studies"], env=env, capture_output=True, text=True)
        assert done.stdout == f"{told}\n", done.stderr


@pytest.mark.parametrize("argv, world, message", [
    ("", 1, "--world 1: one rank has nobody to talk to; NPROC=2 ./launch.sh nodes"),
    ("--world 8", 2, "--world 8: real ranks are compared with simulated ones; leave it out"),
])  # fmt: skip
def test_ranks_that_cannot_be_compared_are_one_line(argv, world, message, capfd, tmp_path):
    c = flags.parse([*argv.split(), "--results", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit) as ended:
        nodes.main(argparse.Namespace(plot=None), c, 0, 0, world)
    assert (ended.value.code, one_line(capfd.readouterr().err)) == (2, f"error: {message}")


def test_modes_are_those_that_fit_the_ranks():
    c = flags.parse(TINY)
    cpu = torch.device("cpu")
    found = nodes.settings_of(None, c, cpu, 6)
    assert [*found] == "replicate fully_shard hybrid_shard:2 hybrid_shard:3".split()
    assert [(own.mode, own.replicas) for own in found.values()][2:] == [("hybrid_shard", 2), ("hybrid_shard", 3)]
    with pytest.raises(ValueError, match="^--replicas 4: must divide the 6 ranks"):
        nodes.settings_of(["hybrid_shard:4"], c, cpu, 6)


def test_a_group_is_inside_a_node_across_nodes_or_both_and_a_simulated_world_has_a_link_for_each():
    groups = dict(inside=[4, 5, 6, 7], across=[1, 5], all=[0, 2, 4, 6])
    assert {name: nodes.kind(group, 4) for name, group in groups.items()} == {name: name for name in groups}
    link = {"inside": collective_time.Link(1e-6, 1e12), "all": collective_time.Link(1e-3, 1e12)}
    simulated_world.start(4, link["all"])
    try:
        simulated_world.use(lambda ranks: link[nodes.kind(ranks, 2)])
        pair = torch.distributed.new_group([0, 1])
        for group in (pair, None):
            torch.distributed.all_reduce(torch.ones(1), group=group)
        seconds = [call.seconds for call in simulated_world.log() if call.op == "all_reduce"]
    finally:
        simulated_world.stop()
    assert seconds == pytest.approx([1e-6, 1e-3], rel=1e-3)


def test_the_committed_rows_are_tables_a_link_and_a_figure(tmp_path):
    rows = rows_of(ROWS)
    modes, columns = LAYOUTS["nodes"](rows)
    assert len(modes) == len(columns[0][1]) == 9
    measured = collective_time.link(f"measured:{ROWS}").bytes_per_s
    assert measured == pytest.approx(1e9 * rows_of(ROWS)[-4]["link"]["gb_per_s"])
    for row, off in zip(modes, dict(columns[::-1])["off by %"], strict=True):
        assert f"{100 * ((row['compute_ms'] + row['link_ms']) / row['step_ms'] - 1):+.0f}" == off
    best, _, _ = sorted(modes[:3], key=lambda row: row["step_ms"])
    said = nodes.summary_lines(rows[:6])
    assert f"{best['line']} is fastest on this network: {best['step_ms']:.1f} ms a step; " in said
    assert "across, 2 ranks: latency 582 us, bandwidth of a rank 0.0106 GB/s, residual 38 %" in said
    pytest.importorskip("matplotlib")
    nodes.draw(rows, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.slow
def test_two_ranks_of_one_host_are_one_link_two_modes_and_what_was_predicted_of_them(tmp_path):
    results = tmp_path / "rows.jsonl"
    env = os.environ | dict(PYTHON=sys.executable, NO_INSTALL="1", NPROC="2", PYTHONPATH=str(ROOT))
    argv = [ROOT / "launch.sh", *"nodes --mb 0.1 1 --repeat 2 --steps 5 --results".split(), results, *TINY]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    link, *modes = rows_of(results)
    assert (link["setting"]["link"], link["setting"]["ranks"], link["nbytes"]) == ("inside", 2, [100_000, 1_000_000])
    assert [row["line"] for row in modes] == ["replicate", "fully_shard"] and "is fastest on this" in done.stdout
    ms, ms_per_byte = 1e-3 * link["link"]["alpha_us"], 1e-6 / (link["link"]["gb_per_s"] or 1e9)  # which may not be seen
    for row in modes:
        assert row["n"] == 2 and min(row[f"{name}_ms_min"] for name in ("step", "compute", "simulated")) > 0
        sent = sum(collective_time.sent_bytes(op, 2**20 * each["mib"], 2) for op, each in row["collectives"].items())
        calls = sum(each["n"] for each in row["collectives"].values())
        assert row["link_ms"] == pytest.approx(calls * ms + sent * ms_per_byte, rel=0.01)
    assert modes[1]["collectives"].keys() == {"all_reduce", "all_gather", "reduce_scatter"}
    figure = module("lab.benchmarks.nodes", "--results", str(results), "--plot", "none/a.png")
    assert figure.code == 2 and one_line(figure.err).startswith("error: --plot none/a.png: ")


@pytest.mark.parametrize("program", ["nodes", "exposed"])
def test_a_picture_without_rows_is_refused_and_leaves_no_file(tmp_path, program):
    files = "--results", str(tmp_path / "rows.jsonl"), "--plot", str(tmp_path / "a.png")
    done = module(f"lab.benchmarks.{program}", *files)
    assert done.code == 2 and "rows.jsonl" in one_line(done.err) and not [*tmp_path.iterdir()]
