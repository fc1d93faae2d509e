"""The proof of several GPUs (lab/benchmarks/verify): verdicts, bounds, its file; slow: on ranks, with planted faults.

    pytest lab/tests/test_verify.py                          # no ranks are started
    pytest -m slow lab/tests/test_verify.py -k planted       # each fault is found, by its part
"""

import argparse
import contextlib
import gzip
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from harness import free_port
from running import ROOT, one_line

from lab.benchmarks.verify import __main__ as verify
from lab.benchmarks.verify import cluster, machine, overlapped, predicted, right
from lab.benchmarks.verify.cluster import Cluster
from lab.benchmarks.verify.machine import Machine, Verdict
from trainer import config as flags

SETTINGS = verify.tomllib.loads((ROOT / "lab/benchmarks/verify/settings.toml").read_text())
ABOUT = dict(commit="c", code="0", torch="2.13.0", device="CPU", arch="sm_90")
NONE = dict(minutes=10.0, only=[], again=False, world=0, device="cpu", tiny=True)
PLANTS = {  # what is changed in a module once it is imported, in every process
    "sum": ("simple_fsdp", "was = m._average\n"
            "def average(grads, like, cut):\n"
            "    return [like.device_mesh.size() * t for t in (yield from was(grads, like, cut))]\n"
            "m._average = average"),
    "wait": ("overlap", "was = m.Overlap.__call__\n"
             "def call(self, g):\n"
             "    was(self, g)\n"
             "    for n in [n for n in g.nodes if n.target in (m.GATHER, m.SCATTER)]:\n"
             "        n.append(m.wait_of(n))\n"
             "m.Overlap.__call__ = call"),
    "peak": ("trainer.step", "was = m.Step.__call__\n"
             "def call(self, *args, **kwargs):\n"
             "    import torch\n"
             "    more = torch.empty(80 << 20, dtype=torch.uint8)\n"
             "    return was(self, *args, **kwargs)\n"
             "m.Step.__call__ = call"),
    "hang": ("lab.benchmarks.wrappers", "was = m.interleave\n"
             "def interleave(steps, batches, n, device, rank=0, begin=bool):\n"
             "    import os, time\n"
             "    was(steps, batches, 1, device, rank, begin)\n"
             "    time.sleep(3600 * (os.environ.get('RANK') == '1'))\n"
             "    was(steps, batches, n - 1, device, rank, begin)\n"
             "m.interleave = interleave"),
}  # fmt: skip
PLANTED = """
import importlib.util, sys
class Planted:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            def exec_module(m):
                run(m)
                exec({code!r}, dict(m=m))
            spec.loader.exec_module = exec_module
            return spec
sys.meta_path.insert(0, Planted())
"""


def own(**more) -> argparse.Namespace:
    return argparse.Namespace(**NONE | more)


def here(tmp_path, seconds=60.0, **more) -> Machine:
    how = dict(ranks=2, world=0, cuda=False, tiny=True, out=tmp_path, settings=SETTINGS, about=ABOUT, verdicts={})
    return Machine(**how | more, until=time.monotonic() + seconds)


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def file_of(out) -> dict:
    (path,) = out.glob("verify-*.json")
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


NODES = dict(NNODES="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1")


