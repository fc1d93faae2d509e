"""Muon for sharded matrices: torch.optim.Muon's update, each matrix computed by one
rank. Imports only torch: copy it.

    from muon import Muon, groups_of

    # After data_parallel, fully_shard or DDP. lr: AdamW's.
    groups = groups_of(model, lr=3e-4)
    optimizer = Muon(groups, lr=0.02)
    # Then backward(), step(), zero_grad() as of any optimizer.

torch.optim.Muon on sharded parameters gathers each matrix on every rank, and every rank
does the same products. Here a matrix has one owner. An all-to-all brings its shards
there, the owner runs the Newton-Schulz iteration, an all-to-all brings the result back.
Matrices of one shape travel together and are iterated as one batch, while those of the
next shape are on their way. Owners have about equal FLOPs. Replicas (hybrid_shard, DDP)
share the matrices. Experts [E, m, n] that are sharded over E stay where they are. AdamW
updates what is no matrix of a hidden layer.

All ranks must call `step` with gradients of the same parameters. Q, K and V that are
stacked in one parameter are one matrix here. Of little use for a model that AdamW has
pretrained. Sources: Keller Jordan's Muon (kellerjordan.github.io/posts/muon);
arXiv:2502.16982 for "match_rms_adamw".

m, n rows and columns of a matrix; K matrices of one shape, k of them owned by this
rank; N ranks, S of which hold the shards of a copy.
"""

import fnmatch
from collections import Counter, defaultdict
from os import sysconf
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import get_process_group_ranks, group
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import normalize, pad
from torch.nn.modules.conv import _ConvNd
from torch.optim.adamw import adamw

# As operations: compiled code waits where `wait` stands.
all_to_all = torch.ops._c10d_functional.all_to_all_single
wait = torch.ops._c10d_functional.wait_tensor
# Of the quintic polynomial, as in torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Layout(NamedTuple):
    """Parameters with equal layouts are updated as one batch. shape: [m, n] or [E, m,
    n]. shards: number of ranks that hold the rows of one copy. group: name of the
    process group that shares the work. ranks: its size. me: this rank, from 0."""

    shape: torch.Size
    shards: int = 1
    group: str = ""
    ranks: int = 1
    me: int = 0


def local(t):
    """The local shard of a DTensor; a plain tensor as it is. Runs no collective."""
    return t.to_local() if isinstance(t, DTensor) else t


def layout_of(p, replicas=None) -> Layout:
    """The Layout of a parameter. replicas: see Muon. ValueError, in one line, if the
    parameter is not a real [m, n] or [E, m, n], is sharded over columns, does not fit
    into the memory of one rank, or has a mesh of ranks that do not ascend."""
    mesh = getattr(p, "device_mesh", replicas)
    *others, last = getattr(p, "placements", [Replicate()])
    rows = Shard(p.ndim - 2)
    memory = (
        torch.cuda.get_device_properties(p.device).total_memory
        if p.is_cuda
        else sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES")
    )
    needs = 8 * p.shape[-2:].numel()  # the matrix, two products and the result, in bf16
    expected = {
        "a real matrix [m, n] or [E, m, n]": p.ndim in (2, 3) and p.is_floating_point(),
        "placements Replicate, the last one Shard of rows or experts":
            {*others} <= {Replicate()} and last in (Replicate(), Shard(0), rows),
        f"at most {memory} bytes on its owner, not {needs}": needs <= memory,
    }  # fmt: skip
    for what, is_so in expected.items():
        if not is_so:
            raise ValueError(
                f"Muon: a parameter of shape {[*p.shape]} and {p.dtype}: expected "
                f"{what}; give it to AdamW (groups_of(model, to_adamw=..))"
            )
    # Each rank has matrices of its own.
    if mesh is None or last not in (Replicate(), rows):
        return Layout(local(p).shape)
    ranks = mesh.get_group() if mesh.ndim == 1 else group.WORLD
    if get_process_group_ranks(ranks) != mesh.mesh.flatten().tolist():
        raise ValueError(
            f"Muon: cannot use {mesh}: expected ranks in ascending order, and a 2-D "
            "mesh to hold all ranks"
        )
    shards = mesh.size(-1) if last == rows else 1
    return Layout(p.shape, shards, ranks.group_name, ranks.size(), ranks.rank())


