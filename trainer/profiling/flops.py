"""FLOPs of any model by counting, and what share of a device's peak they are.

    with torch.device("meta"):
        model = Transformer(config)
    flops = count(model, seqlen=4096)          # of a token's training step: nothing is computed
    flops.causal                               # model FLOPs, the ruler of the rows' `mfu`

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


def utilisation(flops: dict[str, float | None], seconds: float | None, peak: float | None) -> dict[str, float | None]:
    """Percent of `peak` (FLOP/s of one device) that a step of `seconds` reaches, None if unknown. `flops` of one step
    on one device: `causal`, `palm`, and `hardware` with everything that is multiplied again."""
    known = {kind: n for kind, n in flops.items() if n and seconds and peak}
    kinds = dict(mfu="causal", mfu_palm="palm", hfu="hardware")
    return {key: round(100 * known[kind] / seconds / peak, 2) if kind in known else None for key, kind in kinds.items()}
