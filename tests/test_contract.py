"""The contract of a model (trainer.step.LanguageModel): other models train in every mode, with their own FLOPs.

    pytest tests/test_contract.py        # half a minute, no GPU
"""

import json

import pytest
import torch
import torch.nn.functional as F
from harness import ONE_GRAPH
from running import TINY, resolved
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from without_code import WithoutCode

import model as model_file
from model import ModelConfig, Transformer
from simple_fsdp import data_parallel
from trainer import step_costs
from trainer.finetuning.model import HuggingFaceModel
from trainer.measuring import flops
from trainer.optimizer import AdamW
from trainer.parallelize import build
from trainer.step import make_step

pytestmark = pytest.mark.usefixtures("isolated")
CPU = torch.device("cpu")


@pytest.fixture
def gated(monkeypatch):
    """What a user does who writes a gate into model.py."""
    monkeypatch.setattr(model_file, "MLP", model_file.SwiGLU)


def counted_by_hand(c, seqlen):
    """FLOPs of a token of the gated model: a third product of the width of the MLP in each block."""
    return step_costs.flops_per_token(c, seqlen) + 6 * c.depth * c.grow * c.width**2


@pytest.fixture
def graphs(monkeypatch):
    """Compiled graphs run op by op after Inductor's passes: what is made of them knows no model."""
    plain = torch.compile
    compile = lambda f, *, options=None, **how: plain(f, backend=WithoutCode(options), **how)  # noqa: E731
    monkeypatch.setattr(torch, "compile", compile)


STEP = pytest.param("step", marks=[ONE_GRAPH, pytest.mark.slow])


def as_in_eager(train, compile, *words):
    """The runs of a compile mode and of eager code, whose losses are the same."""
    runs = [train(*words, "--log-every", 1, "--steps", 4, "--compile", mode) for mode in (compile, "none")]
    assert runs[0].code == 0, runs[0].err
    for a, b in zip(*(run.steps for run in runs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-5)
    return runs


@pytest.mark.long
@pytest.mark.parametrize("compile", ["fwdbwd", STEP])
def test_a_llama_block_trains_in_every_mode_as_in_eager(compile, graphs, train):
    steps, _ = as_in_eager(train, compile, "--block", "llama", "--depth", 2)
    assert steps.row["flags"]["block"] == "llama"
    c = ModelConfig(block="llama", depth=2, width=32, head_dim=16, grouping=2, vocab=256)
    assert f"{step_costs.flops_per_token(c, 16) / 1e6:.3f} MFLOP per token (causal" in steps.out


@pytest.mark.long
def test_a_gated_mlp_trains_with_its_own_flops(gated, graphs, train):
    flags = resolved(TINY)
    c = ModelConfig(**{name: getattr(flags, name) for name in ("depth", "width", "head_dim", "grouping", "vocab")})
    for run in as_in_eager(train, "fwdbwd"):
        assert f"{counted_by_hand(c, run.row['seqlen']) / 1e6:.3f} MFLOP per token (causal" in run.out
        assert run.row["hfu"] is None


def test_the_lean_mlp_refuses_what_it_does_not_compute(gated, train):
    done = train("--mlp", "lean")
    assert train("--mlp", "lean", "--block", "llama").err == done.err
    assert done.code == 2
    assert "--mlp plain" in done.err
    assert "--mlp lean: computes LayerNorm, up, GELU and down" in done.err


def test_the_lean_mlp_is_tried_with_numbers_of_its_own(monkeypatch):
    """Whatever the caller's modes and random state, which stays."""
    c = ModelConfig(depth=1, width=32, head_dim=16, grouping=1, mlp="lean")
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), FakeTensorMode():
        Transformer(c)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(model_file.MLP, "forward",
                        lambda self, x: self.down(F.gelu(self.up(x), approximate="tanh").clamp(max=10)))  # fmt: skip
    with pytest.raises(ValueError, match="--mlp lean"):
        Transformer(c)


def test_the_lean_mlp_refuses_another_activation_without_other_parameters(train, monkeypatch):
    monkeypatch.setattr(model_file.MLP, "forward", lambda self, x: self.down(F.silu(self.up(x))))
    assert train("--mlp", "lean").code == 2
    monkeypatch.undo()


@pytest.mark.long
@pytest.mark.parametrize("config", [
    dict(), dict(grouping=1, depth=3), dict(attn="flex"), dict(mlp="lean", remat="both"),
    dict(width=96, head_dim=16, vocab=77, grow=3), dict(block="llama", attn="flex"),
])  # fmt: skip
@pytest.mark.parametrize("seqlen", [1, 48, 4096])
def test_flops_counted_on_meta_are_those_of_the_formula(config, seqlen):
    with torch.device("meta"):
        model = Transformer(ModelConfig(**config))
    found = flops.count(model, seqlen)
    kinds = ("linear", "palm", "causal")
    assert found == tuple(step_costs.flops_per_token(model.config, seqlen, kind) for kind in kinds)


def llama(device="meta", **more):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, **more)
    with torch.device(device):
        return HuggingFaceModel(transformers.AutoModelForCausalLM.from_config(config))


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


