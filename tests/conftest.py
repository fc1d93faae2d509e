"""Fixtures of several files."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import model


@pytest.fixture(scope="module")
def one_thread():
    """Small shapes, and sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """FlexAttention that trains on a CPU: torch's dense stand-in, without the private check that refuses it."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(model, "compiled_flex_attention", flex.flex_attention)
