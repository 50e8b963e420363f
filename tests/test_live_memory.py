from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from project.live_memory import LiveMemory


def test_live_memory_counts_each_tensor_from_birth_to_death_and_raises_at_the_limit() -> None:
    memory = LiveMemory()
    with memory:
        before = torch.zeros(1000)  # 4,000 bytes
        view = before.view(10, 100)[:5]
        view.add_(1)
        assert (memory.live_bytes, memory.peak_bytes) == (4000, 4000)
        after = before * 2
        assert memory.live_bytes == 8000
        del before, view
        assert (memory.live_bytes, memory.peak_bytes) == (4000, 8000)
    del after
    assert memory.live_bytes == 0
    with pytest.raises(torch.OutOfMemoryError), LiveMemory(limit_bytes=3999):
        torch.zeros(1000)
    with LiveMemory(limit_bytes=4000):
        torch.zeros(1000)


def test_live_memory_counts_what_backward_and_the_optimizer_hold() -> None:
    network = nn.Linear(100, 100, bias=False)  # 40,000 bytes
    optimizer = torch.optim.AdamW(network.parameters())
    memory = LiveMemory()
    with memory:
        memory.count(network.parameters())
        assert memory.live_bytes == 40_000
        network(torch.zeros(1, 100)).sum().backward()
        gc.collect()
        assert 80_000 <= memory.live_bytes < 81_000  # and gradients
        optimizer.step()
        assert 160_000 <= memory.live_bytes < 162_000  # and two moments