def plan(layouts):
    """Which rank owns which matrix. Yields (layout, counts, positions) for each
    different layout, the costliest first: counts[r] is how many of them rank r owns;
    positions are their indices in `layouts`, those of rank 0 first. A matrix goes to
    the rank with the fewest FLOPs so far. All ranks compute the same plan.

        a = Layout(torch.Size([64, 32]), shards=2, ranks=2)
        b = Layout(torch.Size([8, 8]), shards=2, ranks=2)
        [*plan([a, b, a])]  # [(a, [1, 1], [0, 2]), (b, [1, 0], [1])]
    """
    alike = defaultdict(list)
    for position, layout in enumerate(layouts):
        alike[layout].append(position)
    loads = defaultdict(Counter)  # of the ranks of each group
    for layout in sorted(alike, key=_flops, reverse=True):
        load = loads[layout.group]
        counts = [0] * layout.ranks
        for _ in alike[layout]:
            owner = min(range(layout.ranks), key=load.__getitem__)
            load[owner] += _flops(layout)
            counts[owner] += 1
        yield layout, counts, alike[layout]


def _flops(layout):
    """Half the FLOPs of one step of the iteration: all of them are 4 s s l + 2 s s s
    for sides s <= l."""
    small, large = sorted(layout.shape[-2:])
    return layout.shape.numel() * small * (2 + small / large)


def newton_schulz(x, coefficients, steps, eps):
    """[K, m, n] -> [K, m, n], about U V' of each matrix U S V', in the dtype of x: its
    singular values are 0.7 to 1.2. A step with coefficients (a, b, c) replaces X by
    a X + b (X X') X + c (X X')^2 X; eps is the least norm that X is divided by.

        newton_schulz(grads, COEFFICIENTS, steps=5, eps=1e-7)
    """
    if x.shape[1] > x.shape[2]:
        return newton_schulz(x.mT, coefficients, steps, eps).mT
    a, b, c = coefficients
    x = normalize(x, dim=(1, 2), eps=eps)
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


def muon(sets, params, grads, momenta, /, **how):
    """One step of Muon on local shards, for optimizers that keep their own state. sets:
    the `plan` of the parameters. params, grads, momenta: lists in which number i of
    each has one shape; params and momenta are updated in place, momenta in any dtype.
    how: all hyperparameters of Muon, and perhaps `refused`, a boolean scalar tensor: if
    it is True, nothing changes. Call it under torch.no_grad(); torch.compile takes it.
    A collective: all ranks call it with the same plan.

        sets = [*plan([layout_of(p) for p in params])]
        muon(sets, shards, grads, momenta, **optimizer.param_groups[0])
    """
    works = [_update(*one_set, params, grads, momenta, **how) for one_set in sets]
    # All sets in turn: while one communicates another one computes. Each has at most
    # two collectives.
    for _ in range(3):
        for work in works:
            next(work, None)