@pytest.mark.parametrize("more, env, message", [
    (dict(minutes=0.0), {}, "--minutes 0: must be above 0"),
    (dict(minutes=float("nan")), {}, "--minutes nan: must be above 0"),
    (dict(world=1), {}, "--world 1: must be at least 2"),
    ({}, dict(NPROC="x"), "NPROC=x: expected a number of processes below 100"),
    ({}, dict(NPROC="1"), "NPROC=1: one rank has nobody to talk to; NPROC=2, or --world 8 to simulate"),
    ({}, dict(NNODES="2"), "NNODES=2 NODE_RANK=None MASTER_ADDR=None MASTER_PORT=29500: expected how many "),
    ({}, NODES | dict(NNODES="1:2"), "NNODES=1:2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500: expected how "),
    ({}, NODES | dict(NODE_RANK="2"), "NNODES=2 NODE_RANK=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500: expected how "),
    ({}, NODES | dict(MASTER_PORT="70000"), "the 2 nodes do not meet at 127.0.0.1:70000: "),
    (dict(world=8), NODES, "--world 8: one process simulates all; leave NNODES out"),
    (dict(only=["7"]), {}, "--only 7: must be 1 to 5, or of 1.1, 1.2, "),
    ({}, dict(OUT="/proc/none"), "--results /proc/none/verify.jsonl: "),
])  # fmt: skip
def test_what_does_not_fit_is_one_line_and_exit_2(more, env, message, out, monkeypatch, capfd):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        verify.main(own(**more), SETTINGS, [] if "only" in more else ["1.1"])
    assert ended.value.code == 2 and one_line(capfd.readouterr().err).startswith(f"error: {message}")


