"""Gloo groups have one worker thread each, whoever makes them. Why: gloo.py."""

import os
import pickle
import runpy
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import processes, start_server

import gloo


def elsewhere(work, *args, **env):
    """What `work` returns in a new process, which none of the tests' own calls has prepared."""
    with ProcessPoolExecutor(1, processes) as pool:
        return pool.submit(_there, start_server() | dict(CUDA_VISIBLE_DEVICES="") | env, work, *args).result(120)


def _there(env, work, *args):
    os.environ.clear()
    os.environ |= env
    return work(*args)


def groups(timeout):
    """Of all groups: worker threads, timeout in seconds, devices."""
    from running import resolved

    from trainer.distributed.control import control_group
    from trainer.distributed.launch import connect, shutdown

    connect(resolved("--device cpu"), 0, 0, 1, timeout)
    control_group()
    told = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["pg_status"]
    assert len(told) == 1, "a thread must not be the first to use a control group"
    dist.new_group()  # as those of a mesh are made
    made = [group._get_backend(torch.device("cpu")).options for group in dist.distributed_c10d._world.pg_map]
    assert len(made) == 3
    told = {(o._threads, o._timeout.total_seconds(), len(o._devices)) for o in made}
    shutdown()
    return told


def workers(prepared):
    """Threads of this process that run collectives, of two groups."""
    if prepared:
        gloo.one_worker_thread()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group()
    time.sleep(1)  # a thread gets its name once it runs
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


def asked(name, argv):
    """The module that makes gloo groups when a command asks for its first."""

    class Asked(BaseException):
        pass

    def made(*_, **__):
        raise Asked(dist.ProcessGroupGloo.__init__.__module__)

    dist.init_process_group = dist.device_mesh.init_process_group = made
    sys.argv = [name, *argv]
    try:
        runpy.run_path(name, run_name="__main__") if name.endswith(".py") else runpy.run_module(name, None, "__main__")
    except Asked as told:
        return str(told)
    raise AssertionError("no group was asked for")


@pytest.mark.parametrize("env", [{}, dict(GLOO_SOCKET_IFNAME="lo"), dict(TORCH_DISTRIBUTED_DEBUG="DETAIL")], ids=str)
def test_every_group_of_a_run_has_one_worker_its_timeout_and_its_device(env):
    assert elsewhere(groups, 77.0, **env) == {(1, 77.0, 1)}


@pytest.mark.long
def test_two_groups_have_two_worker_threads_where_torch_would_have_more():
    """By the names that torch gives to threads: what the option says is also what runs."""
    assert elsewhere(workers, True) == 2 < elsewhere(workers, False)


@pytest.mark.parametrize("command", [
    "main.py --device cpu", "lab.benchmarks.wrappers simple:none -- --device cpu",
    "speed_mem_tests_mlp.py --width 64 --seqlen 64 --device cpu", "trainer.checkpoint.export HERE HERE/out.safetensors",
])  # fmt: skip
def test_every_command_asks_for_it_before_its_first_group(command, tmp_path):
    name, *argv = command.replace("HERE", str(tmp_path)).split()
    results = ["--results", str(tmp_path / "rows.jsonl")] if "--device" in argv else []
    assert elsewhere(asked, name, argv + results) == "gloo"


def test_options_that_somebody_gives_keep_all_but_their_threads():
    store = dist.HashStore()
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")] * 2
    options._threads = 4
    gloo.one_worker_thread()  # again: nothing
    made = dist.ProcessGroupGloo(store, 0, 1, options)
    assert (made.options._threads, len(made.options._devices)) == (1, 2)
    by_position = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
    assert (by_position.options._threads, by_position.options._timeout) == (1, timedelta(seconds=5))
