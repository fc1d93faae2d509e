"""From resolved flags to a training step: the model, its wrapper (--wrapper, --mode), its optimizer, its compile mode.

    step = build(config, device, world)       # needs a process group unless --wrapper none
    step = build(config, device, world, model=...)    # another LanguageModel, such as finetuning.model.HuggingFaceModel

fsdp2 and ddp are torch's own, as their users run them: fully_shard per block and root with its own mixed precision;
DDP under autocast; compiled per block, below the hooks that communicate.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.nn.parallel import DistributedDataParallel

from model import ModelConfig, Transformer, cross_entropy
from muon import COEFFICIENTS
from simple_fsdp import MixedPrecisionPolicy, data_parallel, disable_data_parallel, units_of
from trainer import config as flags
from trainer.attention_kernel import DTYPES, choose_kernel
from trainer.optimizer import AdamW, AdamW8bit, Muon, local
from trainer.step import LanguageModel, Step, blocks_to_compile, make_step
from trainer.step_costs import NEWTON_SCHULZ_STEPS


def compile_options(config: flags.Config) -> dict:
    """--compile-options as a dict. Values are read as Python literals, as strings where they are none."""
    options = {}
    for option in config.compile_options:
        name, _, value = option.partition("=")
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value or "True")
        options[name] = value
    return options


def model_config(config: flags.Config, device: torch.device) -> ModelConfig:
    """The reference transformer's configuration. ValueError, one line, for attention that cannot run on `device`."""
    sdpa, _ = choose_kernel(config, device)
    same = {f.name: getattr(config, f.name) for f in fields(ModelConfig) if f.name != "sdpa"}
    return ModelConfig(**same | dict(attn="flex" if config.attn == "flex" else "sdpa", sdpa=sdpa))


def reference_model(config: flags.Config, device: torch.device) -> Transformer:
    """The transformer of resolved flags for `device`, on the meta device. ValueError as above, and from --mlp lean."""
    with torch.device("meta"):
        return Transformer(model_config(config, device))


