"""AdamW and Muon over the local shards of a model: no host synchronisation (AdamW8bit apart), and they can leave out an
update.

    optimizer = AdamW(model.parameters(), lr=3e-4)         # parameters may be DTensors or plain
    optimizer.lr.fill_(learning_rate(config, k))           # of step k; lr and step count are scalars on the device
    optimizer.step(grads, skip)                            # skip: fp32 scalar; 0.0: update, 1.0: change nothing
    optimizer.moments(), optimizer.t                       # its state: moments by parameter, number of updates

AdamW runs no collective. It is torch's fused kernel, or (foreach) operations over lists that torch.compile fuses; both
agree to an ulp. Muon is muon.py's, with this AdamW for what is no matrix of a hidden layer.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

import muon
from trainer.config import Config


def learning_rate(config: Config, k: int) -> float:
    """Of step k, from 0 on: linear warm-up, then --schedule."""
    warmup = config.warmup_steps
    if k < warmup:
        return config.lr * (k + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        return config.lr * min(1, 0.1 + 0.9 * (config.steps - k) / max(1, config.steps / 5))
    if config.schedule != "cosine":
        raise ValueError(f"--schedule {config.schedule}: no rate is known of it")
    progress = (k - warmup) / max(1, config.steps - warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def local(t: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; a plain tensor itself."""
    return t.to_local() if isinstance(t, DTensor) else t


