"""FLOPs of a model by counting, and what share of a device's peak they are.

    with torch.device("meta"):
        flops = count(Transformer(config), seqlen=4096)     # of a token's training step; nothing is computed
    flops.causal                                            # model FLOPs, the ruler of the rows' `mfu`

A pass over T tokens costs a T + b T^2: the products with weights, and attention of all tokens to all. Two lengths give
a and b exactly, and a third must lie on the curve. Backward multiplies twice what forward does; where parameters are
frozen it is counted, too, for it multiplies less. A mask is not looked into: attention within a window counts as
attention to all.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.config import Config
from trainer.step_costs import causal_keys, flops_per_token


class Flops(NamedTuple):
    """Of one token's training step. `linear`: products with weights. `palm`: plus attention to all tokens of the
    sequence (arXiv 2204.02311, appendix B). `causal`: plus attention to those before it alone."""

    linear: float
    palm: float
    causal: float


def count(model: nn.Module, seqlen: int) -> Flops:
    """Of `model` on the meta device, called as model(tokens [B, T], targets [B, T]). ValueError, in one line, for a
    model that does not run on meta, or whose cost has another form (attention in blocks or windows, weights made by
    products)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = len(trained) < len([*model.parameters()])

    def step(length: int) -> int:
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(frozen):
            loss = model(tokens, tokens)
            if frozen:
                torch.autograd.grad(loss, trained, allow_unused=True)
        return counter.get_total_flops() * (1 if frozen else 3)

    short, middle, long = lengths = (
        (1, 2, 3) if seqlen < 3 else (seqlen // 3, 2 * seqlen // 3, seqlen)
    )
    try:
        # Each a + b T.
        a_short, a_middle, a_long = (Fraction(step(length), length) for length in lengths)
    except Exception as error:  # whatever the model's code meets where there are no values
        raise ValueError(
            f"it does not run on meta: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    pair = (a_long - a_short) / (long - short)  # of a query with a key
    weights = a_long - pair * long
    if weights + pair * middle != a_middle or weights < 0 or pair < 0:
        raise ValueError(
            f"its passes over {short}, {middle} and {long} tokens do not cost a T + b T^2"
        )
    linear = float(weights)
    pair = float(pair)
    return Flops(linear, linear + pair * seqlen, linear + pair * causal_keys(seqlen))


def of_step(config: Config, model: nn.Module | None) -> tuple[dict[str, float], str]:
    """FLOPs of one step on one rank by convention, or none and why: "palm", "causal" and, where its formula holds,
    "hardware": not for the math kernel, nor where eager does a lean MLP in a recomputed block once more. model: on
    meta; None where batches differ."""
    if model is None:
        return {}, "FLOPs are not counted, MFU and tok/s are n/a: batches differ in length"
    try:
        counted = count(model, config.seqlen)
    except ValueError as error:
        return {}, f"FLOPs are not counted, MFU is n/a: {error}"
    per_token = dict(causal=counted.causal, palm=counted.palm)
    shape = getattr(model, "config", None)
    odd = (
        shape is None
        or shape.sdpa == "math"
        or (config.mlp, config.remat, config.compile) == ("lean", "block", "none")
    )
    if not odd and counted.causal == flops_per_token(shape, config.seqlen):
        per_token["hardware"] = flops_per_token(shape, config.seqlen, "hardware")
    tokens = config.batch * config.grad_accum * config.seqlen
    return {kind: flops * tokens for kind, flops in per_token.items()}, ""


def utilisation(
    flops: dict[str, float | None], seconds: float | None, peak: float | None
) -> dict[str, float | None]:
    """Percent of `peak` (FLOP/s) that a step of `seconds` and `flops`, of one device each, reaches; None if unknown."""
    known = {kind: n for kind, n in flops.items() if n and seconds and peak}
    kinds = dict(mfu="causal", mfu_palm="palm", hfu="hardware")
    return {
        key: round(100 * known[kind] / seconds / peak, 2) if kind in known else None
        for key, kind in kinds.items()
    }