def test_more_ranks_than_gpus_are_refused_and_one_gpu_simulates(out, monkeypatch):
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setattr(verify.torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="^NPROC=4: there are 2 GPUs; give 2 at most, or --device cpu"):
        verify.machine(own(), SETTINGS, 2)
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(verify.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(verify.timing, "environment", lambda device: dict(ABOUT, device=str(device)))
    monkeypatch.setattr(verify.torch.cuda, "get_device_capability", lambda: (12, 0))
    with pytest.raises(ValueError, match="^torch sees no GPU: TORCH=cuda"):
        verify.machine(own(), SETTINGS, 2)
    monkeypatch.setattr(verify.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(verify.torch.cuda.nccl, "version", lambda: (2, 28, 9))
    one = verify.machine(own(), SETTINGS, 1)
    two = verify.machine(own(), SETTINGS, 2)
    assert (one.ranks, one.world, one.all_ranks) == (1, 8, 8) and (two.ranks, two.world, two.cuda) == (2, 0, True)
    assert two.about["arch"] == "sm_100" and two.mark.split()[2:] == ["2.13.0", "cuda"]


def test_a_verdict_is_kept_until_again_or_other_code_and_what_was_not_run_is_run(out, monkeypatch, capsys):
    ran = []

    def check(m, told):
        ran.append(told["name"])
        if told["name"] == "links":
            raise Verdict("not run", f"error: /home/me/x/a.py on {socket.gethostname()} is gone")
        return machine.judged(dict(told, said="{off} % off"), told["name"] != "time of a step", off=4)

    monkeypatch.setattr(verify.pkgutil, "resolve_name", lambda name: check)
    assert verify.main(own(), SETTINGS, ["3.1", "3.3"]) == 0 and ran == ["peak, simulated", "links"]
    assert verify.main(own(), SETTINGS, ["3.1", "3.3", "3.4"]) == 1 and ran[2:] == ["links", "time of a step"]
    found = file_of(out)["verdicts"]
    assert [*found] == ["3.1", "3.3", "3.4"] and found["3.4"]["figures"] == dict(off=4)
    assert found["3.3"]["words"] == "error: a.py on HOST is gone" and found["3.4"]["status"] == "not held"
    text = capsys.readouterr().out
    assert "3.1 peak, simulated: held: 4 % off (as before)\n" in text and "| 3.4 | time of a step | not held |" in text
    assert verify.main(own(again=True), SETTINGS, ["3.1"]) == 1 and ran[4:] == ["peak, simulated"], "3.4 stands"
    monkeypatch.setattr(verify.timing, "code_digest", lambda: "other")
    assert verify.main(own(), SETTINGS, ["3.1"]) == 0 and [*file_of(out)["verdicts"]] == ["3.1"]


def test_the_name_by_which_nodes_meet_is_not_in_the_file(tmp_path, monkeypatch):
    def check(m, told):
        raise Verdict("not run", f"first.example and {socket.gethostname()} are gone")

    monkeypatch.setattr(verify.pkgutil, "resolve_name", lambda name: check)
    m = here(tmp_path, cluster=Cluster(2, 0, "first.example", 29500))
    assert verify.checked(m, "3.3")["words"] == "HOST and HOST are gone"


def test_a_program_is_bounded_and_its_end_is_a_verdict(tmp_path):
    short = SETTINGS | dict(limits=dict(program=1))

    def ended(m, program, **how):
        with pytest.raises(Verdict) as found:
            m.run(["-c", program], **how)
        return found.value.status, found.value.words

    assert ended(here(tmp_path, settings=short), "import time; time.sleep(60)") == (
        "not held", "-c did not end within 1 s")  # fmt: skip
    assert ended(here(tmp_path, seconds=0.5), "import time; time.sleep(60)") == ("not run", machine.LATE)
    said = "print('error: why'); print('more'); raise SystemExit({})"
    assert ended(here(tmp_path), said.format(7)) == ("not held", "exit code 7, expected 0: error: why")
    assert ended(here(tmp_path), said.format(2)) == ("not run", "exit code 2, expected 0: error: why")
    left = "print('3 of 4 cells without a result: why'); print('to draw them'); raise SystemExit(1)"
    assert ended(here(tmp_path), left)[1] == "exit code 1, expected 0: 3 of 4 cells without a result: why"
    assert ended(here(tmp_path), said.format(6))[0] == "not run", "memory that is too small"
    assert ended(here(tmp_path), "print('well')", code=5) == ("not held", "exit code 0, expected 5: well")
    assert here(tmp_path).run(["-c", said.format(5)], code=5) == "error: why\nmore\n"


@contextlib.contextmanager
def two_nodes(then, same=("code a", "code a")):
    """Node 0, once it has met node 1, which is a thread that meets and does what `then` says. A fork that runs Python
    (follow_parent) from a thread ends what the main thread keeps, and waits for ever where that holds a gloo group."""
    both = [Cluster(2, node, "127.0.0.1", free_port()) for node in range(2)]
    both[1].port = both[0].port
    with mock.patch.object(cluster, "follow_parent", None), ThreadPoolExecutor() as threads:
        other = threads.submit(lambda: (both[1].meet(same[1]), then(both[1])))
        both[0].meet(same[0])
        try:
            yield both[0], other
        finally:
            for peer in both[0].peers:
                peer.lines.close()
                peer.connection.close()


def test_other_nodes_run_what_node_0_says_at_the_same_time_and_end_as_it_does(tmp_path):
    meet = """import os, pathlib, sys, time
own = int(os.environ["PET_NODE_RANK"])
pathlib.Path(sys.argv[1], f"{own}").touch()
while not pathlib.Path(sys.argv[1], f"{1 - own}").exists():
    time.sleep(0.01)
print("node", own)
sys.exit(int(os.environ["CODES"].split()[own]))"""
    with two_nodes(lambda node: node.follow(60.0)) as (first, other):
        m = here(tmp_path, cluster=first)
        assert sorted(m.run(["-c", meet, str(tmp_path)], on_all=True, CODES="0 0").split()) == [*"01", "node", "node"]
        assert m.run(["-c", "print(1)"]) == "1\n", "on node 0 alone"
        name = ["-c", "import socket; print(socket.gethostname())"]
        assert m.run(name, on_all=True) == f"{socket.gethostname()}\nHOST\n", "other hosts tell no names"
        for codes, first_to_fail in (("7 137", 137), ("0 7", 7), ("7 5", 5), ("143 5", 5), ("5 0", 5)):
            with pytest.raises(Verdict, match=f"exit code {first_to_fail}, expected 0: node "):
                m.run(["-c", meet, str(tmp_path)], on_all=True, CODES=codes)
            m.run(["-c", meet, str(tmp_path)], first_to_fail, on_all=True, CODES=codes)
        m.until = time.monotonic()
        with pytest.raises(Verdict, match=machine.LATE):
            m.run(["-c", meet, str(tmp_path)], on_all=True, CODES="0 0")
        assert first.end(1) == 1 and other.result(60) == (None, 1)


def test_nodes_that_differ_are_told_and_one_that_ends_ends_all():
    told = re.escape("the other nodes are [[1, 'code b']], expected [[1, 'code a']]: start one line on all")
    with pytest.raises(ValueError, match=told), two_nodes(None, ("code a", "code b")):
        pass
    job = dict(words=["-c", ""], limit=9.0, env={})
    with two_nodes(lambda node: node.peers[0].receive(60)) as (first, other):
        first.end(0)
        assert other.result(60) == (None, dict(code=0))
    with two_nodes(lambda node: (node.peers[0].lines.close(), node.peers[0].connection.close())) as (first, _):
        with pytest.raises(ConnectionError):
            for _ in range(9):
                first.run(on_all=True, **job)


def test_fewer_ranks_run_on_one_node_or_on_all_and_ranks_that_do_not_divide_are_not_run(tmp_path):
    m = here(tmp_path, ranks=6, cluster=Cluster(3))
    assert [m.nodes_of(n) for n in range(1, 7)] == [1, 1, 3, 0, 0, 3]
    with pytest.raises(Verdict, match="4 ranks do not divide among 3 nodes"):
        m.on_ranks(4, "main.py")
    m.cuda = True
    (tmp_path / "verify-links-6.jsonl").write_text("{}")
    for check, why in ((predicted.links, "./launch.sh nodes measures"), (predicted.step, "it needs the links of 3.3")):
        with pytest.raises(Verdict, match=why) as found:
            check(m, SETTINGS["checks"]["3.3"])
        assert found.value.status == "not run"


def test_links_of_gpus_are_judged_by_the_last_row_of_the_study(tmp_path, monkeypatch):
    rows = [dict(outcome="ok", link=dict(alpha_us=20.0, gb_per_s=370.0, residual=0.1)),
            dict(outcome="ok", link=dict(alpha_us=20.0, gb_per_s=370.0, residual=0.5)),
            dict(outcome="failed: why")]  # fmt: skip

    def run(self, words):
        with open(words[words.index("--results") + 1], "a") as file:
            file.write(json.dumps(rows.pop(0)) + "\n")

    monkeypatch.setattr(Machine, "run", run)
    m = here(tmp_path, cuda=True)
    check = SETTINGS["checks"]["3.3"]
    assert [predicted.links(m, check).status for _ in range(2)] == ["held", "not held"]
    with pytest.raises(Verdict, match="failed: why"):
        predicted.links(m, check)
    with pytest.raises(Verdict, match="there is no GPU"):
        predicted.links(here(tmp_path), check)


def test_every_setting_fits_main_and_every_check_has_a_function(tmp_path):
    for told in SETTINGS["checks"].values():
        assert callable(verify.pkgutil.resolve_name(f"lab.benchmarks.verify.{told['check']}"))
    m = here(tmp_path)
    checks = SETTINGS["checks"]
    tiny = [*checks["1.1"]["ours"].values(), *checks["1.1"]["theirs"].values()]
    for n in (3, 8):
        m.ranks = n
        for words in [f"{each} --compile none" for each in tiny] + [
            *checks["1.2"]["settings"].values(), *checks["1.3"]["settings"].values(), "--mode replicate",
        ]:  # fmt: skip
            flags.resolve(flags.parse(right.flags(m, n, words).split()), "cpu", n)
    for number in ("2.2", "4.1", "4.2"):
        for words in checks[number]["settings"].values():
            words = f"{checks[number].get('flags', '')} {words} --device cuda".split()
            flags.resolve(flags.parse(words), "cuda", 2)


def test_losses_that_differ_are_told_with_the_setting_and_what_is_no_number_is_far(tmp_path):
    a = dict(losses=[5.0, 4.0], norms=[1.0, 2.0], bits=1)
    m = here(tmp_path)
    check = SETTINGS["checks"]["1.2"]
    assert right.close(m, check, dict(a=(a, a))).status == "held"
    for key, value in (("losses", 4.00001), ("losses", float("nan")), ("norms", 2.1), ("norms", float("inf"))):
        other = a | {key: [a[key][0], value]}
        found = right.close(m, check, {"a": (a, a), "fwdbwd": (other, a)})
        assert found.status == "not held" and found.words.startswith("fwdbwd is the worst of 2: losses off by ")
        assert json.dumps(found.figures, allow_nan=False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_two_ranks_the_bits_of_fsdp2_are_asked_for(tmp_path, monkeypatch, ranks):
    def trained(self, n, asked):
        apart = ("fsdp2", "bf16")
        return {name: dict(losses=[5.0], norms=[1.0], bits=name if name.endswith(apart) else 1) for name in asked}

    monkeypatch.setattr(Machine, "trained", trained)
    found = right.pairs(here(tmp_path, ranks=ranks), SETTINGS["checks"]["1.1"])
    assert found.status == ("not held" if ranks == 2 else "held")
    assert found.words.endswith("bit for bit: ddp, muon" + ", expected fsdp2, ddp" * (ranks == 2))


def trace(path, kernels) -> None:
    """A Chrome trace of (name, begin, end, stream)."""
    events = [dict(cat="kernel", name=name, ts=a, dur=b - a, args=dict(stream=stream, grid=[24, 1, 1]))
              for name, a, b, stream in kernels]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(dict(traceEvents=[dict(name="x"), *events])).encode()))


GATHER = "ncclDevKernel_AllGather_RING_LL"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
OVERLAPPED = [  # us; 30 of NCCL's 40 beside products, 5 more beside a cast
    (GATHER, 0, 10, 9), ("triton_cast", 0, 5, 7), ("nvjet_gemm", 10, 20, 7), ("nvjet_gemm", 20, 32, 7),
    (SCATTER, 20, 50, 9), ("flash_bwd", 32, 60, 7), ("ncclDevKernel_AllReduce_Sum_f32", 60, 61, 9),
]  # fmt: skip


def test_what_kernels_say_is_shares_exposed_time_order_streams_and_slower_products(tmp_path):
    trace(tmp_path / "a.gz", OVERLAPPED)
    found = overlapped.looked_at(overlapped.kernels(tmp_path / "a.gz"))
    assert found["nccl_ms"] == pytest.approx(0.02) and found["exposed_ms"] == pytest.approx(0.0025)
    assert found["share"] == pytest.approx(35 / 40) and found["share_of_products"] == pytest.approx(30 / 40)
    assert (found["order"], found["own_streams"], found["sms"]) == ("G", 1, 24)
    assert found["products_beside"] == pytest.approx(1.2)
    trace(tmp_path / "b.gz", OVERLAPPED[1:4])
    with pytest.raises(Verdict, match="no kernel of NCCL"):
        overlapped.looked_at(overlapped.kernels(tmp_path / "b.gz"))


@pytest.mark.parametrize("late, status", [(0, "held"), (1000, "not held")])
def test_a_trace_whose_collectives_wait_is_not_held(tmp_path, monkeypatch, late, status):
    two = [(name, a + 100 * k, b + 100 * k, stream) for k in range(2) for name, a, b, stream in
           [(GATHER, 0, 10, 9), ("gemm", 0, 60, 7), (SCATTER, 20, 50, 9)]]  # fmt: skip
    ours = [(name, a + late * (stream == 9), b + late * (stream == 9), stream) for name, a, b, stream in two]

    def trained(self, n, settings, steps, traces):
        for name in settings:
            trace(machine.Path(traces, name, "rank0.trace.json.gz"), ours if name == "ours" else two)
        return {name: dict(ms=[1.0]) for name in settings}

    monkeypatch.setattr(Machine, "trained", trained)
    monkeypatch.setattr(overlapped, "counted", lambda m, small: [("all-gather", 1), ("reduce-scatter", 2)])
    found = overlapped.timed(here(tmp_path, cuda=True), SETTINGS["checks"]["2.2"])
    assert found.status == status and found.figures["ours"]["order"] == "GR"
    assert found.words.startswith(f"{0 if late else 1:.2f} of NCCL's 0.0 ms hidden (at least 0.6), "), found.words


@pytest.mark.parametrize("device, name", [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA GH200 480GB", "gh200"),
    ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-PCIE-40GB", "a100-40"), ("NVIDIA H200", "h200"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA B200", "b200"), ("Some TPU", None),
])  # fmt: skip
def test_plan_is_asked_for_the_gpu_that_is_there(tmp_path, monkeypatch, device, name):
    monkeypatch.setattr(Machine, "run", lambda self, words: words[2])
    m = here(tmp_path, about=ABOUT | dict(device=device))
    if name:
        assert predicted.planned(m) == name
    else:
        with pytest.raises(Verdict, match="plan.py knows no Some TPU"):
            predicted.planned(m)


