"""Tensors of every kind, in a module, its batches and its data: exact, or told, and never an error
of the library's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.utils.data import DataLoader, Dataset
from unbroken import ExactCheckpoint
from unbroken.errors import UserError

# Torch says so of many of these kinds.
pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecated)")

KILLED_AT = 5


class Killed(Exception):
    """In the place of a process that is killed."""


class Named(Tensor):
    """A class of the user's own."""


class Wrapped(Tensor):
    """One that has its numbers in another tensor, and does each operation itself."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*(getattr(each, "inner", each) for each in args), **(kwargs or {}))
        return cls(found) if isinstance(found, Tensor) else found


def quantized(values: Tensor) -> Tensor:
    return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)


def nested(values: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor([values, values[:1]], layout=layout)


def masked(values: Tensor) -> Any:
    return masked_tensor(values, torch.ones(values.shape, dtype=torch.bool))


def in_inference_mode(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return values * 1


def in_four_bits(values: Tensor) -> Tensor:
    return values.to(torch.uint8).view(torch.int4)


# How a kind is made of a dense tensor, and a number for what it holds
MAKE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "of a class of one's own": (lambda values: values.as_subclass(Named), lambda held: held.sum()),
    "wrapped": (Wrapped, lambda held: held.inner.sum()),
    "masked": (masked, lambda held: held.get_data().sum()),
    "nested": (nested, lambda held: held.unbind()[0].sum()),
    "jagged": (lambda values: nested(values, torch.jagged), lambda held: held.unbind()[0].sum()),
    "quantized": (quantized, lambda held: held.dequantize().sum()),
    "MKL-DNN": (lambda values: values.to_mkldnn(), lambda held: held.to_dense().sum()),
}


def dense(kind: str, held: Any) -> Tensor:
    return MAKE[kind][1](held).detach().as_subclass(Tensor).reshape(1).repeat(2) / 2


# What a module makes, by name, and what each of its steps does with it. It returns what the step's
# loss depends on.


def replaces(kind: str, attribute: str) -> Callable[[Any], Any]:
    """A step that puts another tensor of the kind in the place of the one before."""

    def step(module: Any) -> Any:
        now = dense(kind, getattr(module, attribute)) * 1.1
        setattr(module, attribute, MAKE[kind][0](now))
        return now.sum()

    return step


def adds(members: list[Any]) -> Callable[[Any], Any]:
    def step(module: Any) -> Any:
        module.held.add(members[module.done % len(members)])
        return len(module.held)

    return step


def counts_in_members(module: Any) -> Any:
    for each in module.held:
        each += 1
    return sum(module.held).sum()


def trains_leaf(module: Any) -> Any:
    """Trains a tensor that it keeps itself; before its third step it switches the gradient."""
    if module.held is None:
        module.held = torch.ones(2, requires_grad=True)
    if module.done == 2 and module.switched is not None:
        module.held.requires_grad_(module.switched)
    if module.held.grad is not None:
        module.held.data.sub_(0.1 * module.held.grad)
        module.held.grad = None
    return ((module.held - 3) ** 2).sum()


def makes_leaf_anew(module: Any) -> Any:
    gradient = module.held.grad if module.held.grad is not None else 1
    module.held = (module.held.detach() + 0.1 * gradient).requires_grad_()
    return (module.held.abs() ** 2).sum()


class Case:
    """One module of the tests.

    Args:
        make: Gives the module what it holds.
        step: What its steps do with it.
        is_told: Whether no checkpoint can hold it, which is then told.
        switched: What :func:`trains_leaf` sets ``requires_grad`` to.
    """

    def __init__(
        self,
        make: Callable[[Any], None],
        step: Callable[[Any], Any],
        is_told: bool = False,
        switched: bool | None = None,
    ) -> None:
        self.make = make
        self.step = step
        self.is_told = is_told
        self.switched = switched


def holds(value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda module: setattr(module, "held", value())


def left_out(value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda module: module.register_buffer("held", value(), persistent=False)


def of_kind(kind: str) -> Callable[[], Any]:
    return lambda: MAKE[kind][0](torch.ones(2))


CASES = {
    **{
        f"a {kind} buffer": Case(left_out(of_kind(kind)), replaces(kind, "held"), is_told=True)
        for kind in MAKE
        if kind != "masked"
    },
    **{
        f"a {kind} attribute": Case(holds(of_kind(kind)), replaces(kind, "held"), is_told=True)
        for kind in MAKE
    },
    "a set of NumPy's numbers": Case(
        holds(lambda: {np.int64(100)}), adds([np.int64(number) for number in range(12)]), True
    ),
    "a set of types": Case(
        holds(lambda: {torch.float32}), adds([torch.int8, torch.int16, torch.float16]), True
    ),
    "a set of tensors": Case(holds(lambda: {torch.zeros(1)}), counts_in_members, True),
    "a complex leaf": Case(
        holds(lambda: torch.zeros(2, dtype=torch.cfloat, requires_grad=True)), makes_leaf_anew
    ),
    "a leaf that is made anew": Case(
        holds(lambda: torch.zeros(2, requires_grad=True)), makes_leaf_anew
    ),
    "a leaf that training makes": Case(holds(lambda: None), trains_leaf),
    "a leaf": Case(holds(lambda: torch.zeros(2, requires_grad=True)), trains_leaf),
    "a leaf from the third step": Case(holds(lambda: torch.zeros(2)), trains_leaf, switched=True),
    "a leaf until the third step": Case(
        holds(lambda: torch.zeros(2, requires_grad=True)), trains_leaf, switched=False
    ),
    "a buffer of inference": Case(
        left_out(lambda: in_inference_mode(torch.ones(2))), lambda module: module.held.sum()
    ),
    "numbers of four bits": Case(
        holds(lambda: in_four_bits(torch.ones(2))), lambda module: len(module.held)
    ),
    "a lazy layer": Case(
        lambda module: setattr(module, "held", nn.LazyLinear(1)),
        lambda module: module.held(torch.ones(1, 3)).sum(),
    ),
}
# Entries of a data set, and what the collate function makes of a batch
DATA: dict[str, Callable[[], Any]] = {
    "nested": lambda: nested(torch.ones(3)),
    "quantized": lambda: quantized(torch.ones(8, 4)),
    "masked": lambda: masked(torch.ones(8)),
    "meta": lambda: torch.ones(8, device="meta"),
    "wrapped": lambda: Wrapped(torch.ones(8)),
}


class Rows(Dataset[Tensor]):
    def __init__(self, beside: Any = None) -> None:
        self.beside = beside

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), 1.0, 2.0, 3.0])


class Module(LightningModule):
    def __init__(self, case: Case | None, data: Rows, collate: Any, killed_at: int | None) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.done = 0
        self.switched = None if case is None else case.switched
        self._parts_of_the_test = (case, data, collate, killed_at)
        if case is not None:
            case.make(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        case, _, _, killed_at = self._parts_of_the_test
        if self.done == killed_at:
            raise Killed
        rows = batch[0] if isinstance(batch, (list, tuple)) else batch
        further = 0 if case is None else case.step(self)
        self.done += 1
        return self.net(rows).square().mean() * (1 + further)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.001)

    def train_dataloader(self) -> DataLoader[Any]:
        _, data, collate, _ = self._parts_of_the_test
        return DataLoader(data, 2, collate_fn=collate)


def trained(
    folder: Path,
    case: Case | None,
    data: Rows | None = None,
    collate: Any = None,
    killed_at: int | None = None,
) -> Module:
    with warnings.catch_warnings():
        # Torch says that many of these kinds may change.
        warnings.simplefilter("ignore", UserWarning)
        seed_everything(7, verbose=False)
        keep = ExactCheckpoint(folder, every="1")
        module = Module(case, data or Rows(), collate, killed_at)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=3,
            callbacks=[keep],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, ckpt_path=keep.resume_from)
    return module


def assert_exact_or_told(
    folder: Path, capsys: pytest.CaptureFixture[str], case: Case | None, *more: Any
) -> None:
    undisturbed = trained(folder / "undisturbed", case, *more)
    with pytest.raises(Killed):
        trained(folder / "killed", case, *more, killed_at=KILLED_AT)
    resumed = trained(folder / "killed", case, *more)
    told = capsys.readouterr().out
    if case is not None and case.is_told:
        assert "module.held changes in training, and a checkpoint does not hold it" in told
        return
    assert "exact" not in told
    assert "refused" not in told
    for mine, theirs in zip(resumed.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    if isinstance(held := getattr(undisturbed, "held", None), Tensor):
        assert resumed.held.requires_grad == held.requires_grad


@pytest.mark.daily(8)
@pytest.mark.parametrize("name", CASES)
def test_what_a_module_holds_is_exact_or_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_exact_or_told(tmp_path, capsys, CASES[name])


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind not in ("masked", "jagged")])
def test_a_buffer_that_would_not_load_again_is_named(kind: str, tmp_path: Path) -> None:
    case = Case(lambda module: module.register_buffer("held", of_kind(kind)()), lambda module: 0.0)
    with pytest.raises(UserError, match=r"state_dict\['held'\] is a .*would not load again"):
        trained(tmp_path, case)


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", DATA)
def test_a_data_set_may_hold_tensors_of_any_kind(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_exact_or_told(tmp_path, capsys, None, Rows(DATA[name]()))


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "make", [torch.nested.nested_tensor, lambda rows: masked(torch.stack(rows))]
)
def test_a_batch_may_hold_tensors_of_any_kind(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def collate(rows: list[Tensor]) -> Any:
        return torch.stack(rows), make(rows)

    assert_exact_or_told(tmp_path, capsys, None, None, collate)
