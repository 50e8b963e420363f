"""What a module keeps in an attribute comes back from a checkpoint, of whatever kind it is."""

from __future__ import annotations

import enum
import io
import itertools
import random
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from unbroken.errors import UserError
from unbroken.parts.plain_values import copied, is_plain, is_unchanged
from unbroken.parts.remade import Remaking
from unbroken.storage.savable import made_plain
from unbroken.tensors.same_values import PIECE, deep_copy, is_same

CPU = torch.device("cpu")


class Phase(enum.Enum):
    """A phase of training."""

    WARM_UP = "warm-up"
    MAIN = "main"


class Level(enum.IntEnum):
    """A level of difficulty."""

    EASY = 1
    HARD = 2


Sample = namedtuple("Sample", ["x", "reward"])


@dataclass
class Best:
    """The best so far."""

    epoch: int
    losses: list[float]


@dataclass(frozen=True)
class Frozen:
    """Is replaced, and never changed."""

    epoch: int


def like(now: Any, saved: Any, filled: tuple[str, ...] = ()) -> Any:
    """What a checkpoint makes of an attribute."""
    return Remaking(CPU, filled).like(now, saved, "attribute")


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(made_plain(copied(value), "value"), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


VALUES = [
    Counter(a=2),
    OrderedDict(b=1, a=2),
    defaultdict(list, a=[1.0]),
    {(1, "a"): 1, 0.5: 2, None: 3},
    deque([1.0, 2.0], maxlen=3),
    {"recent": deque([1.0], maxlen=3), "all": deque()},
    deque([Sample(torch.ones(2), 1.0), Sample(np.zeros(2), 2.0)], maxlen=4),
    [Best(1, [0.5]), Best(2, [])],
    Frozen(3),
    Phase.MAIN,
    {"level": Level.HARD},
    frozenset({1, "a"}),
    {(1, 2), (3, 4)},
    2 + 1j,
    b"bytes",
    bytearray(b"bytes"),
    array("d", [0.5]),
    range(2, 9, 3),
    slice(None, 3),
    Decimal("0.10"),
    Fraction(1, 3),
    date(2026, 1, 2),
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    timedelta(days=1, microseconds=3),
    Path("a/b"),
    torch.float16,
    torch.Size([2, 3]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_that_training_has_made_comes_back(value: Any) -> None:
    assert is_plain(value)
    again = like(None, through_a_file(value))
    assert type(again) is type(value)
    assert is_same(copied(again), copied(value))
    if isinstance(value, defaultdict):
        assert again["new"] == []
    if isinstance(value, deque):
        assert again.maxlen == value.maxlen


def test_a_count_goes_on() -> None:
    count = itertools.count(3, 2)
    next(count)
    assert next(like(itertools.count(3, 2), through_a_file(count))) == 5


def test_many_losses_are_held_as_one_tensor_and_come_back_each_by_itself() -> None:
    weight = torch.ones(2, requires_grad=True)
    losses = [(weight * number).sum() for number in range(100)]
    held = through_a_file(losses)
    assert torch.equal(held["torch.stack"], torch.arange(0.0, 200.0, 2.0))
    again = like([], held)
    assert [each.item() for each in again] == [2.0 * number for number in range(100)]
    assert again[0].untyped_storage().nbytes() == 4, "each has memory of its own"
    assert is_unchanged(losses, held)
    assert not is_unchanged([*losses[1:], losses[0]], held)


def test_a_change_past_a_tensors_version_is_found() -> None:
    array = np.zeros(10_000, dtype=np.float32)
    shared = torch.from_numpy(array)
    held = copied({"tensor": shared, "array": array, "counts": [1, 2], "nan": float("nan")})
    now = {"tensor": shared, "array": array, "counts": [1, 2], "nan": float("nan")}
    assert is_unchanged(now, held)
    array[7] = float("nan")
    assert not is_unchanged(now["tensor"], held["tensor"])
    assert not is_unchanged(now["array"], held["array"])
    assert not is_unchanged([1, 3], held["counts"])
    assert not is_unchanged([1, 2.0], held["counts"])


def test_what_a_state_dict_keeps_in_attributes_comes_back() -> None:
    state = nn.Linear(1, 1).state_dict()
    again = like(None, through_a_file(state))
    assert again._metadata == state._metadata  # type: ignore[attr-defined]


def test_a_factory_of_the_users_own_stays_that_of_the_constructor() -> None:
    now: Any = defaultdict(lambda: 7, a=1)
    again = like(now, through_a_file(defaultdict(lambda: 7, a=2)))
    assert again["a"] == 2
    assert again["new"] == 7


def test_a_class_in_a_function_cannot_be_held() -> None:
    @dataclass
    class Local:
        """Nobody finds it by its name."""

        epoch: int

    assert not is_plain(Local(1))
    assert not is_plain([Local(1)])


@pytest.mark.parametrize(
    "held",
    [
        {"dataclass": ["subprocess:Popen", {"args": "true"}]},
        {"dataclass": ["pathlib:Path", {}]},
        {"namedtuple": ["builtins:list", [1]]},
        {"enum.Enum": ["os:environ", "PATH"]},
        {"enum.Enum": [f"{__name__}:Phase", "another"]},
        {"namedtuple": ["antigravity:Sample", [1]]},
    ],
    ids=str,
)
def test_a_forged_value_makes_no_other_object(held: Any) -> None:
    with pytest.raises(UserError, match="a checkpoint holds"):
        like(None, held)


@pytest.mark.parametrize(
    "held",
    [
        {"builtins.bytearray": 10**15},
        {"datetime.datetime": "yesterday"},
        {"fractions.Fraction": [1, 0]},
        {"collections.deque": 3},
        {"namedtuple": 3},
        {"numpy.ndarray": "text"},
    ],
    ids=str,
)
def test_a_damaged_value_is_refused(held: Any) -> None:
    with pytest.raises((TypeError, ValueError, ArithmeticError, AttributeError)):
        like(None, held)


FILLED: list[tuple[Any, Any]] = [
    ([1], [2, [3]]),
    ({"a": 1}, {"b": 2}),
    (OrderedDict(a=1), OrderedDict(b=2, a=1)),
    (Counter(a=1), Counter(b=2)),
    (defaultdict(list, a=[1]), defaultdict(list, b=[2])),
    ({1}, {2, 3}),
    (deque([1], maxlen=2), deque([2, 3], maxlen=2)),
    (bytearray(b"one"), bytearray(b"three")),
    (array("d", [1.0]), array("d", [2.0, 3.0])),
    (torch.zeros(2), torch.ones(2)),
    (np.zeros(2), np.ones(2)),
    (Best(1, [0.5]), Best(2, [])),
]


@pytest.mark.parametrize(("now", "then"), FILLED, ids=lambda each: type(each).__name__)
def test_what_training_has_changed_is_filled_and_what_it_has_replaced_is_made_anew(
    now: Any, then: Any
) -> None:
    before = copied(now)
    saved = through_a_file(then)
    assert like(now, saved) is not now
    assert is_same(copied(now), before)
    again = like(now, saved, filled=("attribute",))
    assert again is now
    assert is_same(copied(again), copied(then))


def read_only() -> Any:
    numbers = np.zeros(2)
    numbers.setflags(write=False)
    return numbers


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (torch.zeros(1).expand(2), torch.tensor([1.0, 2.0])),
        (torch.zeros(3), torch.ones(2)),
        (torch.zeros(2), torch.ones(2, dtype=torch.int64)),
        (read_only(), np.ones(2)),
        (array("d", [1.0]), array("i", [2])),
        (Frozen(1), Frozen(2)),
        ([1], {"a": 1}),
    ],
    ids=["expanded", "another size", "another type", "read only", "typecode", "frozen", "kind"],
)
def test_what_cannot_be_filled_is_made_anew(now: Any, then: Any) -> None:
    before = copied(now)
    again = like(now, through_a_file(then), filled=("attribute",))
    assert again is not now
    assert is_same(copied(again), copied(then))
    assert is_same(copied(now), before)


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([2.0, NAN]), False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor(1.0), torch.tensor(1), False),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (torch.tensor([1 + 2j]).to(torch.complex128), torch.tensor([1 + 2j] * 2)[:1], False),
        (torch.tensor([1 + 2j]).to(torch.complex128),) * 2 + (True,),
        (torch.arange(12).reshape(3, 4).t(), torch.arange(12).reshape(3, 4).t().contiguous(), True),
        (torch.ones(3, requires_grad=True), torch.ones(3), True),
        (torch.ones(1).expand(5), torch.ones(5), True),
        (torch.ones(3).to(torch.float8_e5m2), torch.ones(3).to(torch.float8_e5m2), True),
        (torch.tensor([True]), torch.tensor([False]), False),
    ],
)
def test_tensors_that_hold_the_same_are_the_same(one: Any, other: Any, expected: bool) -> None:
    assert is_same(one, other) is expected