def test_parts_3_and_4_compare_rows_with_plans_and_with_fsdp2(tmp_path, monkeypatch):
    """Of two GPUs that are not there: rows are made up, plan.py is real."""
    m = here(tmp_path, cuda=True, tiny=False, about=ABOUT | dict(device="NVIDIA H100 80GB HBM3"))
    row = dict(step_ms=330.0, step_ms_min=325.0, tok_s=9e4, mfu=55.1, peak_alloc_mib=24_200.0, peak_reserved_mib=26_000)
    rows = lambda self, words: row | dict(step_ms_min=row["step_ms_min"] + 9 * ("fsdp2" in words))  # noqa: E731
    monkeypatch.setattr(Machine, "row", rows)
    (tmp_path / "verify-links-2.jsonl").write_text('{"link": {"alpha_us": 20.0, "gb_per_s": 370.0}}\n')
    checks = SETTINGS["checks"]
    found = predicted.step(m, checks["3.4"])
    planned = found.figures["planned_ms"]
    assert found.words.startswith(f"planned {planned:.1f} ms, least measured 325.0 (")
    assert found.status == ("held" if abs(planned / 325 - 1) <= 0.15 else "not held")
    best = predicted.fast(m, checks["4.1"])
    assert best.words == "use --remat none --steps 16: 90000 tokens/s, MFU 55.1 %, 0.973 of FSDP2's step (at most 1.02)"
    assert re.search("use .* --depth (8|16|24|32): ", predicted.fast(m, checks["4.2"]).words)
    with pytest.raises(Verdict, match="no depth of 32 is planned to fit"):
        predicted.fast(m, checks["4.2"] | dict(depths="32", flags="--width 16384"))
    assert predicted.fast(m, checks["4.1"] | dict(most=0.97)).status == "not held"
    with pytest.raises(Verdict, match="it needs 3.1"):
        predicted.allocated(m, checks["3.2"])
    for simulated, status in ((24_000.0, "held"), (23_000.0, "not held")):
        m.verdicts["3.1"] = dict(figures=dict(simulated_mib=simulated))
        assert predicted.allocated(m, checks["3.2"]).status == status


