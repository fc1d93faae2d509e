"""FLOPs of any model by counting, and what share of a device's peak they are.

    with torch.device("meta"):
        model = Transformer(config)
    flops = count(model, seqlen=4096)          # of a token's training step: nothing is computed
    flops.causal                               # model FLOPs, the ruler of the rows' `mfu`
    mfu(flops.causal * tokens, seconds, peak)  # percent

torch's counter adds up the products of a forward on the meta device. A forward of T tokens costs a T + b T^2: the
products with weights, and attention of all tokens to all; two lengths give a and b exactly, whatever the attention is
made of. Backward multiplies twice what forward does. Everything is per token of one sequence.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.costs import causal_keys

LENGTH = 64  # tokens of the shorter forward; the other has twice as many


class Flops(NamedTuple):
    """Of one token's training step. `linear`: products with weights. `palm`: plus attention to all tokens of the
    sequence (arXiv 2204.02311, appendix B). `causal`: plus attention to those before it alone."""

    linear: int
    palm: float
    causal: float


def count(model: nn.Module, seqlen: int) -> Flops:
    """Of `model` on the meta device, called as step.LanguageModel says: model(tokens [B, T], targets [B, T])."""

    def forward(length: int) -> int:
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens, tokens)
        return counter.get_total_flops()

    short, long = forward(LENGTH), forward(2 * LENGTH)
    pair = (long - 2 * short) / (2 * LENGTH**2)  # of a query with a key
    linear = round(3 * (short / LENGTH - pair * LENGTH))
    return Flops(linear, linear + 3 * pair * seqlen, linear + 3 * pair * causal_keys(seqlen))


def mfu(flops_per_step: float | None, seconds: float | None, peak: float | None) -> float | None:
    """Percent of `peak` (FLOP/s of one device) that `flops_per_step` (of one device) in `seconds` amount to."""
    return round(100 * flops_per_step / seconds / peak, 2) if flops_per_step and seconds and peak else None


def utilisation(flops: dict[str, float | None], seconds: float | None, peak: float | None) -> dict[str, float | None]:
    """`mfu` of the three conventions, None where unknown. `flops` of one step on one device: `causal`, `palm`, and
    `hardware` with everything that is multiplied again."""
    kinds = (("mfu", "causal"), ("mfu_palm", "palm"), ("hfu", "hardware"))
    return {key: mfu(flops.get(kind), seconds, peak) for key, kind in kinds}