def make_mesh(config: flags.Config, device: torch.device, world: int) -> dist.DeviceMesh | None:
    """The mesh of `world` ranks that resolved flags ask for: of one dimension, "shard", or for hybrid_shard of two,
    "replicate" and "shard". Wrapper "none" has none."""
    if config.wrapper == "none":
        return None
    shape = (
        (config.replicas, world // config.replicas) if config.mode == "hybrid_shard" else (world,)
    )
    names = ("replicate", "shard")[-len(shape) :]
    return dist.init_device_mesh(device.type, shape, mesh_dim_names=names)


def wrap(model: nn.Module, config: flags.Config, mesh: dist.DeviceMesh | None) -> None:
    """Shards `model` over the mesh of `make_mesh` as resolved flags say; without a mesh it stays as it is."""
    if mesh is None:
        return
    dtypes = (DTYPES[config.param_dtype], DTYPES[config.reduce_dtype])
    small = int(config.min_shard_mib * 2**20)
    if config.wrapper == "simple":
        how = dict(mode=config.mode, mp_policy=MixedPrecisionPolicy(*dtypes), min_bytes=small)
        over = mesh
        # A replica knows nothing of the others: the step averages over them.
        if config.accum_sync == "shards":
            over = mesh["shard"]
            how["mode"] = "fully_shard"
        # Routers of experts and the like, which transformers keeps in fp32.
        for part in getattr(model, "parts_in_fp32", ()) if config.param_dtype != "fp32" else ():
            exact = how | dict(mp_policy=MixedPrecisionPolicy(torch.float32, dtypes[1]))
            data_parallel(
                model.get_submodule(part), over, reshard_after_forward=config.reshard, **exact
            )
        for block in units_of(model)[-1:] if config.keep_last else ():
            data_parallel(model.get_submodule(block), over, reshard_after_forward=False, **how)
        data_parallel(model, over, reshard_after_forward=config.reshard, **how)
    elif config.wrapper == "fsdp2":
        how = dict(mesh=mesh, mp_policy=FSDP2Policy(*dtypes), reshard_after_forward=config.reshard)
        for block in units_of(model):
            fully_shard(model.get_submodule(block), **how)
        # The root stays gathered, as is its default.
        fully_shard(model, mesh=mesh, mp_policy=FSDP2Policy(*dtypes))


class TorchWrapperStep(Step):
    """The step under FSDP2 and DDP, which communicate in backward's hooks and leave gradients in `.grad`."""

    def __init__(
        self,
        config: flags.Config,
        model: nn.Module,
        optimizer: AdamW,
        options: dict,
        accum_sync: str,
        **kwargs,
    ):
        super().__init__(model, optimizer, **kwargs)
        self.accum_sync = accum_sync
        self.autocast = (
            DTYPES[config.param_dtype]
            if config.wrapper == "ddp" and config.param_dtype != "fp32"
            else None
        )
        inductor_options = {name: value for name, value in options.items() if name != "plain"}
        for block in blocks_to_compile(model, "none") if config.compile == "blocks" else ():
            # Not its call: FSDP2's hooks.
            block.forward = torch.compile(block.forward, fullgraph=True, options=inductor_options)
        if config.compile == "blocks":  # the loss, too, as ours
            self.cross_entropy = torch.compile(
                cross_entropy, fullgraph=True, options=inductor_options
            )
            self.loss_outside_model = True
        if config.wrapper == "ddp":
            self.run_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if config.reduce_dtype == "bf16":
                self.run_model.register_comm_hook(None, bf16_compress_hook)

    def micro_batches(
        self, tokens: Tensor, targets: Tensor, inputs: dict[str, Tensor]
    ) -> Iterator[tuple]:
        """As Step's; whether backward of each reduces gradients is said before it."""
        ddp = isinstance(self.run_model, DistributedDataParallel)
        for i, micro_batch in enumerate(super().micro_batches(tokens, targets, inputs)):
            last = i == self.grad_accum - 1
            reduces = last or self.accum_sync != "last"
            if self.accum_sync == "shards":
                self.model.set_requires_all_reduce(last)
            elif not ddp:
                self.model.set_requires_gradient_sync(reduces)
            with self.run_model.no_sync() if ddp and not reduces else nullcontext():
                yield micro_batch

    def forward(self, tokens: Tensor, targets: Tensor, divisor: Tensor, **inputs: Tensor) -> Tensor:
        enabled = self.autocast is not None
        with torch.autocast(tokens.device.type, self.autocast, enabled=enabled):
            return super().forward(tokens, targets, divisor, **inputs)

    def backward(self, loss: Tensor, params: list[Tensor]) -> tuple:
        """Adds the gradients to `.grad`; returns none."""
        self.enter("bwd")
        loss.backward()
        return ()

    @torch.no_grad()
    def reduce(self, grads: list[Tensor]) -> list[Tensor]:
        """What the hooks have reduced, out of `.grad`."""
        grads = [local(p.grad) for p in self.optimizer.params]
        for p in self.optimizer.params:
            p.grad = None
        return super().reduce(grads)


def to_empty(model: nn.Module, device: torch.device) -> None:
    """Gives `model` memory on `device`. Parameters are swapped, not replaced: one that has several names stays one."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def make_optimizer(
    config: flags.Config, model: nn.Module, mesh: dist.DeviceMesh | None
) -> AdamW | AdamW8bit | Muon:
    """Of resolved flags. ValueError, one line, for a model that --optimizer muon cannot train, and without torchao."""
    adamw = dict(
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
        moment_dtype=DTYPES[config.adam_dtype],
    )
    if config.optimizer == "adamw":
        return AdamW(model.parameters(), config.lr, **adamw)
    if config.optimizer == "adamw8bit":
        del adamw["moment_dtype"]
        return AdamW8bit(model.parameters(), config.lr, compiled=config.compile != "none", **adamw)
    if config.optimizer != "muon":
        raise ValueError(f"--optimizer {config.optimizer}: nothing makes it")
    how = dict(
        weight_decay=config.weight_decay,
        momentum=0.95,
        nesterov=True,
        ns_coefficients=COEFFICIENTS,
        eps=1e-7,
        ns_steps=NEWTON_SCHULZ_STEPS,
        adjust_lr_fn=config.muon_adjust_lr,
        ns_dtype=DTYPES[config.muon_dtype],
    )
    return Muon(
        model,
        config.lr,
        (config.muon_lr or config.lr) / config.lr,
        mesh if config.wrapper == "ddp" else None,
        how,
        **adamw,
    )


def materialise(
    model: LanguageModel, config: flags.Config, device: torch.device, draw: bool = True
) -> None:
    """Gives the wrapped model, which is on meta, memory on `device`, and values drawn from --seed: the same for every
    number of ranks."""
    to_empty(model, device)
    if draw:
        torch.manual_seed(config.seed)
        with disable_data_parallel():
            model.init_weights()
    if isinstance(model, FSDPModule):
        # Its first run pads uneven shards, into other memory than the optimizer would know.
        model.unshard()
        model.reshard()


def training_step(
    config: flags.Config,
    model: LanguageModel,
    optimizer: AdamW | Muon,
    mesh: dist.DeviceMesh | None,
    check_for_stop: Callable[[], Any] | None = None,
    on_gradients: Callable[[list, list], Any] | None = None,
    compiled_update: bool | None = None,
) -> Step:
    """The step of resolved flags, compiled by --compile at its first call. check_for_stop, on_gradients: see Step;
    compiled_update: see make_step. ValueError as make_step."""
    model.prepare(config.seqlen, optimizer.lr.device)
    kwargs = dict(
        options=compile_options(config),
        mesh=mesh,
        grad_accum=config.grad_accum,
        accum_sync=config.accum_sync,
        clip=config.clip,
        chunk=config.loss_chunk if config.loss != "full" else 0,
        param_dtype=DTYPES[config.param_dtype],
        reduce_dtype=DTYPES[config.reduce_dtype],
        norm_limit=config.norm_limit,
        check_for_stop=check_for_stop,
        on_gradients=on_gradients,
    )
    if config.wrapper in ("fsdp2", "ddp"):
        return TorchWrapperStep(config, model, optimizer, **kwargs)
    compiles_itself = config.optimizer == "adamw8bit"  # torchao compiles its update itself
    how = dict(ahead=config.ahead, compiled_update=False if compiles_itself else compiled_update)
    return make_step(config.compile, model, optimizer, **how, **kwargs)


def build(
    config: flags.Config,
    device: torch.device,
    world: int,
    *,
    init: bool = True,
    model: LanguageModel | None = None,
    compiled_update: bool | None = None,
) -> Step:
    """The step that main.py makes of resolved flags, for programs that need nothing else of a run. Needs a process
    group unless --wrapper none. model: on the meta device, unwrapped (default: the reference transformer). init=False
    leaves parameters as they are allocated. ValueError for a model that has values, which would
    be lost, and as `training_step`."""
    model = reference_model(config, device) if model is None else model
    if not all(p.is_meta for p in model.parameters()):
        raise ValueError(
            "model: has values already, which would be lost; build it under torch.device('meta')"
        )
    mesh = make_mesh(config, device, world)
    wrap(model, config, mesh)
    materialise(model, config, device, draw=init)
    return training_step(
        config, model, make_optimizer(config, model, mesh), mesh, compiled_update=compiled_update
    )
