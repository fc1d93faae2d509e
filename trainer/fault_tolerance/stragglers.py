"""Which rank is slower than the others, by the CPU time of its steps: all ranks wait for it in every collective.

    stragglers = Stragglers()
    line = stragglers.add([0.31, 0.30, 0.45, 0.31], step=7)     # seconds of a step by rank; a line for people, or None
    stragglers.ratio            # after WINDOW such steps 1.45: of the slowest rank to the median of the others

The times are those of the main thread (time.thread_time), which does not run while it waits in a collective. They come
with the exchange that the ranks make at each boundary anyway (trainer/distributed/control.py). A core that is slow,
throttled or crowded by memory traffic shows in them, as does a slow host of GPUs; a GPU that is slow by itself does
not.
"""

from statistics import median

WINDOW = 20  # steps, of which each rank has its median: one slow step (a compilation, a save) names nobody
RATIO = 1.2
LEAST_S = 0.002  # more than the others take: what is shorter is noise


class Stragglers:
    """Of one run, on one rank; each rank comes to the same result."""

    def __init__(self):
        self.steps: list[list[float]] = []
        self.ratio: float | None = None
        self.named: set[int] = set()
        self.step = 0  # the newest that counts

    def add(self, seconds: list[float], step: int) -> str | None:
        """The line for people where a rank is found that was not named before. seconds: by rank; a step in which a rank
        has no time is left out. A step counts once: each pause of an evaluation tells of the step before it again."""
        if len(seconds) < 2 or not all(seconds) or step <= self.step:
            return None
        self.step = step
        self.steps.append(seconds)
        if len(self.steps) < WINDOW:
            return None
        typical = [median(times) for times in zip(*self.steps, strict=True)]
        self.steps.clear()
        slowest = max(range(len(typical)), key=typical.__getitem__)
        others = median(typical[:slowest] + typical[slowest + 1 :])
        self.ratio = typical[slowest] / others
        excess = typical[slowest] - others
        if self.ratio < RATIO or excess < LEAST_S or slowest in self.named:
            return None
        self.named.add(slowest)
        return (
            f"note: rank {slowest} is slow: its steps take {self.ratio:.2f} times the CPU time of "
            f"the other ranks' median ({WINDOW} steps)"
        )
