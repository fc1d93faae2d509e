"""plan.py: its peaks beside generated code, beside published runs; parameters of Hugging Face configs; bad input.

pytest lab/tests/test_plan.py              # seconds; what simulates two settings anew is marked slow
"""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import plan as program
from lab.benchmarks import planner
from lab.planning import hardware, report, search
from lab.planning.architecture import architecture
from lab.planning.liveness import Make, Tape
from lab.planning.weights import remat_of
from model import ModelConfig
from trainer import step_costs
from trainer.logging import read_jsonl

ROOT = Path(__file__).parents[2]
FAR = 7  # rows of results/ that the closed form misses by more than 1 %; python -m lab.benchmarks.planner prints them
CONFIGS = {  # name: (config.json, parameters)
    "Llama 3 8B": (dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256), 8_030_261_248),
    "Llama 3 70B": (dict(model_type="llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                         num_attention_heads=64, num_key_value_heads=8, vocab_size=128256), 70_553_706_496),
    "Qwen 2.5 7B": (dict(model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                         num_attention_heads=28, num_key_value_heads=4, vocab_size=152064), 7_615_616_512),
    "Qwen 2.5 72B": (dict(model_type="qwen2", hidden_size=8192, intermediate_size=29568, num_hidden_layers=80,
                          num_attention_heads=64, num_key_value_heads=8, vocab_size=152064), 72_706_203_648),
    "Qwen3-30B-A3B": (dict(model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                           num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                           num_experts=128, num_experts_per_tok=8, vocab_size=151936), 30_532_122_624),
    "Gemma 3 1B": (dict(model_type="gemma3_text", hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
                        num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
                        vocab_size=262144), 999_885_952),
}  # fmt: skip


@pytest.fixture
def plan(ended):
    """plan(words) -> (exit code, stdout, stderr) of the program, in this process."""
    return lambda words: ended(program.main, words)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_a_config_are_right_to_the_last_one(name):
    config, parameters = CONFIGS[name]
    assert architecture(config).parameters == parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_that_transformers_builds(name):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = dict(CONFIGS[name][0])
    with torch.device("meta"):
        kind = config.pop("model_type")
        tied = {} if kind == "gemma3_text" else dict(tie_word_embeddings=False)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config, **tied))
    assert architecture(CONFIGS[name][0]).parameters == sum(p.numel() for p in model.parameters())


def test_of_a_model_with_a_vision_tower_the_text_part_is_planned():
    text = CONFIGS["Gemma 3 1B"]
    a = architecture({"model_type": "gemma3", "text_config": text[0], "vision_config": {}})
    assert a.parameters == text[1] and "text part alone" in a.note


def test_adapters_of_phi3_stand_beside_its_fused_layers():
    """One of q, k and v and one of gate and up, as peft attaches them: rows and columns times the rank."""
    shape = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4)
    a = architecture(shape | dict(model_type="phi3", num_key_value_heads=2, vocab_size=500))
    adapted = sum((m + n) * count for (m, n), count in a.adapted.items())
    assert adapted == 2 * ((64 + 128) + (64 + 64) + (64 + 320) + (160 + 64))


def test_the_active_parameters_of_a_mixture_of_experts():
    a = architecture(CONFIGS["Qwen3-30B-A3B"][0])
    assert a.active_parameters == a.parameters - 48 * 120 * 3 * 2048 * 768


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.3, 0.5, 0.95, 1.0])
def test_the_planner_recomputes_the_blocks_that_the_model_does(ratio):
    """The rule stands twice: model.py imports nothing of the trainer, and the planner imports no torch."""
    for depth in (1, 2, 7, 28):
        c = ModelConfig(depth=depth, remat="both", remat_ratio=ratio)
        assert [remat_of(c, i) for i in range(depth)] == [c.remat_of(i) for i in range(depth)]


def test_moments_in_8_bits_take_a_quarter_and_their_scales():
    def moments(*words: str) -> float:
        q = question("--block", "gelu", *words, ranks=8)
        return q.peak().pieces["Adam's moments"]

    assert moments("--optimizer", "adamw8bit") == moments() / 4 * (1 + 4 / 256)