def test_a_row_is_run_once_and_found_again(tmp_path, monkeypatch):
    ran = []

    def on_ranks(self, n, script, *words, SWEEP_CELL):
        ran.append(words)
        with open(self.out / "verify.jsonl", "a") as file:
            file.write(json.dumps(dict(cell=SWEEP_CELL, outcome="ok", step_ms=1.0)) + "\n")

    monkeypatch.setattr(Machine, "on_ranks", on_ranks)
    m = here(tmp_path)
    assert m.row("--depth 2") == m.row("--depth 2")
    assert len(ran) == 1 and ran[0][:4] == ("--depth", "2", "--device", "cpu")
    m.about = ABOUT | dict(code="1")
    assert m.row("--depth 2")["cell"] == "c 1 2.13.0 CPU nproc=2 --depth 2" and len(ran) == 2


@pytest.mark.parametrize("cuda, how", [(True, "--device cuda"), (False, "--small")])
def test_programs_of_one_gpu_run_with_8_simulated_ranks_and_their_rows_go_to_one_file(cuda, how, tmp_path, monkeypatch):
    ran = []

    def run(self, words, **env):
        ran.append(" ".join(words))
        return "12 cells\nto draw them\n" if "lab.sweeps.sweep" in words else "x\n12\n\n"

    monkeypatch.setattr(Machine, "run", run)
    m = here(tmp_path, world=8, ranks=1, cuda=cuda, tiny=not cuda)
    checks = SETTINGS["checks"]
    parts = [check for number, check in checks.items() if number.startswith("5.")]
    large = [part for part in parts if part.get("axis", "").startswith("gpu-") or part.get("words") == ""]
    for part in large * (not cuda):
        with pytest.raises(Verdict, match="--tiny leaves it out"):
            predicted.owed(m, part)
    parts = parts if cuda else [part for part in parts if part not in large]
    found = [predicted.owed(m, part) for part in parts]
    assert {each.status for each in found} == {"held" if cuda else "not measured"}, "skipped tests prove nothing"
    assert {each.words for each in found} == {"it ended well: 12", "it ended well: 12 cells"}
    axis, at = ("gpu-owed", 15) if cuda else ("gpus", 2)
    file = tmp_path / ("gpu.jsonl" if cuda else "gpu-tiny.jsonl")
    assert ran[at] == f"-m lab.sweeps.sweep {axis} --budget 450 --results {file} {how}"
    assert all((ROOT / f"cells/axes/{part['axis']}.txt").exists() for part in parts if "axis" in part)
    assert all(str(file) in words for words in ran[1:16])
    m.world = 0
    with pytest.raises(Verdict, match="it needs one GPU: ./launch.sh gpu"):
        predicted.owed(m, parts[0])


