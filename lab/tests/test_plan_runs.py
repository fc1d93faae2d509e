"""plan.py beside runs that others have published, and what must hold of any plan.

pytest lab/tests/test_plan_runs.py         # some 20 seconds
"""

import json
from pathlib import Path

import pytest

from lab.benchmarks import planner
from lab.planning import hardware, report, step_time
from lab.planning.architecture import architecture
from lab.planning.search import parse, question
from trainer.collective_time import Link

ROOT = Path(__file__).parents[2]
LLAMA = f"--hf {ROOT}/published/models"


def ask(words: str):
    return question(*parse(words.split()))


@pytest.fixture(scope="module")
def found():
    return planner.errors(planner.published())


def median(errors) -> float:
    return planner.quantile(map(abs, errors), 0.5)


def test_published_runs_are_planned_as_well_as_is_said(found):
    """By kind, as python -m lab.benchmarks.planner prints: all publications, each left out, and memory."""
    assert len(found) == 222
    for word, most in (("compiled", 0.10), ("eager", 0.12)):
        assert median(e for row, e in found if report.kind_of(row.q).startswith(word)) <= most
    page, readme = ((ROOT / name).read_text() for name in ("docs/planner.md", "README.md"))
    sizes = planner.memory()
    for table in (planner.summary(found), planner.summary(planner.left_out())[1:3], sizes[: sizes.index("")]):
        assert "\n".join(table) in page
    compiled, eager = (line.split(", ") for line in planner.summary(planner.left_out())[1:3])
    rows, others = (line[0].rpartition(": ")[2] for line in (compiled, eager))
    said = f"median error is {compiled[1]} % for {rows} compiled runs and {eager[1]} % for {others} eager ones"
    assert said in " ".join(readme.split())


def test_peaks_that_were_measured_as_allocated_bytes_are_planned():
    """On one H100 and one H200, of the reference transformer, within 0.3 %."""
    own = [size for size in planner.sizes() if size.publication == planner.HERE and "alloc" in size.memory_is]
    assert len({(size.planned, size.measured) for size in own}) == len(own) == 8
    assert all(abs(size.ratio - 1) < 0.003 for size in own)


def test_at_most_one_run_in_twenty_reserves_more_than_other_sources_say():
    """Whole publications left out, and whole publishers; at least 85 % lie inside."""
    runs = planner.reserved_runs()
    for source in (str, planner.publisher):
        above, below = planner.outside(runs, source)
        assert above <= len(runs) / 20 and len(runs) - above - below >= 0.85 * len(runs) > 30
    text = "\n".join(planner.reserved_text(runs))
    assert text in hardware.FIELD.read_text(), "python -m lab.benchmarks.planner --fit > lab/planning/field.toml"


def test_a_source_that_is_left_out_does_not_help_to_judge_its_own_runs():
    """However many rows it has, a source counts once: by the largest."""
    def size(source, ratio):
        return planner.Size(source, "", "max reserved", 1.0, ratio)

    runs = [size("a", 1.0), size("a", 1.2), size("b", 1.3), *[size("b", 1.1)] * 9]
    assert planner.upper(runs) == pytest.approx(1.3 * 1.3 / 1.2)
    runs.append(size("c", 1.35))  # inside that
    assert planner.outside(runs) == (0, 0) and planner.outside([*runs, size("d", 3.0), size("d", 0.9)]) == (1, 1)


def test_a_plan_fits_only_with_what_the_allocator_may_reserve():
    for words in ("--gpus 8", "--gpus 8 --compile none --wrapper fsdp2"):
        q = ask(words)
        peak = q.peak()
        low, high = report.reserves(q, peak)
        assert peak.nbytes <= low < high == pytest.approx(low * hardware.field_data()["reserved"]["most"])
        verdicts = [report.verdict(q, peak, limit) for limit in (high, high - 1, peak.nbytes, peak.nbytes - 1)]
        assert verdicts == ["fits", "may fit", "may fit", "DOES NOT FIT"]
        said = f"reserved {report.mib(low)} to {report.mib(high)} MiB by torch's allocator"
        assert any(line.startswith(said) for line in report.whole(q, 3.0, 0, 0))