def test_a_kernel_writes_over_an_input_that_dies_with_it():
    def peak(**how) -> float:
        t = Tape()
        t.op("a", [], [Make("one", 1024, dtype="bf16")])
        t.op("b", ["one"], [Make("two", 1024, dtype=how.pop("dtype", "bf16"))], **how)
        t.op("c", ["two", *["one"] * (how == {})], [])
        return t.peak().nbytes

    assert peak(over=True) == 1024
    assert peak(over=True, dtype="fp32") == peak(over=False) == peak() == 2048


def held(kind: str, size: float) -> list[str]:
    """The operations of a graph, in order, whose largest products are b and c and whose collective gave way if it
    does."""
    t = Tape()
    reads = ["bucket"] * (kind != "all_gather")
    t.op("bucket", [], [Make("bucket", size)])
    t.op("start", ["bucket"], [Make("sent", size)], work=(("start", "x", kind, size),))
    for name, nbytes in zip("abcde", (2**20, 2**20, 2**24, 2**20, 2**20), strict=True):
        t.op(name, [], [Make(name, nbytes)], work=(("mm", 1, 1, 1),))
    t.op("wait", ["sent", *reads], work=(("wait", "x"),))
    t.give_way(1)
    return [op.where for op in t.ops]


def test_a_small_collective_gives_way_at_the_peak_and_a_large_one_does_not():
    names = "bucket start a b c d e wait".split()
    assert held("all_gather", 2**19) == "a b c bucket start d e wait".split()
    assert held("reduce_scatter", 2**19) == "bucket start a b wait c d e".split()
    assert held("all_reduce", 2**19) == held("all_gather", 2**23) == held("reduce_scatter", 2**23) == names


def test_peaks_of_generated_code():
    """Of the rows that the program wrote; docs/planner.md has the table."""
    found = [each for name in planner.PEAKS for each in planner.simulated(ROOT / "results" / name)]
    far = [f"{100 * each.error:+.2f} % {each.name}" for each in found if abs(each.error) > 0.01]
    assert len(found) >= 50 and len(far) <= FAR, "\n".join(far)
    assert max(abs(each.error) for each in found) < 0.039


