"""Which operations of PyTorch a step consists of, and what came out of each.

Two runs that have the same weights, random numbers and samples before a step, and others after it,
have computed something differently. Their operations are compared in their order, and the first
that differs is named, with the module in which it ran.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.module_tracker import ModuleTracker
from unbroken.lightning_internals import operations_in
from unbroken.verifying.digests import bytes_of, digest_of

# What comes out of these is not written yet.
UNWRITTEN = "empty"


class Operation(NamedTuple):
    """An operation of a step.

    Attributes:
        module: The path of the innermost module whose ``forward`` was running, such as ``net.0``.
            Empty: there was none, as in the backward pass and in an optimizer.
        name: That of PyTorch, such as ``aten.addmm.default``.
        is_backward: Whether gradients were computed.
        digest: Of the tensors that came out of it.
    """

    module: str
    name: str
    is_backward: bool
    digest: str

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        if self.is_backward:
            return f"{self.name} in the backward pass"
        return f"{self.name} in {self.module}" if self.module else f"{self.name} outside of modules"


class Operations:
    """Notes the operations that run between :meth:`begin` and :meth:`end`. It changes nothing of
    them.

    PyTorch's own ``DebugMode`` has hashes as well, but what it notes is a text for people, and its
    hash is a sum that does not see an order.

    Args:
        module: The trained module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.found: list[Operation] = []
        self._names = {id(each): name for name, each in module.named_modules()}
        self._running: list[str] = []
        # It tells whether gradients are computed.
        self._tracker = ModuleTracker()
        self._entered = ExitStack()

    def begin(self) -> None:
        """Note every operation from now on."""
        begins = register_module_forward_pre_hook(self._forward_begins)
        ends = register_module_forward_hook(self._forward_ends, always_call=True)
        for hook in (begins, ends):
            self._entered.callback(hook.remove)
        self._entered.enter_context(self._tracker)
        self._entered.enter_context(operations_in(self._act))

    def end(self) -> None:
        """Note nothing more."""
        self._entered.close()

    def _forward_begins(self, module: nn.Module, inputs: Any) -> None:
        self._running.append(self._names.get(id(module), type(module).__name__))

    def _forward_ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running.pop()

    def _act(self, operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        made = operation(*arguments, **named)
        if UNWRITTEN not in str(operation):
            tensors = made if isinstance(made, (list, tuple)) else [made]
            parts = [bytes_of(each) for each in tensors if is_dense(each)]
            place = self._running[-1] if self._running else ""
            digest = digest_of(*parts)
            self.found.append(Operation(place, str(operation), self._tracker.is_bw, digest))
        return made


def is_dense(value: Any) -> bool:
    """Whether a value is a tensor whose bytes can be read."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def write_operations(found: list[Operation], path: Path) -> None:
    """Write the operations of a step for :func:`read_operations`."""
    path.write_text(json.dumps(found), encoding="utf-8")


def read_operations(path: Path) -> list[Operation]:
    """The operations of a step; none where nothing was written."""
    if not path.exists():
        return []
    return [Operation(*each) for each in json.loads(path.read_text(encoding="utf-8"))]


def first_difference(one: list[Operation], other: list[Operation]) -> str | None:
    """Which operation differs first, in words. None: none does."""
    for mine, theirs in zip(one, other, strict=False):
        if mine[:3] != theirs[:3]:
            return f"{mine.words} in the one run and {theirs.words} in the other"
        if mine != theirs:
            return f"{mine.words}, with the same operations and results before it"
    if len(one) != len(other):
        return f"the number of operations, {len(one)} and {len(other)}"
    return None