def test_fsdp2_reserves_what_it_allocated_on_streams_of_its_own():
    """The largest gather, and the gradients, unless they are there at the peak; of one rank neither."""
    words = f"{LLAMA}/llama3-8b.json --gpu h100-96 --batch 1 --seqlen 8192 --compile blocks"
    q = ask(f"{words} --gpus 8 --wrapper fsdp2")
    ends = 2 * (2 * 4096 * 128256 + 4096)
    assert report.reserves(q, q.peak())[0] - q.peak().nbytes == ends + 4 * q.a.parameters / 8
    updated = q.peak()._replace(pieces={"gradients": q.a.parameters})
    assert report.reserves(q, updated)[0] - q.peak().nbytes == ends
    for other in (ask(f"{words} --gpus 8"), ask(f"{words} --gpus 1 --wrapper fsdp2")):
        assert report.reserves(other, other.peak())[0] == other.peak().nbytes


def test_an_eager_policy_keeps_the_seventh_product_too():
    words = f"{LLAMA}/llama3-8b.json --gpus 8 --batch 1 --seqlen 8192 --remat block --remat-ops --wrapper fsdp2"
    eager, compiled = (ask(f"{words} --compile {mode} --logits fp32").peak().pieces for mode in ("none", "blocks"))
    blocks = 32 * 8192 * 4096 * 2
    assert eager["saved for backward"] - compiled["saved for backward"] > 0.8 * blocks


def test_published_runs_that_ran_are_planned_as_fitting(found):
    beyond, rows = hardware.field_data()["ran"]["beyond_limit"]
    assert (len(planner.beyond(planner.published())), len(found)) == (beyond, rows)
    assert beyond <= 0.02 * rows and not [row for row, _ in found if row.peak > row.q.gpu.memory]


def test_a_row_that_is_far_off_is_called_extrapolated(found):
    far = [f"{error:+.2f} {row.setting}" for row, error in found if abs(error) > 0.26 and not planner.doubted(row)]
    assert not far, far


def test_four_of_five_rows_lie_inside_the_bar_that_is_printed(found):
    inside = [abs(error) <= report.bar(row.q)[1] for row, error in found]
    assert sum(inside) >= 0.8 * len(inside)


def test_no_more_than_a_third_of_a_source_is_fitted():
    rows = planner.published()
    for source in {(row.publication, row.name) for row in rows}:
        mine, fitted = ([r for r in some if (r.publication, r.name) == source] for some in (rows, planner.third(rows)))
        assert len(fitted) <= (len(mine) + 2) // 3


def test_a_publication_is_left_out_whole(monkeypatch):
    """No row of it is among those that its constants are fitted to, whatever the GPU."""
    fitted = []

    def fit(rows):
        fitted.append({row.publication for row in rows})
        return planner.NEUTRAL

    monkeypatch.setattr(planner, "fit", fit)
    monkeypatch.setattr(planner.Row, "error", lambda row, constants: 0.0)
    found = planner.left_out.__wrapped__()
    names = dict.fromkeys(row.publication for row in planner.published())
    assert len(found) == 222 and len(fitted) == len(names)
    assert all(name not in others for name, others in zip(names, fitted, strict=True))


@pytest.mark.slow
def test_the_stated_constants_and_errors_are_those_of_the_rows():
    stated = hardware.field_data()
    again = planner.fit(planner.third(planner.published()))
    assert again == pytest.approx(stated["constants"], rel=0.02, abs=0.002)
    bars = planner.bars(planner.left_out())
    assert {kind: rows for kind, (rows, _) in bars.items()} == {kind: bar[0] for kind, bar in stated["bars"].items()}
    assert [bar for _, bar in bars.values()] == pytest.approx([bar[1] for bar in stated["bars"].values()], abs=0.01)
    whole = planner.left_out(publishers=True)
    assert "\n".join(planner.summary(whole)[1:3]) in (ROOT / "docs/planner.md").read_text()


def test_what_a_run_does_beside_our_step_takes_time_of_its_own(found, monkeypatch):
    """Metrics of the logits, and the first FlashAttention: in the publications that have them, in no other."""
    constants = hardware.field_data()["constants"]
    rows = {name: next(row for row, _ in found if row.publication == name) for name, _ in
            [*planner.BESIDE.items(), ("torchtitan 355", 0)]}  # fmt: skip
    before = {name: row.error(constants) for name, row in rows.items()}
    for part in ({"BESIDE": {}}, {"FIRST_FLASH": ()}):
        with monkeypatch.context() as patch:
            for name, value in part.items():
                patch.setattr(planner, name, value)
            faster = {name for name, row in rows.items() if row.error(constants) > before[name] + 1e-4}
        assert faster == (set(planner.BESIDE) if "BESIDE" in part else set(planner.FIRST_FLASH))