def masked(numbers: Tensor) -> Any:
    return np.ma.masked_less(numbers.numpy(), -5.0)


@pytest.mark.parametrize("count", [PIECE // 4, PIECE // 4 + 1, PIECE])
@pytest.mark.parametrize(
    "make",
    [
        lambda numbers: numbers,
        lambda numbers: numbers.to(torch.bfloat16),
        lambda numbers: numbers.to(torch.complex128),
        lambda numbers: numbers.to(torch.int8),
        lambda numbers: torch.stack([numbers, numbers]).t(),
        lambda numbers: numbers.numpy(),
        lambda numbers: numbers.long().numpy()[::-1],
        lambda numbers: numbers.numpy().astype(">i2"),
        lambda numbers: numbers.numpy().astype("S3"),
        masked,
    ],
    ids=[
        *("tensor", "bfloat16", "complex", "int8", "transposed", "array", "flipped"),
        *("foreign order", "texts", "masked"),
    ],
)
def test_large_values_are_compared_to_the_last_number(make: Any, count: int) -> None:
    for place in (0, count // 2, count - 1):
        numbers = torch.full([count], 7.0)
        before = deep_copy(make(numbers))
        numbers[place] = -7
        assert is_same(before, make(torch.full([count], 7.0)))
        assert not is_same(before, make(numbers))


class InSlots:
    """A sample without a comparison, and without a dictionary."""

    __slots__ = ("__secret", "x")

    def __init__(self, x: float, secret: float = 0.0) -> None:
        self.x = torch.tensor([x])
        self.__secret = secret


class ComparesWhoItIs:
    """As a graph of torch_geometric does."""

    def __init__(self, x: float) -> None:
        self.x = torch.tensor([x])

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


@dataclass
class OfTensors:
    """Its comparison fails: that of two tensors is no single answer."""

    x: Tensor


class HoldsItself:
    def __init__(self, x: float) -> None:
        self.x = x
        self.me = self
        self.method = self.again
        self.parent = weakref.ref(self)

    def again(self) -> float:
        return self.x


class Named(set[int]):
    """Holds more than its attributes, and compares only who it is."""

    __eq__ = object.__eq__
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *numbers: int) -> None:
        super().__init__(numbers)
        self.name = "numbers"


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (InSlots, (1.0,), (2.0,)),
        (InSlots, (1.0, 1.0), (1.0, 2.0)),
        (ComparesWhoItIs, (1.0,), (2.0,)),
        (lambda x: OfTensors(torch.tensor([x, x])), (1.0,), (2.0,)),
        (HoldsItself, (1.0,), (2.0,)),
        (Named, (1, 2), (1, 3)),
        (lambda x: [ComparesWhoItIs(x)], (1.0,), (2.0,)),
        (lambda x: np.array([ComparesWhoItIs(x)], object), (1.0,), (2.0,)),
        (random.Random, (1,), (2,)),
        (lambda x: Image.new("L", (2, 2), x), (1,), (2,)),
        (date, (2020, 1, 1), (2020, 1, 2)),
    ],
    ids=[
        *("slots", "private slot", "identity", "dataclass", "itself", "derived set", "list"),
        *("array of objects", "generator", "image", "date"),
    ],
)
def test_objects_that_hold_the_same_are_the_same(
    make: Any, one: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    assert is_same(make(*one), make(*one))
    assert not is_same(make(*one), make(*other))
