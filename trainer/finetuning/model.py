"""A causal language model of Hugging Face's transformers as what the trainer trains: a step.LanguageModel.

    model = blank_model("qwen2.5-7b", remat_ratio=0.5)        # on the meta device, from config.json
    model = HuggingFaceModel(AutoModelForCausalLM.from_config(...))

Its code is transformers' own; code that comes with a model is not run.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors
from torch.utils.checkpoint import checkpoint

from lean import chunked_cross_entropy
from model import attention_saved, cross_entropy
from simple_fsdp import units_of, unsharded
from trainer.data import DataError
from trainer.finetuning.checks import check_token_ids
from trainer.terminal.text import one_line


class HuggingFaceModel(nn.Module):
    """A causal language model of transformers as a step.LanguageModel. Masks and position ids are inputs of the batch,
    by the names that its own forward has. Its FLOPs are counted where it runs on the meta device, as Llama does."""

    NAMES = "transformers_version|_name_or_path|(torch_)?dtype|id2label|label2id|architectures"
    NOISE = re.compile(".*(drop|jitter).*")

    def __init__(self, model: nn.Module):
        super().__init__()
        # Without dropout and other noise, which a resumed run could not repeat.
        self.model = model.eval()
        self.plain_head = False  # until `probe`
        # Whether init_weights fills parameters; else buffers alone, which no file of weights holds.
        self.random_init = True
        # Of adapters.attach: then they alone are trained, and in checkpoints.
        self.adapters: dict[str, Any] = {}
        # Names, as in `model`, of parameters that are trained and saved beside adapters; each of a tied one.
        self.beside_adapters: list[str] = []

    @property
    def identity(self) -> dict[str, Any]:
        """The configuration without what only names it, or is off; and what adapters there are."""
        entries = self.model.config.to_diff_dict().items()
        kept = {
            name: v
            for name, v in entries
            if not (re.fullmatch(self.NAMES, name) or self._is_noise(name))
        }
        return kept | self.adapters

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """What a checkpoint holds. With adapters these alone: the rest is in the folder that it is loaded from."""
        state = super().state_dict(*args, **kwargs)
        if not self.adapters:
            return state
        beside = {name: state[f"model.{name}"] for name in self.beside_adapters}
        return adapters_in(state.items()) | {f"model.{name}": t for name, t in beside.items()}

    def saved_with_adapters(self) -> dict[str, nn.Parameter]:
        """{name in `model`: parameter} of what a folder of peft holds: adapters, and what is trained beside them."""
        state = self.model.state_dict(keep_vars=True)
        return adapters_in(state.items()) | {name: state[name] for name in self.beside_adapters}

    def _is_noise(self, name: str) -> bool:
        """Whether an entry of config.json says nothing to a model in eval(). PhiMoE uses its jitter there, too."""
        phimoe = self.model.config.model_type == "phimoe" and "jitter" in name
        return not phimoe and self.NOISE.fullmatch(name) is not None

    @property
    def noise(self) -> str:
        """Entries of the configuration that ask for noise, which is off, for people."""
        entries = vars(self.model.config).items()
        return ", ".join(f"{name} {p}" for name, p in entries if p and self._is_noise(name))

    @property
    def kept_in_fp32(self) -> list[str]:
        """Names of parameters that transformers keeps in fp32 where it loads the model in bf16."""
        parts = self.model._keep_in_fp32_modules_strict
        return [name for name, _ in self.named_parameters() if any(part in name for part in parts)]

    @property
    def parts_in_fp32(self) -> dict[str, list[str]]:
        """{name of a module: names of its parameters} where all of them are kept in fp32."""
        kept = {*self.kept_in_fp32}
        parts = {}
        for path in sorted({name.rpartition(".")[0] for name in kept}):
            own = [f"{path}.{name}" for name, _ in self.get_submodule(path).named_parameters()]
            inside = any(path.startswith(f"{other}.") for other in parts)
            if kept.issuperset(own) and not inside:
                parts[path] = own
        return parts

    @property
    def rotary(self) -> dict[str, Any]:
        """What the configuration says of rotary positions; empty without them."""
        return getattr(self.model.config, "rope_parameters", None) or {}

    def longest_short(self, seqlen: int) -> int:
        """Of longrope, the largest number of positions that have the short factors, where rows of so many tokens may
        have the long ones; else 0."""
        usual = self.rotary.get("original_max_position_embeddings") or seqlen
        return usual if self.rotary.get("rope_type") == "longrope" and seqlen > usual else 0

    @property
    def can_share_prefix(self) -> bool:
        """Whether all that tells a token its place are positions and one mask for all layers: then examples of a row
        can share a beginning."""
        config = self.model.config
        kinds = {*(getattr(config, "layer_types", None) or ())} <= {"full_attention"}
        windows = any(
            getattr(config, each, None) for each in ("sliding_window", "attention_chunk_size")
        )
        sdpa = config._attn_implementation == "sdpa"  # which takes such a mask
        return bool(self.rotary) and kinds and not windows and sdpa

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        chunk: int = 0,
        until: Tensor | None = None,
        learned: Tensor | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """tokens [B, T] -> logits [B, T, V]; with targets [B, T] their summed loss, `chunk` tokens at a time if not 0
        and the head is a plain product. until [B, T]: the column before which a token is seen by those from its own on,
        in place of what positions tell apart. learned [B, 1], on the CPU: how many targets of a row are not IGNORE; in
        chunks, the others cost no logits."""
        if until is not None:
            inputs["attention_mask"] = _seen_until(until)
        # Unless it is told the mask, transformers looks for documents in the values of positions.
        if tokens.is_meta:
            B, T = tokens.shape
            inputs = (
                dict(attention_mask=torch.ones(B, 1, T, T, dtype=torch.bool, device="meta"))
                | inputs
            )
        if targets is None or not (chunk and self.plain_head):
            logits = self.model(input_ids=tokens, use_cache=False, **inputs).logits
            return logits if targets is None else cross_entropy(logits, targets)
        x = self._hidden(tokens, **inputs)  # [B, T, D]
        head = self.model.get_output_embeddings().weight
        return chunked_cross_entropy(x, head, targets, chunk, learned)

    def _hidden(self, tokens: Tensor, **inputs: Tensor) -> Tensor:
        decoder = self.model.base_model
        if decoder is self.model:  # Llama 4's text model names a base that it lacks
            decoder = self.model.model
        return decoder(input_ids=tokens, use_cache=False, **inputs).last_hidden_state

    def init_weights(self) -> None:
        """Fills buffers and, unless they are to be loaded, parameters, as the model's own code does. DataError: it does
        not do so with sharded parameters."""
        # False: of memory that is no longer there; else nothing is filled.
        for module in self.model.modules():
            module._is_hf_initialized = (
                not self.random_init and next(module.buffers(), None) is None
            )
        for buffer in self.model.buffers():
            buffer._is_hf_initialized = False
        for name, p in self.model.named_parameters():
            p._is_hf_initialized = not self.random_init or is_adapter(name)
        tables = (module for module in self.model.modules() if isinstance(module, nn.Embedding))
        padded = [(table, table.padding_idx) for table in tables if table.padding_idx is not None]
        for module, _ in padded:
            # Transformers would write into a row, which of a shard is a copy.
            module.padding_idx = None
        with self._running():
            self.model.initialize_weights()
        for module, row in padded:
            module.padding_idx = row
            if self.random_init:
                _zero_row(module.weight, row)
        for module in self.model.modules() if self.adapters else ():
            if hasattr(module, "reset_lora_parameters"):
                module.reset_lora_parameters("default", True)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """DataError for code of transformers that does not run, as where it works on parameters in ways that sharded
        ones do not allow."""
        try:
            yield
        except Exception as error:
            sharded = any(
                words in str(error)
                for words in ("DTensor", "sharding strategy", "while it was gathered")
            )
            if isinstance(error, DataError) or (type(error) is RuntimeError and not sharded):
                raise
            what = "does not work with sharded parameters" if sharded else "does not run here"
            why = one_line(error, 200, kind=False)
            raise DataError(
                f"{type(self.model).__name__}: its code {what}; use another model ({why})"
            ) from error

    def without_gradient(self, seqlen: int) -> list[str]:
        """Names of trained parameters on which the loss of so many tokens does not depend, whatever their values, such
        as attention to an encoder that is not there. Of a model on meta; none are known where its code needs values."""
        tokens = torch.zeros(1, seqlen, dtype=torch.long, device="meta")
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        for inputs in ({}, dict(attention_mask=None)):  # some take no mask of four dimensions
            with suppress(Exception):  # whatever the model's code meets where there are no values
                loss = self(tokens, tokens, **inputs)
                grads = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
                return [name for name, grad in zip(trained, grads, strict=True) if grad is None]
        return []

    def prepare(self, seqlen: int, device: torch.device) -> None:
        """`probe`, unless weights are still to be loaded."""
        if self.random_init:
            self.probe(device)

    @torch.compiler.set_stance("force_eager")
    def probe(self, device: torch.device) -> None:
        """Tries on a few tokens whether the model runs, and whether logits are hidden states times the head: some
        models scale or cap them. DataError: it does not run on sharded parameters, or a token sees later ones."""
        tokens = torch.arange(4, device=device)[None]
        head = self.model.get_output_embeddings()
        # Small logits do not show it.
        capped = getattr(self.model.config, "final_logit_softcapping", None)
        with torch.no_grad(), self._running():
            logits = self(tokens).float()
            x = self._hidden(tokens)
            with unsharded():
                fits = not capped and head.bias is None and head.weight.shape[1:] == x.shape[-1:]
                fits = fits and head.weight.dtype == x.dtype  # Mamba's hidden states may be in fp32
                product = nn.functional.linear(x, head.weight).float() if fits else logits
        self.plain_head = fits and torch.allclose(logits, product, rtol=0.02, atol=1e-6)
        seen = self._seen(device, slice(None, 4))
        # Not above zero: Falcon-H1 sums up and subtracts again.
        if seen[4:].max() > 1e-4 * seen.max():
            raise DataError(
                f"{type(self.model).__name__}: its tokens attend to later ones, which they should predict; use a "
                'causal model (some need "is_decoder": true in config.json)'
            )

    @torch.compiler.set_stance("force_eager")
    def check_packed(self, device: torch.device, until: bool = False) -> None:
        """DataError unless all that mixes tokens keeps apart what position ids tell apart or, with `until`, that."""
        positions = torch.arange(4, device=device).repeat(1, 2)  # [1, 8]
        inputs = dict(position_ids=positions)
        if until:
            inputs["until"] = 4 * (1 + torch.arange(8, device=device)[None] // 4)
        if self._seen(device, slice(4, None), **inputs)[:4].any():
            raise DataError(
                f"--pad pack: {type(self.model).__name__} lets examples of one row attend to each other; use "
                "--pad longest"
            )

    def _seen(self, device: torch.device, part: slice, **inputs: Tensor) -> Tensor:
        """[8]: how large a gradient the logits of a part of eight tokens have in each of them."""
        embedded = []

        def leaf(module: nn.Module, args: tuple, x: Tensor) -> Tensor:
            embedded.append(x.detach().requires_grad_())  # [1, 8, D]
            return embedded[-1].clone()

        hook = self.model.get_input_embeddings().register_forward_hook(leaf)
        try:
            with self._running():
                logits = self(torch.arange(8, device=device)[None], **inputs)
                (grad,) = torch.autograd.grad(logits[:, part].float().square().sum(), embedded[:1])
        finally:
            hook.remove()
        return grad.reshape(8, -1).abs().amax(-1)  # XLNet has [8, 1, D]


def is_adapter(name: str) -> bool:
    """Whether this is the name of a parameter that peft has put beside a layer."""
    return ".lora_" in name


def without_adapters(name: str) -> str:
    """The name that a parameter has where peft has put nothing around its module."""
    return re.sub(r"\.base_layer(?=\.)", "", name)


def adapters_in(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Those of named tensors that are adapters."""
    return {name: t for name, t in named if is_adapter(name)}