def test_a_publisher_is_left_out_with_all_its_names():
    names = {row.publication for row in planner.published()}
    mosaic = {name for name in names if planner.publisher(name) == "MosaicGPT"}
    assert mosaic == set(planner.FIRST_FLASH) and planner.publisher("fms-fsdp 2024-02") == "fms-fsdp"
    assert len({planner.publisher(name) for name in names}) == len(names) - 1 - 7 - 1


AXES = {
    "seqlen": (128, 256, 257, 1000, 1024, 4100),
    "batch": (1, 2, 3, 4, 5, 9),
    "width": (1024, 1536, 2048, 4096),
    "depth": (1, 2, 3, 5),
    "gpus": (1, 2, 3, 4, 8),
    "remat-ratio": (0, 0.25, 0.5, 0.75, 1),
}
SETTINGS = (
    "--gpu h100 --depth 4 --width 1024 --seqlen 256 --batch 2 --remat block --compile none",
    "--gpu l4 --depth 2 --width 1024 --seqlen 1024 --batch 1 --gpus 4 --remat both --loss chunked --vocab 50304",
    "--gpu a100-80 --depth 4 --width 2048 --seqlen 1024 --batch 4 --gpus 8 --remat pointwise --block llama",
    "--gpu h100 --depth 4 --width 1024 --seqlen 1024 --batch 4 --gpus 8 --remat mlp --block llama --compile none",
)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_more_work_never_takes_less_time(setting, axis):
    """More GPUs never make fewer tokens per second together."""
    answers = [ask(f"{setting} --{axis} {value}").answer() for value in AXES[axis]]
    figures = [a.tokens_per_second if axis == "gpus" else a.time.seconds for a in answers]
    assert figures == sorted(figures)


def test_a_ring_crosses_nodes_with_all_ports_and_a_replica_with_its_own():
    ring = f"{LLAMA}/llama2-13b.json --gpus 8 --nodes 8 --batch 2"
    wide = ask(ring)
    narrow = ask(f"{ring} --across 20:4x50")
    assert wide.ring(wide.inside).bytes_per_s == min(wide.inside.bytes_per_s, 400e9)
    assert narrow.ring(narrow.inside).bytes_per_s == 200e9 and narrow.shared().bytes_per_s == 25e9
    assert wide.answer().tokens_per_second >= narrow.answer().tokens_per_second


def test_products_that_a_recomputed_block_keeps_are_memory_and_no_time():
    usual = "--gpus 8 --batch 2 --remat block"
    kept, none = ask(f"{usual} --remat-keep qkv"), ask(usual)
    a, config = kept.a, kept.config
    saved = config.batch * config.seqlen * 2 * (a.heads + 2 * a.kv_heads) * a.head_dim
    more = (kept.answer().peak.nbytes - none.answer().peak.nbytes) / saved
    assert a.depth - 2 <= more <= a.depth + 1
    work = ([w for op in q.tape.ops for w in op.work if w[0] == "mm"] for q in (kept, none))
    less, more = (sum(w[1] * w[2] * w[3] for w in products) for products in work)
    assert more - less == a.depth * saved / 2 * a.width
    assert kept.answer().time.seconds < none.answer().time.seconds
    with pytest.raises(ValueError, match="--remat-keep qkv: needs --remat block"):
        ask("--remat mlp --remat-keep qkv")


def test_what_a_flag_costs():
    """Each by what it must do to memory or time of one setting."""
    usual = f"{LLAMA}/llama3-8b.json --gpus 8 --batch 1 --seqlen 4096"
    base = ask(usual).answer()
    plain = ask(f"{usual} --remat block").answer()
    ops = ask(f"{usual} --remat block --remat-ops").answer()
    assert plain.peak.nbytes < ops.peak.nbytes < base.peak.nbytes
    assert base.time.seconds < ops.time.seconds < plain.time.seconds
    fp32 = ask(f"{usual} --logits fp32").answer()
    assert fp32.peak.nbytes > base.peak.nbytes and fp32.time.seconds > base.time.seconds
    eager = ask(f"{usual} --compile none").answer()
    assert eager.peak.nbytes > base.peak.nbytes and eager.time.seconds > base.time.seconds
    stored = ask(f"{usual} --master-dtype bf16").answer()
    assert base.peak.pieces["parameters"] == 2 * stored.peak.pieces["parameters"]
    slow = ask(f"{usual} --gpu h100 --watts 350").answer()
    assert slow.time.seconds > base.time.seconds


