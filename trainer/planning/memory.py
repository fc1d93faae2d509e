"""Peak memory of one rank in a training step, in closed form, with its pieces and its moment. Imports no torch.

    step_peak(c, ranks=8)           # of resolved flags; Peak(nbytes, moment, pieces)

The peak is the highest level of the tape of schedule.py, on top of what every moment holds: parameters in fp32, Adam's
two moments, with several micro-batches the gradients of those before, and an allowance for cuBLAS.
"""

from trainer.planning.architecture import Architecture, reference
from trainer.planning.liveness import GRADIENTS, WEIGHTS, Peak
from trainer.planning.schedule import SIZE, Step, shard_group

CUBLAS_MIB = {"sm_80": 2 * 8.125, "sm_90": 2 * 32.0, "sm_100": 2 * 32.0}  # torch's workspaces of two threads
PARAMETERS, MOMENTS, ALLOWANCE = "parameters", "Adam's moments", "workspaces of cuBLAS, an allowance"


def before_step(c, a: Architecture, ranks: int, arch: str) -> dict[str, float]:
    """{piece: bytes} of what the last micro-batch finds."""
    own = a.parameters / shard_group(c, ranks)
    base = {PARAMETERS: 4 * own, MOMENTS: 2 * SIZE[c.adam_dtype] * own, ALLOWANCE: CUBLAS_MIB[arch] * 2**20}
    if whole(c, ranks):
        base |= {WEIGHTS: SIZE[c.param_dtype] * a.parameters}
        own = a.parameters
    return base | ({GRADIENTS: 4 * own} if c.grad_accum > 1 else {})


def whole(c, ranks: int) -> bool:
    """Whether the step gathers all weights once and reduces all gradients once."""
    return c.accum_sync == "last" and ranks > 1


def step_peak(c, ranks: int, a: Architecture | None = None, arch: str = "sm_90") -> Peak:
    """The highest level of a step of resolved flags on one of `ranks`, allowances included."""
    a = a or reference(c)
    return Step(c, a, ranks, whole(c, ranks)).tape.peak(before_step(c, a, ranks, arch))