def test_the_error_of_a_peak_is_what_the_drawn_settings_say():
    drawn = [each for name in planner.PEAKS[:1] for each in planner.simulated(ROOT / "results" / name)]
    errors = sorted(100 * abs(each.error) for each in drawn)
    assert (round(errors[len(errors) // 2], 2), round(errors[-1], 1), len(errors)) == report.PEAK_ERROR


def test_peaks_of_compiled_blocks():
    """Ours and FSDP2's, on 1, 2 and 8 ranks, then other settings; what the honest line of an answer says."""
    found = [each for each in planner.simulated(ROOT / "results/peaks.jsonl") if "--compile blocks" in each.name]
    assert len(found) == 12 and sum(abs(each.error) < 2e-4 for each in found) == 11
    found += planner.simulated(ROOT / "results/plan_peaks_blocks.jsonl")
    assert (round(max(100 * abs(each.error) for each in found), 1), len(found)) == report.BLOCKS_ERROR


MODES = "fwdbwd", "blocks"


def test_steps_of_compiled_blocks_on_an_h200_beside_those_of_one_graph():
    """Rates are scaled from an H100: times are 3.4 to 7.4 % too low, those of blocks within 2.5 % of one graph's."""
    errors = {mode: [each.error for each in planner.own_times("h200", "h200_order", [mode])] for mode in MODES}
    assert [len(mine) for mine in errors.values()] == [4, 8]
    assert all(-0.075 < error < -0.03 for mine in errors.values() for error in mine)
    assert abs(min(errors["blocks"]) - min(errors["fwdbwd"])) < 0.025


def test_the_command_of_readme_can_be_planned(plan):
    """By plan.py before it; and FSDP2's compiled blocks."""
    usual = plan("--gpus 8 --remat both")
    for before in ("torchrun --nproc-per-node 8 main.py", "--gpu h100 .venv/bin/python main.py --world 8",
                   "torchrun --standalone --max-restarts 3 --nproc_per_node=8 ./main.py",
                   "python3 -m torch.distributed.run --nnodes 1:1 --nproc-per-node 8 -m main.py"):
        assert plan(f"{before} --remat both") == usual
    nodes = plan("torchrun --nnodes=2 --nproc-per-node=8 main.py --remat both")
    assert nodes == plan("--gpus 8 --nodes 2 --remat both")
    code, said, _ = plan("--gpus 8 --remat both --compile blocks --wrapper fsdp2")
    assert code == 0 and "settings of compiled blocks" in said


def test_peaks_of_llama_blocks():
    """What the honest lines of an answer say of them."""
    found = planner.simulated(ROOT / "results/plan_peaks_llama.jsonl")
    assert (round(max(100 * abs(each.error) for each in found), 1), len(found)) == report.GATED_ERROR


def test_a_plan_of_llama_blocks_says_how_far_to_trust_it(plan):
    code, said, _ = plan("--gpus 8 --block llama --remat both")
    assert code == 0 and "peak: predicted; with a gated MLP it was off by at most" in said
    assert plan("--gpus 8 --block llama --mlp lean")[0] == 2


def test_a_plan_without_the_order_says_that_its_peak_was_held_against_nothing(plan):
    assert "never compared" not in plan("--gpus 8")[1]
    assert "never compared with generated code" in plan("--gpus 8 --compile-options plain")[1]


@pytest.mark.parametrize("gpu, times", [("a100-80", planner.published_times), ("h100", planner.own_times)])
def test_the_error_of_a_gpu_is_that_of_steps_of_which_no_constant_was_fitted(gpu, times):
    found = times()
    errors = sorted(abs(each.error) for each in found if each.name not in planner.FITTED)
    stated = hardware.gpu(gpu).error
    assert len(found) - len(errors) == 7
    assert (round(errors[len(errors) // 2], 3), round(errors[-1], 3), len(errors)) == stated
    assert stated[0] <= 0.02 and stated[1] <= 0.08


def test_published_times_of_a_slow_link_are_bound_by_it(plan):
    assert all(abs(each.error) < 0.15 for each in planner.published_times("RTX4090", "rtx-4090"))
    words = "--gpu rtx-4090 --gpus 8 --remat both --reduce-dtype bf16 --compile-options plain"
    assert "bound by communication" in plan(words)[1]


@pytest.mark.parametrize("name", hardware.names())
def test_every_gpu_answers_and_says_where_its_figures_are_from(name, plan):
    assert hardware.gpu(name).source
    code, said, _ = plan(f"--gpu {name} --gpus 8 --batch 1")
    assert code == 0 and ("EXTRAPOLATED" in said) == (name not in ("a100-80", "h100"))


def test_peaks_of_devices_are_those_of_costs():
    names = {"a100-80": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200",
             "h100-pcie": "NVIDIA H100 PCIe", "rtx-4090": "NVIDIA GeForce RTX 4090"}  # fmt: skip
    assert all(hardware.gpu(own).peak == step_costs.device_peak(name) for own, name in names.items())


def test_an_answer_without_torch_says_how_far_to_trust_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen 2.5 7B"][0]))
    words = ["plan.py", "--hf", str(tmp_path), *"--gpu h200 --gpus 8 --batch 1 --tokens 1e12 --price 2".split()]
    code = f"import runpy, sys\nsys.argv = {words}\ntry: runpy.run_path('plan.py', run_name='__main__')\n"
    code += "finally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for said in ("7'615'616'512 parameters", "fits in", "mfu ", "mfu_palm", "hfu", "tokens/s", "GPU-hours, cost",
                 "EXTRAPOLATED for h200", "85 % were within", "MiB by torch's allocator"):  # fmt: skip
        assert said in done.stdout


def test_without_tyro_one_line_says_what_to_install():
    command = [sys.executable, "-E", "-S", "plan.py", "--gpus", "8"]  # -S: without site-packages
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = "error: plan.py needs tyro: pip install tyro\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("tokens, said", [
    ("1e12", r"1e12 tokens: \d\d\.\d days, \d'\d{3} GPU-hours, cost \d'\d{3}"),
    ("123456789", r"123456789 tokens: 0\.\d\d hours, 0\.\d\d GPU-hours, cost 0\.\d\d"),
])  # fmt: skip
def test_tokens_are_as_they_were_typed_and_their_time_and_cost_have_two_digits_at_least(tokens, said, plan):
    printed = plan(f"--gpus 8 --tokens {tokens} --price 2")[1]
    assert re.search(f"^{said}$", printed, re.MULTILINE), printed


def test_a_flag_that_no_answer_depends_on_is_named_by_what_if_too(plan):
    assert "ignored, because no part of a plan depends on it: --lr" in plan("--what-if lr 1e-3 1e-2")[1]


def test_what_to_turn_first_if_it_does_not_fit(plan):
    said = plan("--gpu rtx-4090 --gpus 2")[1]
    assert "DOES NOT FIT" in said and "--remat pointwise" in said.partition("flags that lower the peak")[2]


def test_sweeps_and_searches(plan, tmp_path):
    said = plan("--gpus 8 --what-if seqlen 2048 4096")[1].splitlines()
    assert [row.split(":")[0] for row in said[1:3]] == ["seqlen 2048", "seqlen 4096"]
    assert plan("--gpus 2 --what-if gpus 2 4")[0] == 0
    pytest.importorskip("matplotlib")
    best = plan(f"--gpus 8 --batch 2 --best --plot {tmp_path / 'front.png'}")[1]
    assert "best: " in best and "front of memory against time" in best and (tmp_path / "front.png").exists()
    assert "ratio, grad-accum" in plan("--gpus 8 --remat block --fit 4 8")[1]


def test_exact_hands_the_flags_to_the_tool_that_simulates(plan, monkeypatch):
    given = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(program.subprocess, "run", lambda command: given.append(command) or done)
    assert plan("--gpu a100-80 --gpus 4 --nodes 2 --remat both --exact")[0] == 0
    words = "-m lab.profiling.peak --world 8 --arch sm_80 --remat both".split()
    assert given[0][1:] == words


def test_the_front_holds_no_plan_that_another_beats():
    q = question("--batch", "2", ranks=8)
    top, front = search.best(q, 10 * 2**30)
    assert top is not None and top.peak.nbytes <= 10 * 2**30
    for a, b in zip(front, front[1:], strict=False):
        assert a.peak.nbytes <= b.peak.nbytes and a.time.seconds > b.time.seconds


def question(*words: str, ranks: int) -> search.Question:
    return program.question(*program.parse(["--gpus", str(ranks), *words]))


def fit_of_qwen() -> dict[tuple[int, int], float]:
    """(GPUs, micro-batch) -> published ratio of recomputed blocks."""
    rows = csv.DictReader((ROOT / "published/fit_qwen7b.csv").read_text().splitlines())
    return {(int(r["gpus"]), int(r["micro_batch"])): float(r["ac"]) for r in rows}


def test_the_published_table_of_what_fits(tmp_path):
    """All settings of several GPUs but the one that the others contradict (below), within one step of 0.05, for 4096
    tokens (not published), logits kept in fp32, and 5 GiB that are not the step's. Ours may need less, since theirs is
    Inductor's own order: two settings by up to four steps."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen 2.5 7B"][0]))
    q = question("--hf", str(tmp_path), "--seqlen", "4096", "--remat", "block", "--remat-core", ranks=8)
    limit = q.gpu.memory - 5 * 2**30

    def fits(ranks: int, micro: int, ratio: float) -> bool:
        own = q.with_flags(batch=micro, grad_accum=64 // ranks // micro, remat_ratio=ratio, logits="fp32")
        return search.replace(own, ranks=ranks).peak().nbytes <= limit

    for (ranks, micro), ratio in fit_of_qwen().items():
        if ranks > 1 and (ranks, micro) != (4, 4):
            assert fits(ranks, micro, min(ratio + 0.05, 1)), (ranks, micro)
            below = {(8, 4): 0.15, (16, 4): 0.25}.get((ranks, micro), 0.1)
            assert ratio < below or not fits(ranks, micro, ratio - below), (ranks, micro)
    assert not fits(4, 4, 0.5)  # as the table says


def test_a_setting_of_the_published_table_contradicts_others():
    """docs/planner.md has the arithmetic: from 4 to 8 GPUs twice as much memory comes free as from 8 to 16."""
    ac = fit_of_qwen()
    step = 0.05
    at_least = (ac[8, 4] - step) - ac[16, 4]  # what 8 -> 16 frees, as a ratio, before it is rounded up
    assert ac[4, 4] < (ac[8, 4] - step) + 2 * at_least
    states = 12 * 7_615_616_512  # fp32 parameters and two moments
    assert states > 80 * 2**30 and (1, 1) in ac  # one GPU cannot hold them, whatever is recomputed


def test_the_least_recomputation_that_fits():
    q = question("--remat", "block", ranks=8)
    settings = search.fit_table(q, (2, 8), (4, 8), 64, 12 * 2**30)
    assert [(c.ranks, c.micro, c.accum) for c in settings] == [(2, 4, 8), (2, 8, 4), (8, 4, 2), (8, 8, 1)]
    for c in settings:
        new = search.replace(q.with_flags(batch=c.micro, grad_accum=c.accum, remat_ratio=c.ratio or 0.0), ranks=c.ranks)
        assert c.ratio is None or new.peak().nbytes <= 12 * 2**30


REFUSED = [  # flags, or flags and the text of a config.json, and how the one line begins
    ("--gpu h1000", "--gpu h1000: must be one of a100-80, a100-40, h100"),
    ("--gpus 0", "--gpus 0: must be at least 1"),
    ("--gpus 3 --mode hybrid_shard", "--replicas 2: must divide the 3 ranks"),
    ("--hf /nowhere", "--hf /nowhere: No such file or directory"),
    ("--wrapper fsdp2", "--wrapper fsdp2: cannot be planned; leave it out"),
    ("--cuda-graph", "--cuda-graph: cannot be planned; leave it out"),
    ("--keep-last", "--keep-last: cannot be planned; leave it out"),
    ("--ahead 2", "--ahead 2: cannot be planned; leave it out"),
    ("--param-dtype fp32", "--param-dtype fp32: can be planned only in bf16"),
    ("--gpu a100-80 --attn math", "--attn math: was not measured on a100-80; use "),
    ("--what-if sqlen 3", "--what-if sqlen: no such flag; did you mean seqlen?"),
    ("--what-if seqln", "--what-if seqln: no such flag; did you mean seqlen?"),
    ("--what-if seqlen", "--what-if seqlen: expected a flag of main.py or one of gpu, "),
    ("--best --tokens 1e12 --price 2", "--tokens 1e12: needs a single plan"),
    ("--tokens -123456789", "--tokens -123456789: must be at least 0"),
    ("--what-if --lr 1e-3", "--what-if: needs values after it, as --what-if seqlen 2048 4096"),
    ("--fit", "--fit: needs values after it, as --fit 8 16"),
    ("--what-if batch 0", "--batch 0: must be at least 1"),
    ("--what-if gpus 0", "--gpus 0: must be at least 1"),
    ("--gpus 8 --fit 3", "--fit 3: must divide the 64 sequences of a step"),
    ("--gpus 2 --world 8", "--world 8: --gpus x --nodes already gives 2 ranks; leave --world out"),
    ("--compile blocks --ahead 0.5", "--ahead 0.5: not with --compile blocks"),
    ("--across string", "--across string: must be"),
    ("--what-if across 20:4x50 string", "--across string: must be"),
    ("--what-if plot x", "--what-if plot x: expected a flag"),
    ("--watts nan", "--watts nan: must be a number below 1e18"),
    ("--watts 701", "--watts 701: h100 takes at most 700"),
    ("--reserve-gib 1000", "--reserve-gib 1000: must be below the 79.6 GiB of h100"),
    ("--wrapper ddp --mode replicate --compile blocks", "--wrapper ddp: cannot be planned; leave it out"),
    ("--hf ''", "--hf: names no file"),
    ("--best --plot ''", "--plot: names no file"),
    ("--depth 2001", "--depth 2001: must be at most 2000"),
    ("--best --plot /nowhere/a.png", "--plot /nowhere/a.png: "),
]  # fmt: skip
LLAMA = CONFIGS["Llama 3 8B"][0]
DAMAGED = [None, [], "x", 0, -4, 10**12, float("inf"), True]
OF_CONFIGS = [  # a config.json, and what is wrong with it; each after "--hf FOLDER: "
    ({"model_type": "llama", "hidden_size": 64}, "intermediate_size, num_hidden_layers, .* missing; add them"),
    ({"model_type": "no_such"}, "model_type no_such(: transformers builds no causal model| is not known without)"),
    (LLAMA | {"num_key_value_heads": 5}, "num_attention_heads 32 must be a multiple of num_key_value_heads 5"),
    (LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 8},
     "num_experts_per_tok 8: must be at most the 4 experts"),
    ([], "holds no JSON object"),
    ("[" * 10**5, "is no JSON"),
    *((LLAMA | {key: value}, key) for value in DAMAGED
      for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")),
]  # fmt: skip


@pytest.mark.parametrize("words, said", REFUSED)
def test_bad_input_ends_in_one_line(words, said, refused):
    assert refused(program.main, words).startswith(f"error: {said}")


@pytest.mark.parametrize("words, said", [
    ("--gpus x", "Error parsing --gpus: "),
    ("--gpuz 3", "Unrecognized options: --gpuz, 3 Perhaps you meant: --gpu STR"),
    ("--dpeth 3", "Perhaps you meant: --depth INT"),
    ("--what-if seqlen many", "Error parsing --seqlen: "),
    ("--what-if lora x", "Error parsing --lora: "),
])  # fmt: skip
def test_what_is_no_flag_or_no_value_of_one_is_tyros_message(words, said, refused):
    assert said in (message := refused(program.main, words)) and message.endswith("plan.py --help"), message


@pytest.mark.parametrize("config, said", OF_CONFIGS)
def test_a_config_that_cannot_be_planned_ends_in_one_line_that_says_why(config, said, refused, tmp_path):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert re.match(f"error: --hf {tmp_path}: .*{said}", refused(program.main, f"--hf {tmp_path}"))


def test_sequences_of_a_step_that_the_gpus_cannot_share_are_refused_of_a_folder_too(refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    error = refused(program.main, f"--hf {tmp_path} --gpus 8 --batch 1 --effective-batch 12")
    assert error.startswith("error: --effective-batch 12: must be 8 ranks x --batch 1 x a whole number")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_two_of_the_drawn_settings_simulated_anew(number, tmp_path):
    pytest.importorskip("triton")
    lines = [line for line in (ROOT / "settings/plan_peaks.txt").read_text().splitlines() if line[0] != "#"]
    words = shlex.split(lines[number])
    recorded = next(r for r in read_jsonl(ROOT / "results/plan_peaks.jsonl") if words[1] == str(r["world"]))
    out = tmp_path / "row.jsonl"
    run = [sys.executable, "-m", "lab.benchmarks.peaks", *words, "--results", str(out)]
    subprocess.run(run, cwd=ROOT, check=True, capture_output=True, timeout=600)
    row = read_jsonl(out)[0]
    assert row["flags"]["remat"] == recorded["flags"]["remat"]
    assert row["simulated_mib"] == pytest.approx(recorded["simulated_mib"], rel=1e-3)
