"""`--cuda-graph`: a whole training step as one CUDA graph, replayed without Python.

    step = Replayed(step)             # the first calls run it as it is; then it is captured, then replayed
    loss = step(tokens, targets)      # shapes may not change; lr and the step count live on the device
    step.peak_mib                     # of the capture: a replay allocates nothing, so the allocator no longer tells
    step.close()                      # before the process group ends: NCCL waits for graphs that hold its collectives

What the eager steps left in the allocator's cache is given back before the capture, whose memory is a pool of its own:
together they would otherwise be twice the step's peak.
"""

import gc

import torch
from torch import Tensor

WARM = 2  # steps that run as they are: they compile, and start cuBLAS, cuDNN and NCCL


class Replayed:
    """Stands in for a `trainer.step.Step`, whose attributes it has."""

    def __init__(self, step):
        self.step, self.calls, self.graph, self.peak_mib = step, 0, None, None

    def __getattr__(self, name: str):
        return getattr(self.__dict__["step"], name)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [B, T] -> fp32 scalar, which the next call overwrites."""
        self.calls += 1
        if self.calls <= WARM:
            return self.step(tokens, targets)
        if self.graph is None:
            self._capture(tokens, targets)
        for own, new in zip(self.inputs, (tokens, targets), strict=True):
            if own.shape != new.shape:
                raise ValueError(f"--cuda-graph: captured for a batch {[*own.shape]}, got {[*new.shape]}")
            own.copy_(new)
        self.graph.replay()
        return self.loss

    def _capture(self, tokens: Tensor, targets: Tensor) -> None:
        """Records the step without running it."""
        self.inputs = tokens.clone(), targets.clone()
        self.step.grad_norm = self.step.bad = None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = self.step(*self.inputs)
        self.graph, self.peak_mib = graph, round(torch.cuda.max_memory_allocated() / 2**20, 1)

    def close(self) -> None:
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph.reset()