def test_adapters_are_trained_and_all_else_is_frozen():
    q = ask(f"{LLAMA}/llama3-8b.json --gpus 8 --batch 1 --lora 16")
    pieces = q.answer().peak.pieces
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert pieces["frozen parameters"] == 4 * q.a.parameters / 8
    assert pieces["parameters"] == 4 * adapters / 8 and pieces["Adam's moments"] == 8 * adapters / 8
    full = ask(f"{LLAMA}/llama3-8b.json --gpus 8 --batch 1").answer()
    assert 0.6 < q.answer().time.seconds / full.time.seconds < 0.9  # a third of the products less


def test_experts_are_frozen_without_adapters(tmp_path):
    shape = dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48)
    shape |= dict(num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)
    shape |= dict(head_dim=128, vocab_size=151936)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="qwen3_moe", torch_dtype="bfloat16") | shape))
    q, full = (ask(f"--hf {tmp_path} --gpus 8 --batch 1 --seqlen 1024{more}") for more in (" --lora 8", ""))
    pieces = q.answer().peak.pieces
    assert pieces["frozen parameters"] == 2 * q.a.parameters / 8
    assert pieces["parameters"] == 4 * 48 * 8 * (2 * (2048 + 4096) + 2 * (2048 + 512)) / 8
    assert q.answer().peak.nbytes < full.answer().peak.nbytes / 3
    assert q.answer().time.seconds < 0.9 * full.answer().time.seconds


def test_muon_sends_what_leaves_a_node_through_each_gpus_own_port():
    """All-to-alls of 16 GPUs on two nodes: half of what a GPU sends goes out by one port, whatever the node has."""
    shape = "--optimizer muon --depth 2 --width 2048 --batch 1 --seqlen 512 --gpus 8"
    q = ask(f"{shape} --nodes 2")
    a = q.a
    nvlink = q.inside
    port = Link(0.0, 50e9)
    still = Link(0.0, float("inf"))
    sent = 2 * 2 * a.hidden_parameters / 16 / 16 * 8  # both ways, bf16, a shard, to the 8 of the other node
    assert step_time.exchange_seconds(q.config, a, 16, step_time.Node(8, still, port)) == pytest.approx(sent / 50e9)
    near = step_time.exchange_seconds(q.config, a, 16, step_time.Node(8, nvlink._replace(latency_s=0), still))
    assert near == pytest.approx(sent * 7 / 8 / nvlink.bytes_per_s)
    assert ask(f"{shape} --nodes 2 --across 20:8x25").answer().time.seconds > q.answer().time.seconds


def test_eager_gradients_are_added_as_they_come():
    """One copy of them with accumulation; compiled graphs hand over all of a micro-batch at once, which makes two."""
    setting = "--gpus 8 --depth 16 --width 4096 --batch 1 --seqlen 512 --remat block"
    for more, copies in (("--compile none", 1), ("", 2)):
        once, twice = (ask(f"{setting} {more} --grad-accum {n}").answer().peak.pieces["gradients"] for n in (1, 2))
        own = 4 * ask(setting).a.parameters / 8
        assert abs((twice - own * (copies - 1)) / once - 1) < 0.25, more


def test_fsdp2_keeps_its_root_group_and_reduces_it_last():
    usual = f"{LLAMA}/llama3-8b.json --gpus 8 --batch 1 --seqlen 512 --compile none --remat block --remat-core"
    a, b = (ask(f"{usual} --wrapper {name}").answer().peak for name in ("simple", "fsdp2"))
    ends = 2 * 4096 * 128256
    assert "emb" in b.moment and b.nbytes - a.nbytes > 2 * ends  # both tables in bf16
    fused = ask(f"{usual} --logits bf16 --seqlen 8192").answer().peak.nbytes
    assert fused < ask(f"{usual} --seqlen 8192").answer().peak.nbytes


@pytest.mark.parametrize("words", ["--watts 350", "--gpus 128", "--gpu l4 --gpus 8 --nodes 2", "--lora 16",
                                   "--gpus 8 --optimizer muon"])  # fmt: skip
def test_no_error_bar_of_another_kind_is_printed(words):
    q = ask(f"--batch 1 {words}")
    assert report.bar(q) is None and any("there is no error bar" in line for line in report.error_notes(q))
    assert ", not known, " in report.line("a", q.answer(), q, 3.0) and report.doubts(q)
    assert not any(" to " in line for line in report.whole(q, 3.0, 0, 0) if line.startswith("step "))


