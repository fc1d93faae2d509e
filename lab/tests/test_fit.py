"""lab/fit.py: the least recomputation that fits, planned, then looked for by runs of finetune.py.

    pytest lab/tests/test_fit.py            # seconds; no run is started
    pytest -m slow lab/tests/test_fit.py    # one run on a CPU, in a process of its own
"""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys

import pytest
from running import ROOT, resolved
from tiny_hf import write_model

from lab import fit
from lab.planning import report, search
from lab.sweeps import sweep
from trainer import config

QWEN = dict(model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def rows_in(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture
def call(folder, ended):
    """call(words) -> (exit code, stdout, stderr) of lab/fit.py on a model's folder; rows go to FOLDER/rows.jsonl."""
    return lambda words: ended(fit.main, f"--model {folder} --results {folder}/rows.jsonl {words}")


def question(folder, words):
    """(a question to the planner, of words) as lab/fit.py makes it."""
    own, others = fit.parse(["--model", str(folder), *words.split()])
    c = fit.flags.filled(fit.config.parse(fit.line_of(own, others, 4, 2), 0, 1), "cuda")
    return fit.question(own, c)


PLAN = "--effective-batch 64 --micro-batch 2 8 --world 4 --seqlen 4096"
LIMIT = (81_559 - 3 * 2**10) * 2**20  # bytes of an H100, less what is not the step's


def test_without_a_gpu_the_planners_table_is_printed_and_nothing_is_run(folder, call):
    code, said, _ = call(PLAN)
    q = question(folder, PLAN)
    lines = report.fit_lines(search.fit_table(q, (4,), (2, 8), 64, LIMIT), 64)
    assert code == 0 and len(lines) == 4 and "\n".join(lines) in said and "left out" not in said
    assert "85 % were within" in said and "not measured: no GPU here" in said
    assert rows_in(folder) == []


def test_a_setting_has_the_question_that_its_ratio_answers(folder):
    q = question(folder, PLAN)
    for setting in search.fit_table(q, (4,), (2, 8), 64, LIMIT):
        asked = dict(batch=setting.micro, grad_accum=setting.accum, remat="block", remat_ratio=setting.ratio)
        assert setting.question == search.replace(q.with_flags(**asked), ranks=setting.ranks)
        less = setting.question.with_flags(remat_ratio=max(0, setting.ratio - 0.05))
        assert setting.question.peak().nbytes <= LIMIT
        assert setting.ratio == 0 or less.peak().nbytes > LIMIT


def test_adapters_are_planned_beside_a_model_that_stays_in_the_dtype_of_its_files(folder, call):
    (folder / "config.json").write_text(json.dumps(QWEN | dict(dtype="bfloat16")))
    asked = search.replace(question(folder, f"{PLAN} --lora 16"), ranks=4)
    pieces = asked.with_flags(grad_accum=1, remat_ratio=0.5).peak().pieces
    assert pieces["frozen parameters"] == 2 * asked.a.parameters / 4
    adapters = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert pieces["parameters"] == 4 * adapters / 4 and pieces["Adam's moments"] == 8 * adapters / 4
    assert "\n4, 2, 0.00, 8\n" in call(f"{PLAN} --lora 16")[1]
    said = "error: --lora-targets q_proj: a plan has adapters on all linear layers; leave it out\n"
    assert call(f"{PLAN} --lora 16 --lora-targets q_proj")[2] == said


@pytest.mark.parametrize("fits_from", [0.0, 0.05, 0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("first", [None, 0.0, 0.3, 0.85, 1.0])
def test_the_least_ratio_is_found_wherever_the_search_begins(fits_from, first):
    tried = []

    def fits(ratio):
        tried.append(ratio)
        return ratio >= fits_from

    assert search.least(search.GRID, fits, first) == (fits_from if fits_from <= 1 else None)
    assert len(tried) == len(set(tried)) <= 8
    assert search.least(search.GRID, lambda ratio: None, first) is None


@pytest.fixture
def instead(folder, monkeypatch):
    """instead(least share that fits) makes runs rows without running them, on a GPU; returns the settings that ran."""
    monkeypatch.setattr(sweep, "gpus", lambda: 1)
    monkeypatch.setattr(sweep, "current", lambda rows, relaxed: rows)
    monkeypatch.setattr(fit, "check_before_torch", lambda c, world: None)

    def begin(fits_from, outcome="OOM fwd", out_of_memory=True, also=()):
        ran = []

        def attempt(setting, args, limit, name, flags_of_program):
            n, flags = sweep.parse(shlex.split(setting))
            ran.append(setting)
            good = (ratio := float(flags["--remat-ratio"][0])) >= fits_from or ratio in also
            row = dict(line=setting, outcome="ok" if good or not out_of_memory else outcome, device="a GPU",
                       date="2026", torch=importlib.metadata.version("torch"), world=sweep.world(n, flags),
                       flags=config.setting(resolved()) | dict(seed=0, remat="block", remat_ratio=ratio),
                       peak_alloc_mib=70_000.0 if good else 79_000.0, step_ms=1500.0, tok_s=9.0)  # fmt: skip
            fit.append_jsonl(args.results, row)
            return row

        monkeypatch.setattr(sweep, "attempt", attempt)
        return ran

    return begin


ONE = "--micro-batch 8 --world 4 --seqlen 4096"


@pytest.mark.parametrize("out_of_memory", [True, False])
def test_the_measured_ratio_is_the_least_that_fits(folder, instead, call, out_of_memory):
    ran = instead(0.6, out_of_memory=out_of_memory)
    assert call(ONE)[0] == 0
    *_, answer = rows_in(folder)
    assert (answer["ratio"], answer["outcome"], answer["peak_alloc_mib"]) == (0.6, "ok", 70_000)
    [setting] = search.fit_table(question(folder, ONE), (4,), (8,), 64, LIMIT)
    planned = setting.question.answer()
    assert answer["planned_ratio"] == setting.ratio == 0.8
    assert answer["planned_mib"] == round(planned.peak.nbytes / 2**20, 1) <= answer["memory_mib"] == LIMIT / 2**20
    assert answer["planned_ms"] == round(1e3 * planned.time.seconds, 1)
    tried = {ratio: end for ratio, _, end in answer["tried"]}
    assert tried[0.55] == ("OOM fwd" if out_of_memory else "ok") and tried[0.6] == "ok" and len(tried) == len(ran)
    assert all("--random" in setting and "--world 4" in setting and "--batch 8" in setting for setting in ran)
    before = len(rows_in(folder))
    ran = instead(0.6)
    call(ONE)
    assert not ran and len(rows_in(folder)) == before + 1  # the answer alone


def test_a_file_of_data_that_is_given_is_left_alone(folder, instead, call):
    ran = instead(0.0)
    (folder / "mine.jsonl").write_text("mine")
    assert call(f"{ONE} --data={folder}/mine.jsonl")[0] == 0
    assert (folder / "mine.jsonl").read_text() == "mine" and all("mine.jsonl" in setting for setting in ran)
    assert not (folder / "rows.data.jsonl").exists()


def test_what_never_fits_and_what_fails_is_told(folder, instead, call):
    instead(2.0)
    code, said, _ = call(ONE)
    answer = rows_in(folder)[-1]
    assert (answer["ratio"], answer["outcome"], answer["tried"][-1][0]) == (None, "does not fit", 1.0)
    assert code == 0 and "| none |" in said
    (folder / "rows.jsonl").unlink()
    instead(2.0, outcome="failed: exit 1")
    code, _, said = call(ONE)
    assert code == 1 and "1 of 1 not measured" in said


def test_the_table_has_the_measured_beside_the_planned_and_the_published(folder, instead, call, report):
    instead(0.9)
    call(ONE)
    said = report(f"fit --results {folder}/rows.jsonl --plots {folder}/plots")
    head, _, line = (each for each in said.splitlines() if each.startswith("|"))
    found = dict(zip([t.strip() for t in head.split("|")], [t.strip() for t in line.split("|")], strict=True))
    told = {"n": "4(sim h100-nvlink)", "batch": "8", "grad-accum": "2", "planned ratio": "0.80",
            "measured ratio": "0.90", "published ratio": "0.95", "peak allocated MiB": "70'000"}  # fmt: skip
    assert told.items() <= found.items() and found["planned peak MiB"] and found["planned step ms"]
    text = (folder / "plots/fit.svg").read_text()
    assert all(f">{each}</text>" in text for each in ("peak allocated memory", "time of a step (ms)", "20'000"))


@pytest.mark.parametrize("words, said", [
    ("--model nowhere", "--model nowhere: No such file"),
    ("--world 0", "--world 0: must be at least 1"),
    ("--world 3 5", "--effective-batch 64: no --world x --micro-batch divides it"),
    ("--remat block --remat-ratio 0.5", "--remat: is what is looked for; leave it out"),
    ("--save x", "--save: is no part of it; leave it out"),
    ("--memory-mib 0", "--memory-mib 0: must be at least 1"),
    ("--gpu h1000", "--gpu h1000: must be one of a100-80"),
    ("--device cpu", "--device cpu: needs --memory-mib"),
    ("--seqlen 0", "--seqlen 0: must be at least 1"),
    ("--link fast", "--link fast: must be a100-nvlink"),
    ("--results /proc/x.jsonl", "--results /proc/x.jsonl: "),
])  # fmt: skip
def test_bad_input_ends_in_one_line(folder, refused, words, said):
    files = f"--model {folder} --results {folder}/rows.jsonl"
    assert refused(fit.main, f"{files} --world 4 {words}").startswith(f"error: {said}")


@pytest.mark.parametrize("words, said", [
    ("--world two", "Error parsing --world"),
    ("--micro-bach 2", "Unrecognized options: --micro-bach, 2 Perhaps you meant: --micro-batch"),
])  # fmt: skip
def test_what_is_no_flag_or_no_value_of_one_is_tyros_message(folder, refused, words, said):
    assert said in refused(fit.main, f"--model {folder} --results {folder}/rows.jsonl --world 4 {words}")


def test_a_model_that_the_planner_does_not_know_is_measured_all_the_same(folder, instead, call):
    (folder / "config.json").write_text(json.dumps(QWEN | dict(model_type="no_such")))
    ran = instead(0.6)
    code, said, _ = call(ONE)
    answer = rows_in(folder)[-1]
    assert answer["ratio"] == 0.6 and "planned_ratio" not in answer and len(ran) < 10
    assert code == 0 and "not planned: --model" in said


@pytest.mark.slow
def test_a_run_on_a_cpu_is_measured_and_not_run_again(tmp_path):
    write_model(tmp_path / "tiny")
    words = ("--device cpu --memory-mib 4000 --compile none --effective-batch 2 --micro-batch 1 --world 2 --seqlen 32 "
             "--steps 4 --model tiny --results rows.jsonl --any-commit")  # fmt: skip
    for again in (False, True):
        command = [sys.executable, "-m", "lab.fit", *words.split()]
        env = os.environ | dict(PYTHONPATH=str(ROOT))
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("--remat block --remat-ratio 0" in done.stdout) != again
        rows = rows_in(tmp_path)
        [run], answer = [row for row in rows if row.get("study") != "fit"], rows[-1]
        assert run["outcome"] == "ok"
    assert answer["ratio"] == 0 and answer["world"] == "2(sim h100-nvlink)" and answer["flags"]["random"]
    assert 0 < answer["peak_rss_mib"] == run["peak_rss_mib"] < 4000 and answer["planned_ms"] is None


def test_memory_that_rises_with_a_little_recomputation_does_not_hide_that_none_is_needed(folder, instead, call):
    instead(0.6, also=(0.0,))
    assert call(ONE)[0] == 0
    assert rows_in(folder)[-1]["ratio"] == 0.0


def test_the_peak_of_a_run_is_also_that_of_its_start():
    assert fit.peak_of(dict(peak_alloc_mib=5.0, first_step_peak_mib=9.0)) == 9.0 == fit.peak_of(dict(peak_rss_mib=9.0))
    assert fit.peak_of(dict(outcome="OOM fwd")) is None