def _seen_until(until: Tensor) -> Tensor:
    """[B, T] -> [B, 1, T, T]: whether a token (row) sees another (column)."""
    at = torch.arange(until.shape[1], device=until.device)
    return ((at[:, None] >= at) & (at[:, None] < until[:, None]))[:, None]


@torch.no_grad()
def _zero_row(weight: Tensor, row: int) -> None:
    if isinstance(weight, DTensor):
        (chunk,) = weight.__create_chunk_list__()
        weight = weight.to_local()
        row = row - chunk.offsets[0]
    weight[max(row, 0) : max(row + 1, 0)] = 0


def _recomputed(block: nn.Module) -> MethodType:
    """The forward of a block, of which only the inputs and the output of attention are kept for backward. A method: a
    copy of the block calls the copy. Of a function, which asks the class at each call, since data_parallel() gives the
    block another one: Dynamo would skip a partial of torch's."""

    @functools.wraps(type(block).forward)
    def recomputed_forward(self, *args, **kwargs):
        how = dict(use_reentrant=False, preserve_rng_state=False, context_fn=attention_saved)
        return checkpoint(type(self).forward, self, *args, **how, **kwargs)

    return MethodType(recomputed_forward, block)


def blank_model(
    folder: str, remat_ratio: float = 0.0, dtype: torch.dtype = torch.float32
) -> HuggingFaceModel:
    """The model of `folder`/config.json in fp32 to be computed in `dtype`, on the meta device; `remat_ratio` of its
    blocks, evenly spread, are computed again in backward. DataError: transformers lacks it."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError(
            "--model: needs transformers 5 and safetensors; pip install -e '.[hf]'"
        ) from None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # Each takes a millisecond to build.
        if (layers := getattr(config, "num_hidden_layers", 0)) > 10_000:
            raise ValueError(f"num_hidden_layers {layers}")
        usual = config.get_text_config().dtype or config.dtype
        # By transformers: the file's may be code.
        chosen = dict(attn_implementation=None, experts_implementation=None)
        with torch.device("meta"):
            # Some buffers have its dtype.
            inner = AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen)
        if inner.config.get_text_config() is not inner.config:
            raise ValueError(f"a multimodal one, {config.model_type}")
        # Stored in fp32; those that were drawn on the CPU, as DiffLlama's, too.
        for p in [*inner.parameters()]:
            swap_tensors(p, nn.Parameter(torch.empty(p.shape, device="meta"), p.requires_grad))
        for name, buffer in inner.named_buffers():
            if any(each in name for each in inner._keep_in_fp32_modules_strict):
                buffer.data = buffer.data.float()  # as from_pretrained does; from_config does not
        # Of exports without weights in `folder`.
        inner.config.dtype = usual
        inner.config.return_dict = True
    except Exception as error:  # whatever a strange config.json leads to
        why = one_line(error, 200, kind=False)
        expected = (
            "expected a causal language model that transformers knows, without code of its own"
        )
        raise DataError(
            f"{folder}/config.json: {expected}, found: {why}; use another model"
        ) from error
    model = HuggingFaceModel(inner)
    names = units_of(inner)
    count = round(remat_ratio * len(names))
    if remat_ratio and not names:
        raise DataError(
            f"{folder}: expected repeated blocks for --remat block, found none; use --remat none"
        )
    for i, name in enumerate(names):
        if (i + 1) * count // len(names) > i * count // len(names):
            block = inner.get_submodule(name)
            block.forward = _recomputed(block)
    return model


def tokenizer_of(folder: str):
    """The tokenizer of a folder. DataError: it has none that can be used, or one with code of its own."""
    from transformers import AutoTokenizer

    check_token_ids(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        # What transformers makes of a folder without its files.
        if not tokenizer.encode("a", add_special_tokens=False):
            raise ValueError("one that knows no token")
        return tokenizer
    except Exception as error:  # whatever strange files lead to
        raise DataError(
            f"{folder}: expected a tokenizer (tokenizer.json), found: {one_line(error, 200, kind=False)}; "
            "copy the tokenizer's files there"
        ) from error
