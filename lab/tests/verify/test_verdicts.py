"""That the proof can fail: verdicts on made-up rows and traces; slow: on CPU ranks, with planted faults.

    pytest lab/tests/verify/test_verdicts.py -m 'not slow'       # no ranks are started
"""

import gzip
import json
import socket
import sys
from xml.etree import ElementTree

import machine as machines
import pytest
import test_overlapped as overlapped
import test_predicted as predicted
import test_right as right
from machine import ROOT, Machine, machine
from running import ran, resolved

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
SUM = """was = m._average
def average(grads, like, cut):
    return [like.device_mesh.size() * t for t in (yield from was(grads, like, cut))]
m._average = average
"""
WAIT = """was = m.Overlap.__call__
def call(self, g):
    was(self, g)
    for n in [n for n in g.nodes if n.target in (m.GATHER, m.SCATTER)]:
        n.append(m.wait_of(n))
m.Overlap.__call__ = call
"""
HANG = """import os, time
was = m.Step.__call__
def call(self, *args, **kwargs):
    self.calls = getattr(self, "calls", 0) + 1
    time.sleep(3600 * (self.calls == 3 and os.environ.get("RANK") == "1"))
    return was(self, *args, **kwargs)
m.Step.__call__ = call
"""


def unrecorded(name, value):
    """In place of record_property."""


