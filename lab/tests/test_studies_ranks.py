"""Studies on ranks: the ring all-reduce beside the library's, links that are fitted, starts of ranks. Never a speed.

    pytest lab/tests/test_studies_ranks.py        # one spawn of four gloo ranks, and the ranks that studies start
"""

import argparse
import json

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from running import one_line, rows_of

import plan
from lab.studies import accounting, collectives, ddp, pipeline, precision, study, zero1
from trainer.collective_time import link, measured, sent_bytes

EPS = torch.finfo(torch.float32).eps
SIZES = 0, 1, 7, 64, 1001


def ring(mesh) -> list[str]:
    """What is wrong with the ring on the first n ranks, n = 1 to 4; every property at every size."""
    wrong = []
    rank = dist.get_rank()
    for n in range(1, mesh.size() + 1):
        group = dist.new_group(list(range(n)))
        if rank >= n:
            continue
        for size in SIZES:
            for op, pieces in (("sum", 3), ("avg", 1)):
                wrong += one(rank, n, size, op, pieces, group)
        t = torch.arange(12.0).view(3, 4).t()[1:]  # neither contiguous nor whole
        collectives.ring_all_reduce(t, "sum", 2, group)
        wrong += [] if torch.equal(t, n * torch.arange(12.0).view(3, 4).t()[1:]) else [f"{n}: a view"]
        for kind in (torch.int64, torch.float32):
            try:
                op = "avg" if kind is torch.int64 else "max"
                collectives.ring_all_reduce(torch.ones(3, dtype=kind), op, 2, group)
                wrong.append(f"{kind} was not refused")
            except ValueError:
                pass
    return wrong


def one(rank: int, n: int, size: int, op: str, pieces: int, group) -> list[str]:
    """fp32 within (n - 1) roundings of the sum of absolute values, all ranks the same bits; integers to the bit."""
    where = f"{n} ranks, {size} elements, {op}, {pieces} pieces: "
    found = []
    torch.manual_seed(17 * rank + size)
    x = torch.randn(size) * 10 ** torch.randint(-3, 4, (size,))
    mine = x.clone()
    right = x.clone()
    bound = x.abs()
    collectives.ring_all_reduce(mine, op, pieces, group)
    dist.all_reduce(right, group=group)
    dist.all_reduce(bound, group=group)
    share = n if op == "avg" else 1
    if ((mine - right / share).abs() > (n + 1) * EPS * bound / share).any():
        found.append(where + "not the library's sum")
    all_of = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(all_of, mine, group=group)
    if not all(torch.equal(each, mine) for each in all_of):
        found.append(where + "ranks hold other bits")
    if op == "sum":
        whole = torch.randint(-(2**40), 2**40, (size,))
        own = whole.clone()
        right = whole.clone()
        collectives.ring_all_reduce(own, op, pieces, group)
        dist.all_reduce(right, group=group)
        found += [] if torch.equal(own, right) else [where + "integers differ"]
    return found


def test_the_ring_is_the_librarys_all_reduce_and_all_ranks_hold_the_same_bits():
    assert spawn(4, [ring])["ring"] == [[], [], [], []]


def fails(rank, device):
    if rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory\nof two lines")
    dist.all_reduce(torch.ones(1))


def world(rank, device):
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    return rank, t.item(), str(device)


def test_a_study_starts_ranks_and_an_exception_of_one_ends_all(isolated):
    assert study.on_ranks(3, world) == [(rank, 3.0, "cpu") for rank in range(3)]
    with pytest.raises(RuntimeError) as error:
        study.on_ranks(2, fails)
    assert str(error.value) == "torch.OutOfMemoryError: CUDA out of memory" and study.memory.out_of_memory(error.value)


@pytest.mark.parametrize("alpha, rate", [(20e-6, 1e9), (0, 5e8), (3e-3, 1e11)])
def test_a_fit_finds_the_latency_and_bandwidth_that_times_were_made_of(alpha, rate):
    found = collectives.fit([(x, alpha + x / rate) for x in (1e4, 1e6, 1e8)])
    assert found["alpha_us"] == pytest.approx(1e6 * alpha, abs=1e-2) and found["residual"] < 1e-3
    assert found["gb_per_s"] == pytest.approx(rate / 1e9, rel=1e-3)


def test_a_fit_of_one_size_has_no_latency_and_of_equal_times_no_bandwidth():
    assert collectives.fit([(1e6, 2e-3)]) == dict(alpha_us=0.0, gb_per_s=0.5, residual=0.0)
    assert collectives.fit([(1e4, 2e-3), (1e6, 2e-3)]) == dict(alpha_us=2000.0, gb_per_s=None, residual=0.0)
    noisy = collectives.fit([(1e6, 1e-3), (2e6, 2.2e-3), (3e6, 3e-3)])
    assert 0 < noisy["residual"] < 0.1


