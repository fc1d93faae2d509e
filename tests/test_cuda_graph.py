"""trainer.step.CudaGraphStep: what runs when, with a stand-in for CUDA's graphs; the real are in tests/test_gpu.py."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from trainer.step import CUDA_GRAPH_WARMUP as WARM
from trainer.step import CudaGraphStep


class Graph:
    """Replays the function that ran while it was captured."""

    capturing = None

    def __init__(self):
        self.calls = []
        self.was_reset = False

    def replay(self):
        for function, args, out in self.calls:
            out.copy_(function(*args))

    def reset(self):
        self.was_reset = True


@contextmanager
def capture(graph):
    Graph.capturing = graph
    yield
    Graph.capturing = None


@pytest.fixture
def step(monkeypatch):
    for name, value in dict(CUDAGraph=Graph, graph=capture, synchronize=lambda: None, empty_cache=lambda: None,
                            reset_peak_memory_stats=lambda: None,
                            max_memory_allocated=lambda: 3 * 2**20).items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)

    class Step:
        grad_norm = None
        eager = 0
        optimizer = SimpleNamespace(lr=torch.tensor(0.5))

        def __call__(self, tokens, targets):
            compute = lambda x, y: (x * self.optimizer.lr + y).sum()  # noqa: E731
            out = compute(tokens, targets)
            if Graph.capturing is None:
                self.eager += 1
            else:
                Graph.capturing.calls.append((compute, (tokens, targets), out))
            return out

    return Step()


def test_two_steps_run_as_they_are_then_one_is_captured_and_all_later_ones_are_replayed(step):
    replayed = CudaGraphStep(step)
    for k in range(6):
        step.optimizer.lr.fill_(k)
        x = torch.full((2, 3), 1.0 + k)
        y = torch.full((2, 3), 10.0 * k)
        assert replayed(x, y).item() == 6 * ((1 + k) * k + 10 * k), k
        assert step.eager == min(k + 1, WARM)
        assert (replayed.graph is None) == (k < WARM)
    assert len(replayed.graph.calls) == 1
    assert replayed.peak_mib == 3.0
    assert step.grad_norm is None
    replayed.close()
    assert replayed.graph.was_reset


def test_another_shape_is_an_error_that_names_both(step):
    replayed = CudaGraphStep(step)
    for _ in range(WARM + 1):
        replayed(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"--cuda-graph: captured for a batch \[2, 3\], got \[1, 3\]"):
        replayed(torch.ones(1, 3), torch.ones(1, 3))


def test_closing_what_was_never_captured_does_nothing(step):
    CudaGraphStep(step).close()