@pytest.mark.parametrize(
    "how, environment, message",
    [
        (("cpu", 1), {}, "--world 1: must be at least 2"),
        (("cpu", 0), dict(NPROC="x"), "NPROC=x: expected a number of processes below 100"),
        (("cpu", 0), dict(NPROC="1"), "NPROC=1: one rank has nobody to talk to; NPROC=2, or --world 8 to simulate"),
        (("cpu", 0), dict(NNODES="2"), "NNODES: the proof is of one machine"),
        (("cuda", 0), dict(NPROC="4"), "NPROC=4: there are 2 GPUs; give 2 at most, or --device cpu"),
    ],
)
def test_a_machine_that_does_not_fit_is_refused(how, environment, message, tmp_path, monkeypatch):
    monkeypatch.setattr(machines.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        machine(*how, environment, tmp_path)


def test_one_gpu_simulates_eight_ranks_and_no_gpu_is_no_machine(tmp_path, monkeypatch):
    found = {}
    for gpus in range(3):
        monkeypatch.setattr(machines.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        found[gpus] = machine("cuda", 0, {}, tmp_path)
    assert found[0] is None
    assert found[1] == Machine("cuda", 1, 8, tmp_path)
    assert found[2] == Machine("cuda", 2, 0, tmp_path)
    assert machine("cpu", 0, {}, tmp_path) == Machine("cpu", 2, 0, tmp_path)
    assert machine("cpu", 8, {}, tmp_path) == Machine("cpu", 1, 8, tmp_path)


def test_every_setting_is_one_that_main_reads(tmp_path):
    for ranks in (4, 8):
        here = Machine("cpu", ranks, 0, tmp_path)
        resolved(here.tiny(1, "--compile none --wrapper none"), 1)
        for words in right.EAGER.values():
            resolved(here.tiny(ranks, "--compile none", words), ranks)
        for words in right.COMPILED.values():
            resolved(here.tiny(ranks, words), ranks)
    resolved(predicted.REFERENCE, 2, "cuda")


def test_a_program_is_bounded_and_must_end_as_it_should(tmp_path, monkeypatch):
    here = Machine("cpu", 2, 0, tmp_path)
    said = "print('error: why'); print('more'); raise SystemExit({})"
    assert here.run(sys.executable, "-c", said.format(5), code=5) == "error: why\nmore\n"
    with pytest.raises(pytest.fail.Exception, match="exit code 7, expected 0\nerror: why$"):
        here.run(sys.executable, "-c", said.format(7))
    with pytest.raises(pytest.skip.Exception, match="exit code 6, expected 0"):
        here.run(sys.executable, "-c", said.format(6))
    monkeypatch.setattr(machines, "LIMIT_S", 1)
    with pytest.raises(pytest.fail.Exception, match="did not end within 1 s"):
        here.run(sys.executable, "-c", "import time; time.sleep(60)")


@pytest.mark.parametrize("figure, value", [("losses", 4.00001), ("losses", float("nan")), ("norms", 2.1)])
def test_losses_or_norms_that_differ_fail(figure, value):
    ours = dict(losses=[5.0, 4.0], norms=[1.0, 2.0])
    right.assert_close(ours, ours, "cpu", unrecorded)
    with pytest.raises(AssertionError):
        right.assert_close(ours | {figure: [ours[figure][0], value]}, ours, "cpu", unrecorded)


GATHER = "ncclDevKernel_AllGather_RING_LL"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
STEP = [  # us; 35 of NCCL's 40 beside others
    (GATHER, 0, 10, 9), ("triton_cast", 0, 5, 7), ("nvjet_gemm", 10, 20, 7), ("nvjet_gemm", 20, 32, 7),
    (SCATTER, 20, 50, 9), ("flash_bwd", 32, 60, 7), ("ncclDevKernel_AllReduce_Sum_f32", 60, 61, 9),
]  # fmt: skip


def trace(path, late):
    """A Chrome trace of PROFILED steps, in which collectives begin `late` us later than above."""
    events = [dict(name="no kernel")]
    for step in range(overlapped.PROFILED):
        for name, begin, end, stream in STEP:
            at = begin + 10_000 * step + late * (stream == 9)
            events.append(dict(cat="kernel", name=name, ts=at, dur=end - begin, args=dict(stream=stream)))
    path.write_bytes(gzip.compress(json.dumps(dict(traceEvents=events)).encode()))
    return path


def test_collectives_that_wait_are_exposed(tmp_path):
    hidden, exposed = (overlapped.overlap_of(overlapped.kernels(trace(tmp_path / "a.gz", late))) for late in (0, 1000))
    assert hidden == dict(nccl_ms=0.04, exposed_ms=0.005, hidden=0.875, order="GR", own_streams=1)
    assert (exposed["hidden"], exposed["exposed_ms"]) == (0, 0.04)
    overlapped.assert_hidden(hidden, hidden, "GR")
    for ours, theirs, order in ((exposed, exposed, "GR"), (hidden, hidden | dict(exposed_ms=0.004), "GR"),
                                (hidden, hidden, "RG"), (hidden | dict(own_streams=0), hidden, "GR")):  # fmt: skip
        with pytest.raises(AssertionError):
            overlapped.assert_hidden(ours, theirs, order)


@pytest.mark.parametrize("device, name", [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA GH200 480GB", "gh200"),
    ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-PCIE-40GB", "a100-40"), ("NVIDIA H200", "h200"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA B200", "b200"), ("Some TPU", None),
])  # fmt: skip
def test_plan_is_asked_for_the_gpu_that_is_there(device, name):
    assert predicted.card(device) == name


def test_a_row_is_compared_with_what_plan_prints(tmp_path, monkeypatch):
    """Of two GPUs that are not there: rows are made up, plan.py is real."""
    row = dict(device="NVIDIA H100 80GB HBM3", step_ms=330.0, tok_s=9e4, mfu=55.1, peak_reserved_mib=26_000)
    monkeypatch.setattr(Machine, "row", lambda self, flags: row | row.get(flags, {}))
    here = Machine("cuda", 2, 0, tmp_path)
    links = tmp_path / "links.jsonl"
    links.write_text('{"link": {"alpha_us": 20.0, "gb_per_s": 370.0}}\n')
    peak, _ = predicted.planned(here)
    _, step = predicted.planned(here, "--link", f"measured:{links}")
    fsdp2 = f"{predicted.REFERENCE} --wrapper fsdp2 --compile blocks"
    for off, fails in ((1, False), (1.2, True)):
        row |= dict(peak_alloc_mib=peak * off, step_ms_min=step * off)
        row[fsdp2] = dict(step_ms_min=step)
        for test in (lambda: predicted.test_the_peak_is_the_planned_one(here, unrecorded),
                     lambda: predicted.test_a_step_takes_the_planned_time(here, links, unrecorded),
                     lambda: predicted.test_a_step_is_no_slower_than_that_of_fsdp2(here, unrecorded)):  # fmt: skip
            if fails:
                with pytest.raises(AssertionError):
                    test()
            else:
                test()


def proof(tmp_path, *words, planted=""):
    """./launch.sh verify on two CPU ranks: exit code, outcome of each test by name, text of its file."""
    (tmp_path / "sitecustomize.py").write_text(planted)
    environment = dict(NO_INSTALL="1", PYTHON=sys.executable, NPROC="2", OUT=str(tmp_path), PYTHONPATH=str(tmp_path))
    done = ran(ROOT / "launch.sh", "verify", "--device", "cpu", *words, timeout=1200, **environment)
    text = (tmp_path / "verify.xml").read_text()
    found = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        kinds = {each.tag for each in case} & {"failure", "error", "skipped"}
        found[case.get("name")] = "".join(kinds) or "passed"
    return done.code, found, text


@pytest.mark.slow
def test_on_two_cpu_ranks_all_that_they_can_show_holds(tmp_path):
    code, found, text = proof(tmp_path)
    assert code == 0, text
    skipped = {name for name, outcome in found.items() if outcome == "skipped"}
    assert skipped == {name for name in found if "compiled" in name or "planned" in name} | {
        "test_links_have_a_latency_and_a_bandwidth", "test_a_step_is_no_slower_than_that_of_fsdp2",
        "test_most_of_nccls_time_is_beside_other_kernels",
    }  # fmt: skip
    assert '"torch": ' in text.replace("&quot;", '"') and 'name="loss_apart"' in text
    for name in (str(ROOT), str(tmp_path), socket.gethostname()):
        assert name not in text


@pytest.mark.slow
def test_planted_faults_fail_their_tests(tmp_path):
    """A gradient that is summed and not averaged, and collectives that wait at once."""
    planted = PLANTED.format(name="simple_fsdp", code=SUM) + PLANTED.format(name="overlap", code=WAIT)
    code, found, _ = proof(tmp_path, "-k", "wrappers or modes or once", planted=planted)
    shown = {name for name, outcome in found.items() if outcome == "failure"}
    assert code == 1 and shown == found.keys() - {name for name in found if "compiled" in name}


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_and_shows_where_it_was(tmp_path):
    planted = PLANTED.format(name="trainer.step", code=HANG)
    code, found, text = proof(tmp_path, "-k", "wrappers", planted=planted)
    assert code == 1 and {*found.values()} == {"error"}
    assert "stacks-1" in text and "in call" in text