def test_a_plan_within_the_reserve_says_that_such_runs_ran():
    row = planner.beyond(planner.published())[0]
    text = report.whole(row.q, 3.0, 0, 0)
    assert any("DOES NOT FIT" in line for line in text) and any("all of which ran" in line for line in text)
    assert not any("all of which ran" in line for line in report.whole(ask("--batch 1"), 3.0, 0, 0))


def test_best_finds_the_70b_model_on_16_gpus():
    from lab.planning.search import best

    q = ask(f"{LLAMA}/llama3-70b.json --gpus 8 --nodes 2 --batch 4")
    top, front = best(q, q.gpu.memory - 3 * 2**30)
    assert top is not None and top.peak.nbytes <= q.gpu.memory - 3 * 2**30
    assert all(a.peak.nbytes < b.peak.nbytes and a.time.seconds > b.time.seconds
               for a, b in zip(front, front[1:], strict=False))  # fmt: skip


@pytest.mark.parametrize("kind", "mixtral phi3 olmo2 gemma2 smollm3 qwen3_moe gpt_oss deepseek_v3".split())
def test_parameters_of_other_kinds_are_those_that_transformers_builds(kind):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    shape = transformers.AutoConfig.for_model(kind).to_dict() | dict(num_hidden_layers=5)
    shape.pop("layer_types", None)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape))
    config = {key: value for key, value in shape.items() if value is not None}
    assert architecture(config).parameters == sum(p.numel() for p in model.parameters())


def test_a_kind_that_is_not_known_is_counted_on_its_model(capsys):
    """A line says so first, since it takes seconds to a minute."""
    pytest.importorskip("transformers")
    config = dict(model_type="granite", hidden_size=64, intermediate_size=160, num_hidden_layers=3, vocab_size=500,
                  num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    a = architecture(config)
    block = 64 * 16 * (4 * 2 + 2 * 2) + 3 * 64 * 160 + 2 * 64
    assert a.parameters == 2 * 500 * 64 + 64 + 3 * block and "counted" in a.note
    said = "model_type granite, counted on the model that transformers builds: counting its FLOPs"
    assert said in capsys.readouterr().err


def test_a_recurrent_model_is_counted_with_as_few_steps_as_tokens():
    """A pass over 12 tokens and blocks of one chunk: 96 tokens took xlstm over a minute, and had no such form."""
    pytest.importorskip("transformers")
    config = dict(model_type="xlstm", hidden_size=64, num_heads=4, num_blocks=2, num_hidden_layers=2, vocab_size=500)
    a = architecture(config)
    assert a.note.endswith("FLOPs too") and 500 * 64 < a.counted < a.parameters


def test_experts_whose_numbers_stand_in_a_part_of_the_file_are_counted():
    pytest.importorskip("transformers")
    config = dict(model_type="dbrx", d_model=64, n_heads=4, n_layers=2, vocab_size=500, max_seq_len=64,
                  attn_config=dict(kv_n_heads=2, rope_theta=5e5, clip_qkv=8),
                  ffn_config=dict(ffn_hidden_size=96, moe_num_experts=8, moe_top_k=2, hidden_size=64))  # fmt: skip
    a = architecture(config)
    assert (a.experts, a.active) == (8, 2)
    assert a.parameters - a.active_parameters == 2 * 6 * 3 * 64 * 96


def test_a_file_of_which_transformers_builds_no_model_is_refused_with_its_reason():
    pytest.importorskip("transformers")
    config = dict(model_type="hunyuan_v1_dense", hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    with pytest.raises(ValueError, match="transformers builds no causal model from this config.json") as refusal:
        architecture(config)
    assert "NoneType" in str(refusal.value)
    assert architecture(config | dict(head_dim=16)).parameters


def test_a_model_whose_layers_have_heads_of_their_own_is_counted():
    """Of Gemma 4 every sixth layer has wider heads, for which transformers refuses to give one number."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=16, global_head_dim=32, vocab_size=500,
                  vocab_size_per_layer_input=500, hidden_size_per_layer_input=8, num_kv_shared_layers=0)  # fmt: skip
    made = transformers.AutoConfig.for_model("gemma4_text", **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    a = architecture(json.loads(made.to_json_string(use_diff=True)) | {"model_type": "gemma4_text"})
    assert a.parameters == sum(p.numel() for p in model.parameters()) and a.head_dim == 32