class AdamW:
    """AdamW (Loshchilov and Hutter 2019). Matrices decay, vectors (norms, biases) do not. A step whose `skip` is 1
    leaves parameters, moments and step count as they are, to the bit. moment_dtype: of both moments (None: the
    parameters'), not of the arithmetic. foreach: the form that torch.compile fuses, always taken for moments below
    fp32."""

    def __init__(
        self,
        params,
        lr,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        moment_dtype=None,
        foreach=False,
    ):
        params = [p for p in params if p.requires_grad]
        self.params = sorted(params, key=lambda p: p.ndim < 2)  # those that decay first
        self.decayed_count = sum(p.ndim >= 2 for p in params)
        shards = self.shards = [local(p.detach()) for p in self.params]
        self.m = [torch.zeros_like(p, dtype=moment_dtype) for p in shards]
        self.v = [torch.zeros_like(p, dtype=moment_dtype) for p in shards]
        device = shards[0].device
        self.t = torch.zeros((), device=device)
        self.lr = torch.tensor(float(lr), device=device)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.foreach = foreach or moment_dtype not in (None, torch.float32)

    def moments(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(kind, parameter, local shard of the moment of that kind) of all moments."""
        # A study of memory takes them away.
        for p, m, v in zip(self.params, self.m, self.v, strict=False):
            yield "m", p, m
            yield "v", p, v

    @torch.no_grad()
    def step(self, grads: list[Tensor], skip: Tensor) -> None:
        """Updates all parameters. grads: local shards, in the order of `self.params`; skip: fp32 scalar, 0.0 or 1.0."""
        self.t += 1 - skip
        if self.foreach and torch.compiler.is_compiling():
            self._foreach(slice(None), grads, self.decayed_count, skip)
        elif self.foreach:
            # eager: one by one, because its temporaries are as large as what it updates.
            for i, grad in enumerate(grads):
                self._foreach(slice(i, i + 1), [grad], i < self.decayed_count, skip)
        else:
            for part, decays in (
                (slice(0, self.decayed_count), True),
                (slice(self.decayed_count, None), False),
            ):
                self._fused(part, grads[part], decays, skip)

    def _fused(self, part: slice, grads: list[Tensor], decays: bool, skip: Tensor | None) -> None:
        if grads:
            adamw(
                self.shards[part],
                grads,
                self.m[part],
                self.v[part],
                [],
                [self.t - 1 for _ in grads],
                fused=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=self.lr,
                weight_decay=self.weight_decay if decays else 0.0,
                eps=self.eps,
                maximize=False,
                found_inf=skip,
            )

    def _foreach(
        self, part: slice, g: list[Tensor], decayed_count: int, skip: Tensor | None
    ) -> None:
        """Updates the parameters of `part`, the first `decayed_count` of which decay. In a refused step each sum below
        adds a zero (of the sign that leaves -0.0 as it is; no factor is -0.0, which Triton takes for 0.0) and every
        factor of what is kept is one."""
        # Not self.shards: a compiled graph has the parameters as inputs.
        p = [local(p) for p in self.params[part]]
        m = self.m[part]
        v = self.v[part]
        skip = torch.zeros_like(self.t) if skip is None else skip
        refused = skip.bool()
        # If the first step is refused t is 1, not 0, by which it would divide.
        t = self.t + skip
        b1, b2 = self.betas
        stored = (m, v)
        narrow = m[0].dtype != p[0].dtype
        if narrow:
            m = [x.to(p[0].dtype) for x in m]
            v = [x.to(p[0].dtype) for x in v]
        g = [x.masked_fill(refused, 0.0) for x in g]
        change = torch._foreach_sub(m, g)
        torch._foreach_mul_(change, torch.where(refused, 0.0, b1 - 1))
        torch._foreach_add_(m, change)
        torch._foreach_mul_(v, torch.where(refused, 1.0, b2))
        torch._foreach_addcmul_(v, g, g, 1 - b2)
        del g, change
        if narrow:  # not "m is not stored[0]", which torch 2.11 does not trace
            torch._foreach_copy_(stored[0], m)
            torch._foreach_copy_(stored[1], v)
        d = torch._foreach_sqrt(v)
        torch._foreach_div_(d, (1 - b2**t).sqrt())
        torch._foreach_add_(d, self.eps)
        update = [x.masked_fill(refused, 0.0) for x in m]
        torch._foreach_div_(update, d)
        torch._foreach_mul_(update, self.lr / (1 - b1**t))
        if decayed_count:
            torch._foreach_mul_(p[:decayed_count], 1 - self.lr * self.weight_decay * (1 - skip))
        torch._foreach_sub_(p, update)


class AdamW8bit:
    """AdamW of torchao (Dettmers et al. 2021), used as AdamW is: moments are codes of 8 bits, with a scale for each
    BLOCK of them. Blocks never cross rows, so that shards of whole rows have the same codes for every number of ranks;
    parameters whose rows are no multiple of BLOCK, and small ones, have moments in fp32. The host waits for `skip`.
    compiled: torchao compiles the update of each shape; else it is computed eagerly, one parameter at a time.
    ValueError where torchao is not installed."""

    BLOCK = 256
    SMALLEST = 4096  # elements of the whole parameter, as torchao counts them

    def __init__(self, params, lr, betas=(0.9, 0.95), weight_decay=0.1, compiled=True):
        try:
            from torchao.optim import AdamW8bit as Theirs
        except ImportError as e:
            raise ValueError(
                "--optimizer adamw8bit: needs torchao; pip install -e '.[lowbit]'"
            ) from e

        class Optimizer(Theirs):
            def _new_buffer(buffers, p, signed):
                if p in self.in_8_bits and p.numel():
                    return buffers._subclass_zeros(p, signed, self.BLOCK)
                return torch.zeros_like(p)

        params = [p for p in params if p.requires_grad]
        self.params = sorted(params, key=lambda p: p.ndim < 2)  # those that decay first
        self.decayed_count = sum(p.ndim >= 2 for p in params)
        # Plain tensors, on which torchao knows nothing of ranks; one without rows has nothing to update.
        self.shards = [local(p.detach()) for p in self.params]
        self.in_8_bits = {
            shard
            for p, shard in zip(self.params, self.shards, strict=True)
            if p.numel() >= self.SMALLEST and math.prod(p.shape[1:]) % self.BLOCK == 0
        }
        device = self.shards[0].device
        self.t = torch.zeros((), device=device)
        self.lr = torch.tensor(float(lr), device=device)
        self.foreach = False  # of torch.compile's form, which AdamW has
        self.stance = "default" if compiled else "force_eager"
        how = dict(lr=self.lr, betas=betas, block_size=self.BLOCK)
        groups = [
            dict(params=self.shards[: self.decayed_count], weight_decay=weight_decay),
            dict(params=self.shards[self.decayed_count :], weight_decay=0.0),
        ]
        self.theirs = Optimizer([group for group in groups if group["params"]], **how)
        for shard in self.shards:  # before the first step: a checkpoint fills them
            self.theirs.state[shard] = dict(
                step=torch.zeros((), device=device),
                exp_avg=self.theirs._new_buffer(shard, True),
                exp_avg_sq=self.theirs._new_buffer(shard, False),
            )

    def moments(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """As AdamW's. Of one in 8 bits the codes, and as kinds "m_scale" and "v_scale" the scales, by rows."""
        for p, shard in zip(self.params, self.shards, strict=True):
            state = self.theirs.state[shard]
            for kind, moment in (("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
                if shard not in self.in_8_bits:
                    yield kind, p, moment
                    continue
                # What has no rows has no codes either, but their dtype and shape, which ranks must agree on.
                codes, scale = (
                    (moment.codes, moment.scale) if shard.numel() else (moment.byte(), moment)
                )
                yield kind, p, codes
                scales = math.prod(p.shape[1:]) // self.BLOCK
                yield f"{kind}_scale", p, scale.reshape(len(shard), scales)

    @torch.no_grad()
    def step(self, grads: list[Tensor], skip: Tensor) -> None:
        """As AdamW's."""
        if skip:
            return
        for shard, grad in zip(self.shards, grads, strict=True):
            self.theirs.state[shard]["step"].copy_(self.t)  # a resumed run has only loaded t
            shard.grad = grad if shard.numel() else None
        with torch.compiler.set_stance(self.stance):
            self.theirs.step()
        self.t += 1
        self.theirs.zero_grad()


class Muon:
    """Muon for the matrices that muon.groups_of names, AdamW for the rest; used as AdamW is. lr: AdamW's; Muon's is
    always `ratio` times that. replicas: see muon.Muon. how: hyperparameters of muon.muon. adamw: arguments of AdamW;
    moment_dtype is the momentum's, too. ValueError for a model without matrices, or with nothing else."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        ratio: float,
        replicas: DeviceMesh | None,
        how: dict,
        **adamw,
    ):
        groups = {
            group["use_muon"]: [p for _, p in group["params"]] for group in muon.groups_of(model)
        }
        if len(groups) < 2:
            raise ValueError(
                "--optimizer muon: needs matrices of hidden layers, and an embedding or vectors for AdamW"
            )
        self.matrices = groups[True]
        self.ratio = ratio
        self.how = how
        self.adamw = AdamW(groups[False], lr, **adamw)
        self.params = [*self.matrices, *self.adamw.params]
        self.sets = list(muon.plan([muon.layout_of(p, replicas) for p in self.matrices]))
        dtype = adamw["moment_dtype"]
        self.momenta = [torch.zeros_like(local(p.detach()), dtype=dtype) for p in self.matrices]
        self.decayed_count = len(self.matrices) + self.adamw.decayed_count
        self.t, self.lr = self.adamw.t, self.adamw.lr  # the same tensors

    def moments(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """As AdamW's; a matrix has one, "m"."""
        yield from (("m", p, m) for p, m in zip(self.matrices, self.momenta, strict=True))
        yield from self.adamw.moments()

    @torch.no_grad()
    def step(self, grads: list[Tensor], skip: Tensor) -> None:
        """As AdamW's; a collective."""
        n = len(self.matrices)
        self.adamw.step(grads[n:], skip)
        shards = [local(p) for p in self.matrices]
        lr = self.lr * self.ratio
        muon.muon(
            self.sets, shards, grads[:n], self.momenta, lr=lr, refused=skip.bool(), **self.how
        )