def _update(
    layout, counts, members, params, grads, momenta, /,
    lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps,
    adjust_lr_fn, ns_dtype, refused=None, **others,
):  # fmt: skip
    """Updates the parameters of one layout. A generator, which yields None while a
    collective runs."""
    updates = []
    for i in members:
        grad = grads[i]
        mean = momenta[i].to(grad.dtype).lerp(grad, 1 - momentum)
        _write(momenta[i], mean, refused)
        update = grad.lerp(mean, momentum) if nesterov else mean
        updates.append(update.to(ns_dtype))

    (*_, m, n), S, group_name, N, me = layout
    k = counts[me]
    # The ranks that hold the same copy of the parameters as this one exchange shards.
    near = [rank // S == me // S for rank in range(N)]
    sent = [counts[rank] * near[rank] for rank in range(N)]
    x = torch.stack(updates)
    own_rows = x.shape[-2]
    # Of a shard; a smaller one is padded with zeros, which stay zeros.
    rows = -(-m // S)
    x = pad(x, (0, 0, 0, rows - own_rows))  # [K, .., rows, n]
    x = x.narrow(0, sum(counts[: near.index(True)]), sum(sent))
    if S > 1:
        x = all_to_all(x, [k * count for count in near], sent, group_name)
        yield
        x = wait(x)  # [S k, .., rows, n]

    # [k, .., m, n], with the rows of zeros.
    x = x.unflatten(0, (S, k)).movedim(0, -3).flatten(-3, -2)
    x = newton_schulz(x.flatten(0, -3), ns_coefficients, ns_steps, eps).view_as(x)
    x = x.unflatten(-2, (S, rows)).movedim(-3, 0).flatten(0, 1)  # [S k, .., rows, n]
    if N > 1:
        x = all_to_all(torch.cat([x] * (N // S)), counts, [k] * N, group_name)
        yield
        x = wait(x)  # [K, .., rows, n]

    ratio = 0.04 * max(m, n) if adjust_lr_fn == "match_rms_adamw" else max(1, m / n)
    for i, update in zip(members, x.narrow(-2, 0, own_rows), strict=True):
        new = params[i] * (1 - lr * weight_decay) - update.float() * (lr * ratio**0.5)
        _write(params[i], new, refused)


def _write(t, value, refused):
    t.copy_(value if refused is None else torch.where(refused, t, value))


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon, with its arguments and semantics, for plain tensors and for
    DTensors whose last placement may be a Shard of rows or experts.

        optimizer = Muon(groups_of(model), lr=0.02)

    params: matrices [m, n] or [E, m, n], or groups of parameters as `groups_of` makes
    them. A group with use_muon=False is updated by AdamW and has AdamW's
    hyperparameters.

    adjust_lr_fn: "original" (None) scales lr by sqrt(max(1, m / n)); "match_rms_adamw"
    scales it by 0.2 sqrt(max(m, n)), so that AdamW's lr and weight decay suit.
    ns_dtype: dtype of the iteration.

    replicas: a 1-D mesh whose ranks all hold the same plain tensors and gradients, as
    under DDP; they share the work.

    Raises ValueError, in one line, for an unknown adjust_lr_fn, and for a parameter
    that it cannot update (`layout_of`)."""

    replicas = None  # also of a copy, in which each rank does all

    def __init__(
        self,
        params,
        lr=1e-3,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        ns_coefficients=COEFFICIENTS,
        eps=1e-7,
        ns_steps=5,
        adjust_lr_fn=None,
        *,
        ns_dtype=torch.bfloat16,
        replicas=None,
    ):
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"Muon: adjust_lr_fn={adjust_lr_fn!r}: must be 'original' or "
                "'match_rms_adamw'"
            )
        super().__init__(
            params,
            dict(
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_coefficients=ns_coefficients,
                eps=eps,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
                ns_dtype=ns_dtype,
                use_muon=True,
            ),
        )
        self.replicas = replicas
        for param_group in self.param_groups:
            if param_group["use_muon"]:
                for p in param_group["params"]:
                    layout_of(p, replicas)  # raises what is wrong with it

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient, and returns what `closure`
        returns, if it is given. A collective: all ranks call it, with gradients of the
        same parameters."""
        loss = torch.enable_grad()(closure)() if closure else None
        for param_group in self.param_groups:
            params = [p for p in param_group["params"] if p.grad is not None]
            shards = [local(p) for p in params]
            grads = [
                p.grad.redistribute(placements=p.placements).to_local()
                if isinstance(p, DTensor)
                else p.grad
                for p in params
            ]
            names = (
                ["momentum_buffer"]
                if param_group["use_muon"]
                else ["exp_avg", "exp_avg_sq", "step"]
            )
            for p in params:  # states begin at zero
                if not self.state[p]:
                    self.state[p] = {
                        name: torch.zeros(()) if name == "step" else torch.zeros_like(p)
                        for name in names
                    }
            # The last ones are the momenta of Muon, or AdamW's counts of steps.
            *moments, last = [
                [local(self.state[p][name]) for p in params] for name in names
            ]
            if param_group["use_muon"]:
                muon(
                    plan([layout_of(p, self.replicas) for p in params]),
                    shards,
                    grads,
                    last,
                    **param_group,
                )
            else:
                beta1, beta2 = param_group["betas"]
                adamw(
                    shards,
                    grads,
                    *moments,
                    [],
                    last,
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=param_group["lr"],
                    weight_decay=param_group["weight_decay"],
                    eps=param_group["eps"],
                    maximize=False,
                )
        return loss


def groups_of(
    model: nn.Module,
    to_adamw=(),
    to_muon=(),
    *,
    lr=3e-4,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-8,
):
    """Parameter groups for `Muon`, with the names of their parameters:

        optimizer = Muon(groups_of(model), lr=0.02)

    Matrices [m, n] and [E, m, n] go to Muon. Vectors, embeddings, convolution kernels
    and the output layer go to AdamW; the output layer is the last matrix with as many
    rows as an embedding. Parameters without requires_grad are left out.

    to_adamw, to_muon: patterns of names that overrule this, such as "*.router.weight".
    lr, weight_decay, betas, eps: AdamW's; those of Muon are arguments of `Muon`.

    Raises ValueError for a pattern that matches no name."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    others = {
        m.weight for m in model.modules() if isinstance(m, nn.Embedding | _ConvNd)
    }
    heights = [len(p) for p in others if p.ndim == 2]  # of the embeddings
    heads = [p for p in named.values() if p.ndim == 2 and len(p) in heights]
    others.update(heads[-1:])
    chosen = {name for name, p in named.items() if p.ndim in (2, 3) and p not in others}
    for pattern in (*to_adamw, *to_muon):
        names = fnmatch.filter(named, pattern)
        if not names:
            raise ValueError(
                f"groups_of: {pattern!r} matches no parameter that requires a "
                "gradient; named_parameters() lists the names"
            )
        if pattern in to_muon:
            chosen.update(names)
        else:
            chosen.difference_update(names)
    groups = (
        dict(use_muon=True),
        dict(use_muon=False, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps),
    )
    for param_group in groups:
        param_group["params"] = [
            item
            for item in named.items()
            if (item[0] in chosen) == param_group["use_muon"]
        ]
    return [param_group for param_group in groups if param_group["params"]]