def test_the_formula_of_the_ring_and_what_ranks_send():
    row = dict(setting=dict(ranks=4), ops={"exchange": dict(alpha_us=100.0, gb_per_s=2.0)})
    assert collectives.ring_ms(row, 8e6) == pytest.approx(6 * (0.1 + 2e6 / 2e9 * 1e3))
    assert collectives.sent("ring", 8e6, 4) == sent_bytes("all_reduce", 8e6, 4) == 12e6
    assert collectives.sent("exchange", 8e6, 4) == 8e6 and collectives.sent("all_gather", 8e6, 4) == 6e6


def test_published_lines_are_all_there_and_their_bandwidth_is_of_what_a_rank_sends():
    row = dict(study="collectives", commit="a", torch="b", device="c", outcome="failed: no")
    _, table = collectives.table([row | dict(setting=dict(ranks=2, backend="gloo"))])
    assert table.count("\n| published ") == 15 and "| published gloo | 6 | 1000 |" in table
    for n, start, speed in ((2, 365, 16.6), (4, 579, 15.5), (6, 702, 11.5)):
        (line,) = (line for line in table.splitlines() if f"| published nccl | {n} | 1000 |" in line)
        assert f"{start} ms of start-up, and {speed} GB/s" in line


@pytest.mark.slow
def test_collectives_measures_every_operation_and_fits_a_link(call_study, tmp_path):
    results = tmp_path / "rows.jsonl"
    done = call_study(collectives, "--small", "--ranks", 2, "--mb", 0.001, 1, "--repeat", 2, "--results", results)
    (row,) = rows_of(results)
    assert done.code == 0 and row["outcome"] == "ok" and [*row["ops"]] == list(collectives.OPS)
    assert all(len(found["ms"]) == 2 and min(found["ms"]) > 0 for found in row["ops"].values())
    points = [(collectives.sent(op, size, 2), 1e-3 * ms) for op in collectives.LIBRARY
              for size, ms in zip(row["nbytes"], row["ops"][op]["ms"], strict=True)]  # fmt: skip
    assert row["link"] == collectives.fit(points)


def test_main_takes_a_measured_link_and_its_row_has_the_figures(tmp_path, train):
    results = tmp_path / "rows.jsonl"
    results.write_text(json.dumps(dict(link=dict(alpha_us=12.5, gb_per_s=3.25, residual=0.1))) + "\n")
    assert measured(f"measured:{results}") == "12.500:3.250000" and measured("none") == "none"
    assert link(f"measured:{results}") == link("12.5:3.25")
    run = train("--world", 2, "--link", f"measured:{results}", "--steps", 1)
    assert run.code == 0 and run.row["world"] == "2(sim 12.500:3.250000)"
    assert run.row["flags"]["link"] == "12.500:3.250000"


def test_plan_takes_a_measured_link(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict(link=dict(alpha_us=20.0, gb_per_s=50.0))) + "\n")
    texts = []
    for each in ("20:50", f"measured:{tmp_path}/rows.jsonl"):
        assert plan.main(["--gpu", "h100", "--gpus", "8", "--link", each]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "step" in texts[0]


@pytest.mark.parametrize("text, told", [
    (None, "No such file"), ("", "no line of it has a fitted link"), ("{not json", "no line of it has a fitted link"),
    ('{"link": {"alpha_us": 1, "gb_per_s": null}}', "no line of it"), ('{"link": "20:370"}', "no line of it"),
])  # fmt: skip
def test_a_file_without_a_link_is_one_line(train, tmp_path, text, told):
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_text(text + "\n")
    run = train("--world", 2, "--link", f"measured:{path}")
    assert run.code == 2 and f"--link measured:{path}: {told}" in one_line(run.err)


@pytest.mark.parametrize("gpus", [1, 4])
def test_without_a_flag_a_study_takes_the_gpus_that_are_there(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for module in (collectives, ddp, zero1):
        args = study.Parser()
        module.flags(args)
        args = args.parse_args([], argparse.Namespace(small=False, device="cuda", repeat=1))
        monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
        module.check(args)
        found = module.settings(args)
        real = {c["ranks"] for c in found if c.get("kind") != "simulated"}
        if gpus == 4:
            assert real == ({2, 4} if module is collectives else {2})
        elif module is not ddp:
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")
            told = study.outcome(module.measure, found[0], args)["outcome"]
            assert told == "n/a: NoRanks: --ranks 2: GPUs there are: 1; use --device cpu"
        else:
            assert found and not real
        args.ranks = [5] if module is collectives else 5
        with pytest.raises(ValueError, match="--ranks 5: GPUs there are"):
            module.check(args)


@pytest.mark.parametrize("module", [accounting, collectives, ddp, pipeline, precision, zero1])
def test_a_table_of_rows_that_failed_says_so(module):
    args = argparse.Namespace(small=True, device="cpu", **dict.fromkeys([*pipeline.SMALL, *accounting.XXL]))
    for name in ("ranks", "mb", "backend", "world", "link", "buckets"):
        setattr(args, name, None)
    args.dtypes = ["fp32"]
    args.pieces = 4
    getattr(module, "check", bool)(args)
    row = dict(study=study.name_of(module), commit="a", torch="b", device="c", outcome="failed: no")
    told, table = module.table([row | dict(setting=c) for c in module.settings(args)])
    assert table.count("failed: no") == len(module.settings(args)) and "None" not in told
