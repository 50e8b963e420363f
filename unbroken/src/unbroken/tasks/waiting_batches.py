"""Batches that wait, and are counted together."""

from collections.abc import Callable

import torch
from torch import Tensor

# The most batches, and the most output values, that wait. Both bound the memory: log steps may be
# far apart, and the outputs of a network may be large.
MOST_BATCHES = 64
MOST_OUTPUTS = 2**22
# How a checkpoint's entries begin that hold what waits, and how many rows each batch has of it.
VALUES = "waiting."
ROWS = "waiting rows."


class WaitingBatches:
    """Batches that wait, and are counted together.

    A metric's update costs as much for 64 batches as for one, and one update per batch, 938 in an
    epoch of the MLP, would take a tenth of its time.

    Which batches are counted together must not depend on when a run is saved: a metric may count
    its updates, or draw a random number in each, and floats are rounded as they are added. So a
    checkpoint holds the batches that wait.

    Args:
        count: Is given the tensors of all batches that wait, joined, by the names that
            :meth:`add` was given.
    """

    def __init__(self, count: Callable[..., None]) -> None:
        self._count = count
        self._batches: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, outputs: Tensor, **others: Tensor) -> None:
        """Let a batch wait, and count all that wait where they are many.

        Args:
            outputs: Of the network, (batch, ...), without their graph.
            others: What else is counted of the batch, each with at least one dimension.
        """
        # Batches are joined to one tensor, so they must be of one shape. The last of an epoch may
        # be smaller.
        if self._batches and outputs.shape != self._batches[-1]["outputs"].shape:
            self.count()
        self._batches.append({"outputs": outputs, **others})
        is_long = len(self._batches) >= MOST_BATCHES
        is_large = len(self._batches) * outputs.numel() > MOST_OUTPUTS
        if is_long or is_large:
            self.count()

    @torch.no_grad()
    def count(self) -> None:
        """Count the batches that wait."""
        if self._batches:
            joined = self._joined()
            self.forget()
            self._count(**joined)

    def forget(self) -> None:
        """Let no batch wait."""
        self._batches = []

    def state(self) -> dict[str, Tensor]:
        """The batches that wait, on the CPU. Nothing is counted for it."""
        state = {}
        for name, values in self._joined().items():
            state[VALUES + name] = values.cpu()
            state[ROWS + name] = torch.tensor([len(batch[name]) for batch in self._batches])
        return state

    def load_state(self, state: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Let those batches wait that waited at :meth:`state`.

        Returns:
            The other entries of ``state``.
        """
        others = dict(state)
        names = [entry.removeprefix(ROWS) for entry in state if entry.startswith(ROWS)]
        columns = []
        for name in names:
            rows: list[int] = others.pop(ROWS + name).tolist()
            columns.append(others.pop(VALUES + name).to(device).split(rows))
        batches = zip(*columns, strict=True)
        self._batches = [dict(zip(names, batch, strict=True)) for batch in batches]
        return others

    def _joined(self) -> dict[str, Tensor]:
        """What waits, the tensors of each name as one."""
        names = self._batches[0] if self._batches else {}
        return {name: torch.cat([batch[name] for batch in self._batches]) for name in names}
