"""The model of resolved flags, wrapped, initialised and with its optimizer and step: --wrapper and --compile.

    step = build(config, device, world)       # needs a process group unless --wrapper none

fsdp2 and ddp are torch's own, as their users run them: fully_shard per block and root with its own mixed precision;
DDP under autocast; compiled per block, below the hooks that communicate.
"""

from contextlib import nullcontext
from dataclasses import fields

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.nn.parallel import DistributedDataParallel

from model import ModelConfig, Transformer
from simple_fsdp import MixedPrecisionPolicy, data_parallel, disable_data_parallel
from trainer import config as flags
from trainer.attention import DTYPES, choose_kernel
from trainer.optimizer import AdamW, local
from trainer.step import Step, make_step


def model_config(c: flags.Config, device: torch.device) -> ModelConfig:
    """ValueError in one line where the attention that is asked for cannot run on `device`."""
    kernels = choose_kernel(c, device)
    same = {f.name: getattr(c, f.name) for f in fields(ModelConfig) if f.name not in kernels._fields}
    return ModelConfig(**same, sdpa=kernels.sdpa, flex_options=kernels.flex_options)


def wrap(model: torch.nn.Module, c: flags.Config, device: torch.device, world: int) -> dist.DeviceMesh | None:
    """Shards `model` as resolved flags say; returns the mesh of `world` ranks (wrapper "none": None)."""
    if c.wrapper == "none":
        return None
    shape = (c.replicas, world // c.replicas) if c.mode == "hybrid_shard" else (world,)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    dtypes = DTYPES[c.param_dtype], DTYPES[c.reduce_dtype]
    if c.wrapper == "simple":
        small = int(c.min_shard_mib * 2**20)
        data_parallel(
            model, mesh, c.mode, MixedPrecisionPolicy(*dtypes), reshard_after_forward=c.reshard, min_bytes=small
        )
    elif c.wrapper == "fsdp2":
        how = dict(mesh=mesh, mp_policy=FSDP2Policy(*dtypes), reshard_after_forward=c.reshard)
        for block in model.blocks:
            fully_shard(block, **how)
        fully_shard(model, mesh=mesh, mp_policy=FSDP2Policy(*dtypes))  # the root stays gathered, as is its default
    return mesh


class HookedStep(Step):
    """The step under FSDP2 and DDP, which communicate in hooks of backward and leave gradients in `.grad`."""

    def __init__(self, *args, accum_sync="every", autocast=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.accum_sync, self.autocast = accum_sync, autocast

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        share, total, ddp = self.share(targets), 0.0, isinstance(self.model, DistributedDataParallel)
        for i, (x, y) in enumerate(zip(tokens.chunk(self.grad_accum), targets.chunk(self.grad_accum), strict=True)):
            if i:
                self.between()
            sync = self.accum_sync == "every" or i == self.grad_accum - 1
            if not ddp:
                self.model.set_requires_gradient_sync(sync)
            with self.model.no_sync() if ddp and not sync else nullcontext():
                self.phase = "fwd"
                with torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
                    loss = self.loss_fn(x, y, share)
                self.phase = "bwd"
                loss.backward()
            total = total + loss.detach()
        with torch.no_grad():
            grads = [local(p.grad) for p in self.optimizer.params]
            for p in self.optimizer.params:
                p.grad = None
            return self.finish(total, grads)


def hooked_step(model: torch.nn.Module, c: flags.Config, optimizer: AdamW, options: dict | None, **kwargs) -> Step:
    """The step of wrappers "fsdp2" and "ddp"; `options` and kwargs as make_step's."""
    kwargs = {k: v for k, v in kwargs.items() if k not in ("param_dtype", "reduce_dtype")}
    options = {k: v for k, v in (options or {}).items() if k != "plain"}
    if c.compile == "blocks":
        for block in model.blocks:  # not the module's call, which runs FSDP2's hooks
            block.forward = torch.compile(block.forward, fullgraph=True, options=options)
    if c.wrapper == "fsdp2":
        return HookedStep(model, optimizer, **kwargs)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if c.reduce_dtype == "bf16":
        ddp.register_comm_hook(None, bf16_compress_hook)
    return HookedStep(ddp, optimizer, autocast=None if c.param_dtype == "fp32" else DTYPES[c.param_dtype], **kwargs)


def build(c: flags.Config, device: torch.device, world: int, stage=lambda name: None, init: bool = True) -> Step:
    """The step of resolved flags, its model (`.model` of a mode that does not compile it) initialised from --seed.
    `stage` is called with the name of each stage that is done. Needs a process group unless c.wrapper is "none"."""
    with torch.device("meta"):
        model = Transformer(model_config(c, device))
    stage("model")
    mesh = wrap(model, c, device, world)
    stage("wrap")
    model.to_empty(device=device)
    stage("to_empty")
    if init:
        torch.manual_seed(c.seed)
        with disable_data_parallel():
            model.init_weights()
    stage("init")
    if isinstance(model, FSDPModule):
        model.unshard()  # its first run pads uneven shards, into other memory than the optimizer would know
        model.reshard()
    optimizer = AdamW(model.parameters(), c.lr, moment_dtype=DTYPES[c.adam_dtype])
    stage("optimizer")
    model.set_seqlen(c.seqlen, device)
    stage("mask")
    chunk = c.chunk if c.loss == "chunked" else 0
    options = flags.compile_options(c)
    kwargs = dict(
        mesh=mesh, grad_accum=c.grad_accum, clip=c.clip, chunk=chunk, accum_sync=c.accum_sync,
        param_dtype=DTYPES[c.param_dtype], reduce_dtype=DTYPES[c.reduce_dtype], norm_limit=c.norm_limit,
    )  # fmt: skip
    if c.wrapper in ("fsdp2", "ddp"):
        step = hooked_step(model, c, optimizer, options, **kwargs)
    else:
        kwargs |= dict(in_backward=c.optim == "in-backward")
        step = make_step(c.compile, model, optimizer, options=options, **kwargs)
    step.bare_model = model
    return step