@pytest.mark.long
@pytest.mark.parametrize("compile", ["none", "blocks", STEP])
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_a_hugging_face_model_trains_as_by_hand(compile, loss, graphs, alone):
    chunk = ["--loss-chunk", "8"] if loss == "chunked" else []
    c = resolved([*TINY, "--compile", compile, "--loss", loss, *chunk, "--clip", "0"])
    torch.manual_seed(3)
    tokens, targets = (torch.randint(256, (2, 16)) for _ in range(2))
    positions = torch.arange(16).expand(2, 16) + 5
    step = build(c, CPU, 1, model=llama(tie_word_embeddings=False))
    torch.manual_seed(c.seed)
    plain = llama("cpu", tie_word_embeddings=False)
    plain.load_state_dict({name: whole(t) for name, t in step.model.state_dict().items()})
    logits = plain.model(input_ids=tokens, position_ids=positions).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    norm = torch.cat([g.flatten() for g in torch.autograd.grad(expected, [*plain.parameters()])]).norm()
    assert step(tokens, targets, position_ids=positions).item() == pytest.approx(expected.item(), abs=2e-5)
    assert step.grad_norm.item() == pytest.approx(norm.item(), rel=1e-4)


def test_a_hugging_face_models_flops_and_identity():
    model = llama()
    layer = 32 * (32 + 16 + 16 + 32 + 3 * 48)  # q, k, v, o, and the gated MLP
    found = flops.count(model, 64)
    assert found.linear == pytest.approx(6 * (2 * layer + 32 * 256), rel=0.01)  # and the angles of its positions
    assert found.palm - found.linear == 12 * 2 * 32 * 64
    assert model.identity["hidden_size"] == 32


def test_tied_weights_stay_tied_and_train(alone):
    c = resolved(TINY)
    for init in (True, False):
        model = build(c, CPU, 1, model=llama(tie_word_embeddings=True), init=init).model.model
        assert model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]


@pytest.mark.parametrize("kind", ["capped", "scaled", "not prepared"])
def test_a_head_that_is_more_than_a_product_has_the_loss_of_all_logits_in_chunks_too(kind):
    model = llama("cpu")
    tokens = torch.arange(4)[None]
    if kind == "scaled":  # as Granite and Cohere do
        model.model.lm_head.register_forward_hook(lambda module, args, logits: logits / 8)
    if kind == "capped":
        model.model.config.final_logit_softcapping = 30.0
    if kind != "not prepared":
        model.prepare(4, CPU)
    loss = model(tokens, tokens, 2, learned=torch.tensor([[4]]))
    assert torch.equal(loss, model_file.cross_entropy(model(tokens), tokens))


def test_a_configuration_with_other_names_and_versions_is_the_same_identity():
    model = llama()
    before = model.identity
    model.model.config.transformers_version, model.model.config.id2label = "1.0", {0: "a"}
    assert model.identity == before
    assert before["num_key_value_heads"] == 2
    assert json.loads(json.dumps(before)) == before, "it survives JSON"


def test_a_model_with_values_is_not_emptied():
    c = resolved(TINY)
    with pytest.raises(ValueError, match="model: has values already"):
        build(c, CPU, 1, model=llama("cpu"))


def test_blocks_of_a_model_without_any_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="--compile blocks: the model has no repeated blocks"):
        make_step("blocks", model, AdamW(model.parameters(), 1e-3))


@pytest.mark.parametrize("mode", ["replicate", "fully_shard"])
def test_a_step_of_a_model_on_several_ranks_needs_the_mesh(mode, mesh_of):
    """Without it the loss would be that of this rank alone."""
    model = data_parallel(nn.Linear(2, 2), mesh_of(2), mode)
    with pytest.raises(ValueError, match="mesh: is None, but the parameters are DTensors on several ranks"):
        make_step("none", model, AdamW(model.parameters(), 1e-3))


class Windows(nn.Module):
    """Attention within windows of 8 tokens, the last one padded."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 16)

    def forward(self, tokens, targets=None, chunk=0):
        x = F.pad(self.emb(tokens), (0, 0, 0, -tokens.shape[1] % 8)).unflatten(1, (-1, 8))
        return self.head((x @ x.mT) @ x).sum()


class Table(Windows):
    """A table of 5 positions."""

    def forward(self, tokens, targets=None, chunk=0):
        return self.head(self.emb(tokens) + torch.zeros(5, 4, device=tokens.device)[: tokens.shape[1]]).sum()


@pytest.mark.parametrize(("kind", "seqlen", "why"), [
    (Windows, 50, "do not cost a T"), (Table, 12, "it does not run on meta: RuntimeError"), (Table, 5, None),
])  # fmt: skip
def test_flops_that_cannot_be_counted_are_not_made_up(kind, seqlen, why):
    with torch.device("meta"):
        model = kind()
    if why is None:
        assert flops.count(model, seqlen).causal == 6 * 4 * 16
        return
    with pytest.raises(ValueError, match=why):
        flops.count(model, seqlen)


def test_frozen_parameters_are_not_counted_as_trained():
    with torch.device("meta"):
        model = Table()
    model.emb.requires_grad_(False)  # the head's input then needs no gradient
    assert flops.count(model, 5).causal == 4 * 4 * 16
    model.emb.requires_grad_(True)
    model.head.requires_grad_(False)
    assert flops.count(model, 5).causal == 4 * 4 * 16


def test_a_run_whose_flops_are_not_counted_says_so_and_trains(trains, monkeypatch):
    def refuse(*_):
        raise ValueError("because")

    monkeypatch.setattr(flops, "count", refuse)
    done = trains("--steps", 4)
    assert "FLOPs are not counted, MFU is n/a: because" in done.out and done.row["mfu"] is None
