"""Settings of sweeps, lab/sweeps/sweep.py: what lines of a file and the named axes become. No setting is run.

    pytest lab/tests/test_settings.py        # seconds
"""

import csv
import functools
import re
import shlex
import sys
from dataclasses import fields, replace

import pytest
from running import ROOT

from lab.sweeps import sweep
from trainer import config

GRID = """\
# {not,a,setting}
--depth {1,2} --width {64,128 --no-reshard}
[full] --lr 1 ranks=4
--seed {3}
[small] ranks=2

--clip {2,0}  # a comment
"""


def test_braces_and_sections_make_the_settings_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "gpus", lambda: 1)
    (tmp_path / "settings").write_text(GRID)
    grid = [f"nproc=1 --depth {d} {w}" for d in (1, 2) for w in ("--width 64", "--no-reshard --width 128")]
    full = sweep.read_settings(str(tmp_path / "settings"), False, 1, [])
    assert full == [*grid, "nproc=1 --link h100-nvlink --lr 1 --seed 3 --world 4"]
    small = [sweep.parse(setting.split()) for setting in sweep.read_settings(str(tmp_path / "settings"), True, 1, [])]
    assert [n for n, _ in small] == [1, 1, 1, 1, 2, 2]
    assert [flags.get("--clip") for _, flags in small[4:]] == [("2",), ("0",)]


def test_the_small_settings_are_those_that_have_been_run():
    """A setting that were called otherwise would be run again."""
    rows = sweep.current(sweep.read_rows(ROOT / "results" / "sweep-all-small.jsonl"), relaxed=True)
    for axis, settings in sweep.studies("all", True, 2, []).items():
        assert axis == "attention" or sweep.unfinished(settings, rows) == [], axis  # of which some have not been run


def test_an_unknown_axis_lists_the_known(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep", "colour"])
    with pytest.raises(SystemExit) as stopped:
        sweep.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.startswith("sweep: unknown axis 'colour': expected a file, all, or one of ") and said.count("\n") == 1
    assert all(axis in said for axis in ("all", *sweep.axes()))


@functools.cache
def parsed(*words):
    return config.parse(words)


def resolved(setting, device):
    """(what main.py would train, the ranks that it is started on); every flag goes through its parser, but once."""
    nproc, flags = sweep.parse(shlex.split(setting))
    groups = {name: getattr(parsed(), name) for name in ("training", "system", "output")}
    for flag, values in flags.items():
        name = flag[2:].removeprefix("no-").replace("-", "_")
        other = config.command_line.flag(config.ONLY_WITH.get(name, ("",))[0])
        given = parsed(*([other, *flags[other]] if other in flags else []), flag, *values)
        group = next(group for group, value in groups.items() if name in {field.name for field in fields(value)})
        groups[group] = replace(groups[group], **{name: getattr(given, name)})
    return config.resolve(config.Config(**groups), device, nproc), nproc


@pytest.mark.parametrize("gpus", ["small", 1, 4, 8])
def test_main_accepts_every_setting_of_every_axis_but_the_bad_shapes_and_no_two_are_the_same(monkeypatch, gpus):
    small = gpus == "small"
    refused = set()
    seen = {}
    monkeypatch.setattr(sweep, "gpus", lambda: 0 if small else gpus)
    everything = sweep.read_settings("all", small, 2, [])
    for axis in sweep.axes():
        settings = sweep.read_settings(axis, small, 2, [])
        assert len(settings) >= 3 and (axis.startswith("gpu-") or set(settings) <= set(everything)), axis
        for setting in settings:
            # What a CPU cannot do is not asked of it.
            assert not small or "--device cpu" in setting and "flex" not in setting
            try:
                config_, nproc = resolved(setting, "cpu" if small else "cuda")
                assert nproc <= (2 if axis in ("gpus", "wrappers") and small else max(2, gpus if not small else 2))
                if not axis.startswith("gpu-"):
                    assert seen.setdefault((config_.training, config_.system, nproc), setting) == setting
            except ValueError as error:
                assert str(error).startswith("--grouping 4: must divide the 6 heads")
                refused.add((axis, setting))
    odd_width = {(axis, "--width 96 " in line or "--width 768 " in line) for axis, line in refused}
    assert odd_width == {("width", True)}
    assert len(refused) == 1 and len(seen) == len(everything) - 1


def test_the_published_tables_are_covered(monkeypatch):
    def published(file, *columns):
        lines = csv.DictReader((ROOT / "published" / file).read_text().splitlines())
        return {tuple(line[column] for column in columns) for line in lines}

    def ours(axis, *flags):
        found = [sweep.parse(shlex.split(setting)) for setting in sweep.read_settings(axis, False, 2, [])]
        named = [own | {"n": own.get("--world", [str(n)])} for n, own in found]
        return {tuple(own[flag][0].replace("auto", "sdpa") for flag in flags) for own in named}

    monkeypatch.setattr(sweep, "gpus", lambda: 1)
    for axis in ("seqlen", "depth", "width"):
        assert ours(axis, f"--{axis}") == published(f"{axis}.csv", axis)
    assert ours("gpus", "n", "--batch") == published("gpus.csv", "ranks", "batch")
    small = {"replicate": "1", "shard": "0"}
    assert ours("small-params", "--depth", "--seqlen", "--min-shard-mib", "n") == {
        (depth, seqlen, small[how], ranks)
        for ranks, depth, seqlen, how in published("small-params.csv", "ranks", "depth", "seqlen", "small")
    }
    assert ours("mfu", "n", "--attn", "--seqlen", "--depth", "--remat", "--grouping", "--mode") == {
        line for line in published("mfu.csv", "ranks", "attn", "seqlen", "depth", "remat", "grouping", "mode")
        if line[0] == "4"
    }  # fmt: skip
    assert published("variants.csv", "remat", "compile") < ours("variants", "--remat", "--compile")


@pytest.mark.parametrize("listed, visible, gpus", [
    ("GPU 0: A\nGPU 1: A\nGPU 2: A\n", None, 3), ("GPU 0: A\nGPU 1: A\nGPU 2: A\n", "0,2", 2),
    ("GPU 0: A\n", "", 0), ("No devices were found\n", "0", 0), (None, "0", 0),
])
def test_ranks_that_the_machine_lacks_are_simulated(tmp_path, monkeypatch, listed, visible, gpus):
    if listed is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ $1 = -L ] && printf '%s' '{listed}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sweep.gpus.cache_clear()
    monkeypatch.setattr(sweep, "gpus", sweep.gpus.__wrapped__)
    assert sweep.gpus() == gpus
    settings = sweep.read_settings("gpus", False, 2, [])
    started = [(int(setting.split()[0][6:]), re.findall(r"--world (\d)", setting)) for setting in settings]
    real = max(1, gpus)
    assert started == [(n, []) if n <= real else (1, [str(n)]) for n in (1, 2, 3, 4, 6, 8, 1, 2, 4)]
    assert all("--link h100-nvlink" in setting for setting in settings if "--world" in setting)


