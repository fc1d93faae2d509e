"""Links between ranks: how long a collective takes on one. Imports no torch.

    link("h100-nvlink").seconds("all_gather", nbytes=2**28, ranks=8)      # 6.55e-4
    link("20:370")                                                        # 20 us and 370 GB/s, the same

Bandwidths are what collectives reached on such links, bytes a rank sends per second; the latency of 20 us per
collective is an assumption. A ring without contention: no topology, no stragglers, every group has the whole link.
"""

import re
from dataclasses import dataclass

LATENCY_US = 20.0
NAMED_GB_PER_S = {
    "a100-nvlink": 300.0,
    "h100-nvlink": 370.0,  # also H200
    "ndr-ib": 50.0,  # one NDR port per GPU
    "4090-pcie": 1.73,  # 8 cards that reach each other through the host
}


@dataclass(frozen=True)
class Link:
    """`name` as it was asked for; seconds per collective and bytes per second and rank."""

    name: str
    latency_s: float
    bytes_per_s: float

    def seconds(self, op: str, nbytes: float, ranks: int) -> float:
        """Modelled time of a collective over `ranks`; `nbytes` of the whole, unsharded tensor."""
        if ranks == 1 or self.bytes_per_s == float("inf"):
            return 0.0
        return self.latency_s + sent_bytes(op, nbytes, ranks) / self.bytes_per_s


def sent_bytes(op: str, nbytes: float, ranks: int) -> float:
    """Bytes that one rank of a ring sends: S (N-1)/N to gather or to scatter a tensor of S bytes, twice that to
    all-reduce it, all of it to broadcast it."""
    share = (ranks - 1) / ranks
    return nbytes * {"all_gather": share, "reduce_scatter": share, "all_reduce": 2 * share, "barrier": 0.0}.get(op, 1.0)


def link(text: str) -> Link:
    """A named link, "none" (takes no time), or "alpha_us:GB_per_s". ValueError, one line, for anything else."""
    if text == "none":
        return Link(text, 0.0, float("inf"))
    if text in NAMED_GB_PER_S:
        return Link(text, LATENCY_US * 1e-6, NAMED_GB_PER_S[text] * 1e9)
    if found := re.fullmatch(r"(\d+\.?\d*):(\d+\.?\d*)", text):
        latency, bandwidth = map(float, found.groups())
        if bandwidth > 0:
            return Link(text, latency * 1e-6, bandwidth * 1e9)
    raise ValueError(f"--link {text}: must be {', '.join(NAMED_GB_PER_S)}, none, or alpha_us:GB_per_s such as 20:370")


# Dense bf16 FLOP/s by the whole device name: a MIG slice, an RTX 4090 D, an H200 NVL or a GH200 has another peak than
# the name that it contains. A device that is not listed has no MFU.
PEAKS = {
    r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe": 312e12,
    r"H100 80GB HBM3|H200": 989e12,  # both SXM
    r"H100 PCIe": 756e12, r"H100 NVL": 835e12,
    r"GeForce RTX 4090": 165e12,  # fp32 accumulate
}


def device_peak(name: str) -> float | None:
    """Dense bf16 FLOP/s of a device named as `torch.cuda.get_device_name` names it; None where it is not known."""
    return next((flops for names, flops in PEAKS.items() if re.fullmatch(f"(NVIDIA )?({names})", name)), None)