def test_a_sweep_with_cells_left_is_not_run_and_a_test_that_fails_is_not_held(tmp_path, monkeypatch):
    def run(self, words, **env):
        raise Verdict("not held", "exit code 1, expected 0: 3 cells left")

    monkeypatch.setattr(Machine, "run", run)
    for number, status in (("5.8", "not run"), ("5.1", "not held")):
        with pytest.raises(Verdict) as found:
            predicted.owed(here(tmp_path, world=8), SETTINGS["checks"][number])
        assert found.value.status == status


def test_launch_gpu_is_verify_of_8_simulated_ranks(tmp_path):
    told = tmp_path / "told"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {told}\n')
    python.chmod(0o755)
    for words, more in (([], ""), (["--tiny"], " --tiny"), (["17", "--tiny"], " --only 5.17 --tiny")):
        ended = launch(python, "gpu", *words)
        assert ended.returncode == 0 and told.read_text() == f"-m lab.benchmarks.verify --world 8 --minutes 180{more}\n"
    ended = launch(python, "gpu", "19")
    assert (ended.returncode, ended.stderr) == (2, "launch.sh: gpu: no part '19', expected 1 to 18\n")


def launch(python, *words):
    env = os.environ | dict(NO_INSTALL="1", PYTHON=str(python))
    return subprocess.run([ROOT / "launch.sh", *words], env=env, capture_output=True, text=True)