def test_world_on_the_command_line_is_for_settings_that_name_no_ranks(tmp_path):
    file = tmp_path / "settings"
    file.write_text("--depth 1\nnproc=2 --depth 2\n--world 4 --depth 3\n")
    assert sweep.read_settings(str(file), False, 2, "--world 8 --link none".split()) == [
        "nproc=1 --depth 1 --link none --world 8", "nproc=2 --depth 2 --link none",
        "nproc=1 --depth 3 --link none --world 4",
    ]  # fmt: skip


def test_the_row_of_a_dead_setting_holds_its_whole_setting(monkeypatch):
    """That of main.py, also where the shape is bad; what main.py does not accept is kept as it was given."""
    monkeypatch.setattr(sweep, "gpus", lambda: 0)
    flags = sweep.failed_row("nproc=1 --depth 3 --loss chunked --lr 1e-3 --no-reshard", "timeout")["flags"]
    assert flags == config.setting(resolved("nproc=1 --depth 3 --loss chunked --lr 1e-3 --no-reshard", "cpu")[0])
    row = sweep.failed_row("nproc=1 --width 96 --min-shard-mib 0.5", "exit 1: error: --grouping 4: must divide")
    assert (row["outcome"], row["min_shard_mib"]) == ("badshape", 0.5)
    assert (row["flags"]["width"], row["flags"]["vocab"]) == (96, 256)
    other = sweep.failed_row("nproc=1 --no-such-flag --depth 3", "timeout")
    assert other["flags"] | {"such_flag": False, "depth": 3} == other["flags"]
    assert (other["flags"]["seed"], other["depth"]) == (0, 3)
    assert sweep.failed_row("nproc=1 --depth 3", "timeout", {"depth": 3, "own": 1})["flags"] == {"depth": 3, "own": 1}


def test_the_row_of_a_dead_simulation_says_that_it_was_one():
    assert sweep.failed_row("nproc=1 --link none --world 8", "timeout")["world"] == "8(sim none)"
    told = config.world_label(resolved("--world 8", "cpu")[0], 1)  # what main.py writes
    assert sweep.failed_row("nproc=1 --world 8", "timeout")["world"] == told


def test_flags_of_the_command_line_win_and_order_does_not_matter(tmp_path):
    file = tmp_path / "settings"
    file.write_text("--depth 2 --reshard --width=64 --o a=1 b=2\nnproc=2 --width 64 --o a=1 b=2 --depth 2\n")
    assert sweep.read_settings(str(file), False, 2, ["--depth", "4", "--no_reshard"]) == [
        "nproc=2 --depth 4 --no-reshard --o a=1 b=2 --width 64"
    ]
