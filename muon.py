"""Muon for sharded matrices: torch.optim.Muon's update, each matrix computed by one rank. Imports only torch: copy it.

    from muon import Muon, groups_of
    groups = groups_of(model, lr=3e-4)         # after data_parallel, fully_shard or DDP; lr: AdamW's
    optimizer = Muon(groups, lr=0.02)          # then backward(), step(), zero_grad() as of any optimizer

torch.optim.Muon on sharded parameters gathers each matrix on every rank, and every rank does the same products. Here a
matrix has one owner. An all-to-all brings its shards there, the owner runs the Newton-Schulz iteration, an all-to-all
brings the result back. Matrices of one shape travel together and are iterated as one batch, while those of the next
shape are on their way. Owners have about equal FLOPs. Replicas (hybrid_shard, DDP) share the matrices. Experts
[E, m, n] that are sharded over E stay where they are. AdamW updates what is no matrix of a hidden layer.

All ranks must call `step` with gradients of the same parameters. Q, K and V that are stacked in one parameter are one
matrix here. Of little use for a model that AdamW has pretrained. Sources: Keller Jordan's Muon
(kellerjordan.github.io/posts/muon); arXiv:2502.16982 for "match_rms_adamw".

m, n rows and columns of a matrix; K matrices of one shape, k of them owned by this rank; N ranks, S of which hold the
shards of a copy.
"""

import fnmatch
import os
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, group
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad
from torch.optim.adamw import adamw

COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of the quintic polynomial, as in torch.optim.Muon
ADAMW = dict(lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
_c10d = torch.ops._c10d_functional


class Layout(NamedTuple):
    """What alike parameters have in common. shape: [.., m, n]. shards: into how many their rows are cut. ranks: how
    many share the work, in the process group `group`. me: which of them this one is."""

    shape: torch.Size
    shards: int = 1
    group: str = ""
    ranks: int = 1
    me: int = 0


def local(t: Tensor) -> Tensor:
    """What this rank holds of a DTensor; a plain tensor itself."""
    return t.to_local() if isinstance(t, DTensor) else t


def _as(t: Tensor, like: Tensor) -> Tensor:
    return t.redistribute(placements=like.placements) if isinstance(t, DTensor) else t


def layout_of(p: Tensor, replicas: DeviceMesh | None = None) -> Layout:
    """Of a parameter. replicas: see Muon. ValueError, one line, for one that is no matrix or that no rank can own."""
    mesh, others, last = replicas, [], Replicate()
    if isinstance(p, DTensor):
        mesh = p.device_mesh
        *others, last = p.placements
    if p.is_cuda:
        memory = torch.cuda.get_device_properties(p.device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needs = (
        8 * p.shape[-2:].numel()
    )  # the matrix, two products and the result, in bf16
    placed = last in (Replicate(), Shard(0), Shard(p.ndim - 2))
    placed = placed and all(each == Replicate() for each in others)
    expected = {
        "a real matrix [m, n] or [E, m, n]": p.ndim in (2, 3)
        and not p.is_complex(),
        "placements Replicate, the last one Shard of rows or experts": placed,
        f"at most {memory} bytes on its owner, not {needs}": needs <= memory,
    }
    for what, is_so in expected.items():
        if not is_so:
            raise ValueError(
                f"Muon: {p.dtype} {[*p.shape]}: expected {what}; leave it to AdamW (groups_of: to_adamw)"
            )
    cut = last.is_shard(p.ndim - 2)
    if (
        mesh is None or last.is_shard() and not cut
    ):  # each rank has matrices of its own
        return Layout(local(p).shape)
    ranks = mesh.get_group() if mesh.ndim == 1 else group.WORLD
    if ranks.size() != mesh.size():
        raise ValueError(
            f"Muon: {mesh}: expected one dimension, or all {ranks.size()} ranks"
        )
    return Layout(
        p.shape,
        mesh.size(-1) if cut else 1,
        ranks.group_name,
        ranks.size(),
        ranks.rank(),
    )


def plan(layouts: list[Layout]) -> list[tuple[Layout, tuple, tuple]]:
    """Sets of alike parameters, the costliest first: layout, the ranks that own them, their positions in the list. Each
    goes to the rank that has the fewest FLOPs so far."""
    alike, loads = defaultdict(list), defaultdict(Counter)
    for position, layout in enumerate(layouts):
        alike[layout].append(position)
    sets = []
    for layout in sorted(alike, key=_cost, reverse=True):
        load = loads[layout.group]
        pairs = []
        for position in alike[layout]:
            owner = min(range(layout.ranks), key=load.__getitem__)
            load[owner] += _cost(layout)
            pairs.append((owner, position))
        sets.append((layout, *zip(*sorted(pairs), strict=True)))
    return sets


def _cost(layout: Layout) -> float:
    """In proportion to the FLOPs of the iteration, 4 s s l + 2 s s s a step for sides s <= l."""
    small, large = sorted(layout.shape[-2:])
    return layout.shape.numel() * small * (2 + small / large)


def newton_schulz(x: Tensor, coefficients: tuple, steps: int, eps: float) -> Tensor:
    """[K, m, n] -> about U V' of each matrix U S V', in the dtype of x: singular values of 0.7 to 1.2."""
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


def orthogonalized(layout: Layout, owners: tuple, updates: list[Tensor], *how):
    """Local shards of alike parameters, in the order of their owners -> them made orthogonal, stacked. A generator,
    which yields None while a collective runs."""
    shape, S, group_name, N, me = layout
    E, (m, n) = shape[:-2].numel(), shape[-2:]
    rows = -(-m // S)  # of a shard; smaller ones are padded
    counts = [owners.count(rank) for rank in range(N)]
    k = counts[me]
    # The ranks that hold the same copy of the parameters as this one exchange shards.
    near = [rank // S == me // S for rank in range(N)]
    sent = [count * each for count, each in zip(counts, near, strict=True)]
    received = [k * each for each in near]
    own = [t.reshape(E, t.shape[-2], n).transpose(0, 1) for t in updates]
    padded = [pad(t, (0, 0, 0, 0, 0, rows - len(t))) for t in own]
    x = torch.stack(padded)  # [K, rows, E, n]
    x = x[sum(counts[: near.index(True)]) :][: sum(sent)]
    if S > 1:
        x = _c10d.all_to_all_single(x, received, sent, group_name)
        yield
        x = _c10d.wait_tensor(x)  # [S k, rows, E, n]
    x = x.unflatten(0, (S, k)).transpose(0, 1).flatten(1, 2)[:, :m]  # [k, m, E, n]
    x = newton_schulz(x.transpose(1, 2).flatten(0, 1), *how)
    x = x.unflatten(0, (k, E)).transpose(1, 2)
    x = pad(x, (0, 0, 0, 0, 0, S * rows - m))
    x = x.unflatten(1, (S, rows)).transpose(0, 1).flatten(0, 1)  # [S k, rows, E, n]
    if N > 1:
        x = x.repeat(N // S, 1, 1, 1)
        x = _c10d.all_to_all_single(x, counts, [k] * N, group_name)
        yield
        x = _c10d.wait_tensor(x)  # [K, rows, E, n]
    yield [t[: len(like)].transpose(0, 1) for t, like in zip(x, own, strict=True)]


@torch.no_grad()
def muon(
    sets,
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    /,
    *,
    lr,
    weight_decay,
    momentum,
    nesterov,
    ns_coefficients,
    eps,
    ns_steps,
    adjust_lr_fn,
    ns_dtype,
    refused=None,
    **others,
) -> None:
    """Updates local shards in place, for the `plan` of their parameters. Compiles. momenta: alike, in any dtype.
    refused: a boolean scalar; where it is True all stays as it is, to the bit. The others are those of Muon."""
    works = []
    for layout, owners, members in sets:
        updates = []
        for i in members:
            mean = momenta[i].to(grads[i].dtype).lerp(grads[i], 1 - momentum)
            _write(momenta[i], mean, refused)
            update = grads[i].lerp(mean, momentum) if nesterov else mean
            updates.append(update.to(ns_dtype))
        works.append(
            orthogonalized(layout, owners, updates, ns_coefficients, ns_steps, eps)
        )
    found = [None] * len(works)
    # All sets in turn: while one communicates another one computes.
    while None in found:
        for j, work in enumerate(works):
            found[j] = next(work) if found[j] is None else found[j]
    for (layout, _, members), updates in zip(sets, found, strict=True):
        m, n = layout.shape[-2:]
        ratio = max(1, m / n) ** 0.5
        if adjust_lr_fn == "match_rms_adamw":
            ratio = 0.2 * max(m, n) ** 0.5
        for i, update in zip(members, updates, strict=True):
            update = update.reshape(params[i].shape).float() * (lr * ratio)
            decayed = params[i] * (1 - lr * weight_decay)
            _write(params[i], decayed - update, refused)


def _write(t: Tensor, value: Tensor, refused: Tensor | None) -> None:
    t.copy_(value if refused is None else torch.where(refused, t, value))


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon, names and semantics, for plain tensors and for DTensors whose last placement may be a Shard.

    params: as of any optimizer; a group with use_muon=False has the hyperparameters of AdamW, as `groups_of` makes it.
    adjust_lr_fn: "original" or "match_rms_adamw", which suits AdamW's lr and weight decay. ns_dtype: of the iteration.
    replicas: a 1-D mesh whose ranks all hold the same plain tensors and gradients, as under DDP: they share the work.
    ValueError, one line, for what it cannot update."""

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
        replicas: DeviceMesh | None = None,
    ):
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"Muon: adjust_lr_fn {adjust_lr_fn}: must be original or match_rms_adamw"
            )
        defaults = dict(
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
        )
        super().__init__(params, defaults)
        self.replicas = replicas
        for each in self.param_groups:
            if each["use_muon"]:
                self._plan(each["params"])

    def _plan(self, params: list[Tensor]) -> list[tuple]:
        return plan([layout_of(p, self.replicas) for p in params])

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient; returns what `closure`, if given, returns."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for each in self.param_groups:
            params = [p for p in each["params"] if p.grad is not None]
            shards = [local(p) for p in params]
            grads = [local(_as(p.grad, p)) for p in params]
            if each["use_muon"]:
                (momenta,) = self._states(params, "momentum_buffer")
                muon(self._plan(params), shards, grads, momenta, **each)
            elif params:
                beta1, beta2 = each["betas"]
                means, squares, steps = self._states(
                    params, "exp_avg", "exp_avg_sq", "step"
                )
                adamw(
                    shards,
                    grads,
                    means,
                    squares,
                    [],
                    steps,
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=each["lr"],
                    weight_decay=each["weight_decay"],
                    eps=each["eps"],
                    maximize=False,
                )
        return loss

    def _states(self, params: list[Tensor], *names: str) -> list[list[Tensor]]:
        """Of each name the local shards of that state, which begins at zero."""
        for p in params:
            for name in names:
                if name not in self.state[p]:
                    self.state[p][name] = (
                        torch.zeros(()) if name == "step" else torch.zeros_like(p)
                    )
        return [[local(self.state[p][name]) for p in params] for name in names]


def groups_of(model: nn.Module, to_adamw=(), to_muon=(), **of_adamw) -> list[dict]:
    """Groups for `Muon`, which hold the names of their parameters. Frozen ones are in none.

    Matrices [m, n] and [E, m, n] go to Muon. To AdamW go vectors, embeddings, kernels of convolutions, and the output
    layer: the last matrix that has a row for each one of an embedding. to_adamw, to_muon: patterns of names, such as
    "*.router.weight", that overrule this. of_adamw: see ADAMW. ValueError for a pattern that matches no name."""
    if unknown := of_adamw.keys() - ADAMW.keys():
        raise ValueError(f"groups_of: {unknown}: expected {[*ADAMW]}")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    special = [
        each
        for each in model.modules()
        if isinstance(each, (nn.Embedding, nn.modules.conv._ConvNd))
    ]
    heights = [
        each.num_embeddings for each in special if isinstance(each, nn.Embedding)
    ]
    others = {each.weight for each in special}
    others.update(
        [p for p in named.values() if p.ndim == 2 and len(p) in heights][-1:]
    )
    chosen = {
        name for name, p in named.items() if p.ndim in (2, 3) and p not in others
    }
    for patterns, change in (
        (to_adamw, chosen.difference_update),
        (to_muon, chosen.update),
    ):
        for pattern in patterns:
            names = fnmatch.filter(named, pattern)
            if not names:
                raise ValueError(
                    f"groups_of: {pattern} matches no parameter that requires a gradient"
                )
            change(names)
    groups = [
        dict(use_muon=True),
        dict(use_muon=False) | ADAMW | of_adamw,
    ]
    for each in groups:
        each["params"] = [
            (name, p)
            for name, p in named.items()
            if (name in chosen) == each["use_muon"]
        ]
    return [each for each in groups if each["params"]]