def run(out, monkeypatch, ranks: int, numbers: list[str], *plants: str) -> dict[str, str]:
    """The verdicts of a whole run, by number."""
    monkeypatch.setenv("NPROC", str(ranks))
    settings = SETTINGS
    if plants:
        (out / "planted").mkdir()
        text = "".join(PLANTED.format(name=PLANTS[plant][0], code=PLANTS[plant][1]) for plant in plants)
        (out / "planted/sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(out / "planted"))
        settings = SETTINGS | dict(limits=SETTINGS["limits"] | dict(step=8))
    code = verify.main(own(minutes=30.0), settings, numbers)
    found = {number: told["status"] for number, told in file_of(out)["verdicts"].items()}
    assert code == ("not held" in found.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_cpu_ranks_all_that_they_can_show_is_held(ranks, out, monkeypatch):
    """The whole list. How long that takes is the log's (--durations) to say: it hangs on what else the machine does."""
    found = run(out, monkeypatch, ranks, [*SETTINGS["checks"]])
    shown = [number for number, status in found.items() if status == "held"]
    assert shown == "1.1 1.2 1.4 1.5 1.6 2.1 3.1".split(), file_of(out)
    assert {found[number] for number in found.keys() - {*shown}} == {"not measured"}
    (path,) = out.glob("verify-*.json")
    text = path.read_text()
    assert str(ROOT) not in text and str(out) not in text and socket.gethostname() not in text


@pytest.mark.slow
def test_two_nodes_of_one_rank_write_one_file_and_find_what_is_planted_on_the_other(out, monkeypatch):
    """On one machine. A rank of node 1 is killed in 1.4 and hangs in 1.6, which node 0 says of it."""
    command = [sys.executable, "-m", "lab.benchmarks.verify", "--device", "cpu", "--tiny", "--only", "1.4", "1.6", "3"]
    env = os.environ | NODES | dict(NPROC="1", MASTER_PORT=str(free_port()), PYTHONPATH=str(ROOT))
    how = dict(cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    both = [subprocess.Popen(command[: len(command) - 4 * node], env=env | dict(NODE_RANK=str(node)), **how)
            for node in (1, 0)]  # fmt: skip
    other, first = ([each.communicate(timeout=400)[0], each.returncode] for each in both)
    assert first[1] == other[1] == 0, first + other
    assert other[0].startswith("node 1 of 2, which meet at ") and other[0].count("\n") == 1
    found = {number: told["status"] for number, told in file_of(out)["verdicts"].items()}
    shown = [number for number, status in found.items() if status == "held"]
    assert shown == ["1.4", "1.6", "3.1"] and file_of(out)["about"]["nodes"] == 2
    assert not [*out.glob("tmp*")], "folders of checks are gone"


@pytest.mark.slow
def test_planted_faults_are_found_each_by_its_part_and_by_as_much_as_was_planted(out, monkeypatch):
    """Three faults in one run, in which each check may see its own alone: the others would change its figures."""
    found = run(out, monkeypatch, 2, ["1.1", "2.1", "3.1"], "sum", "wait", "peak")
    assert {*found.values()} == {"not held"}, file_of(out)
    norms, order, peak = (told["figures"] for _, told in sorted(file_of(out)["verdicts"].items()))
    assert {name: float(figure.split()[1]) for name, figure in norms.items()} == pytest.approx(
        dict.fromkeys("fsdp2 ddp bf16 muon".split(), 1.0), rel=0.05), "twice the norm on two ranks"  # fmt: skip
    assert order == dict(gathers=9, reductions=5, order="G" * 9 + "R" * 5), "all wait at once, in the order that it was"
    assert abs((peak["simulated_mib"] - 80) / peak["planned_mib"] - 1) < 0.02 < peak["off"]


@pytest.mark.slow
def test_a_planted_rank_that_hangs_is_named(out, monkeypatch):
    assert run(out, monkeypatch, 2, ["1.1"], "hang") == {"1.1": "not held"}
    words = file_of(out)["verdicts"]["1.1"]["words"]
    assert words.startswith("exit code 7, expected 0: error: ") and "rank 1" in words, words
