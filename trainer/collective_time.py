"""The time of a collective on a link between GPUs, by formula. Imports no torch.

    link("h100-nvlink").seconds("all_gather", nbytes=2**28, ranks=8)         # 6.55e-4

Bandwidths are what collectives reached on such links, bytes a rank sends per second; the latency of 20 us per
collective is an assumption. A ring without contention: no topology, no stragglers, every group has the whole link.
"""

import json
import os
import re
from typing import NamedTuple

LATENCY_US = 20.0
NAMED_GB_PER_S = {
    "a100-nvlink": 300.0,
    "h100-nvlink": 370.0,  # also H200
    "ndr-ib": 50.0,  # one NDR port per GPU, as a DGX H100 has them: eight a node
    "hdr-ib": 25.0,  # one HDR port per GPU, as a DGX A100 has them
    "4090-pcie": 1.73,  # 8 cards that reach each other through the host
}


class Link(NamedTuple):
    latency_s: float  # per collective
    bytes_per_s: float  # per rank, or per port of a node
    ports: int = 0  # of a node; 0: one per rank

    def seconds(self, op: str, nbytes: float, ranks: int) -> float:
        """Modelled time of a collective over `ranks`; `nbytes` of the whole, unsharded tensor."""
        if ranks == 1 or self.bytes_per_s == float("inf"):
            return 0.0
        return self.latency_s + sent_bytes(op, nbytes, ranks) / self.bytes_per_s


def sent_bytes(op: str, nbytes: float, ranks: int) -> float:
    """Bytes that one rank of a ring sends: S (N-1)/N to gather or scatter S bytes, twice that to all-reduce them. Of an
    all-to-all nbytes are those of one rank, all of which it sends but what is for itself."""
    share = (ranks - 1) / ranks
    parts = dict(
        all_gather=share, reduce_scatter=share, all_to_all=share, all_reduce=2 * share, barrier=0.0
    )
    return nbytes * parts.get(op, 1.0)


def measured(text: str) -> str:
    """Of "measured:FILE" the link that lab.studies.collectives fitted, the last of its rows, as "alpha_us:GB_per_s";
    any other text as it is. ValueError, one line: no such file, or no link in it."""
    kind, _, file = text.partition(":")
    if kind != "measured":
        return text
    fix = "python -m lab.studies.collectives --results FILE writes one"
    if os.path.exists(file) and not os.path.isfile(file):  # it might be read for ever
        raise ValueError(f"--link {text}: is a pipe or device; {fix}")
    try:
        with open(file) as rows:
            links = [
                row["link"] for row in map(json.loads, rows) if isinstance(row.get("link"), dict)
            ]
        return f"{links[-1]['alpha_us']:.3f}:{links[-1]['gb_per_s']:.6f}"
    except OSError as error:
        raise ValueError(f"--link {text}: {error.strerror}; {fix}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        # Also a link whose bandwidth was not seen.
        raise ValueError(f"--link {text}: no line of it has a fitted link; {fix}") from None


def link(text: str, ports: bool = False) -> Link:
    """A named link, "none" (takes no time), "alpha_us:GB_per_s", or "measured:FILE" of rows of lab.studies.collectives.
    With `ports` also "alpha_us:8x50": so many ports of a node that its ranks share. ValueError, one line, for anything
    else."""
    text = measured(text)
    if text == "none":
        return Link(0.0, float("inf"))
    numbers = re.fullmatch(r"(\d+\.?\d*):(?:(\d+)x)?(\d+\.?\d*)", text)
    latency, many, bandwidth = (
        numbers.groups() if numbers else (LATENCY_US, None, NAMED_GB_PER_S.get(text, 0.0))
    )
    if float(bandwidth) > 0 and (many is None or ports and int(many)):
        return Link(float(latency) * 1e-6, float(bandwidth) * 1e9, int(many or 0))
    raise ValueError(
        f"--link {text}: must be {', '.join(NAMED_GB_PER_S)}, none, alpha_us:GB_per_s such as 20:370, or "
        "measured:FILE"
    )
