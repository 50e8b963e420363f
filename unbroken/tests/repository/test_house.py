"""The plan of the house: which room may import which, and where private names of others stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import unbroken
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader
from unbroken import ExactCheckpoint, lightning_internals, seams
from unbroken.errors import UserError

from configs.examples.autoencoder import LitAutoEncoder, Waves
from tests.relied_on import called, is_self, private_names

PACKAGE = Path(unbroken.__file__).parent
CLONE = Path(__file__).parents[3]
INTERNALS = PACKAGE / "lightning_internals.py"
SEAMS = PACKAGE / "seams.py"
FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("contracts", ["pyproject.toml", "unbroken/pyproject.toml"])
def test_arrows_point_down_and_there_is_no_circle(
    contracts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    linter = pytest.importorskip("importlinter.cli")
    monkeypatch.chdir(Path(__file__).parents[3])
    assert linter.lint_imports(contracts, no_cache=True) == 0, capsys.readouterr().out


def is_own(node: ast.expr) -> bool:
    """``self``, or a part that a class has made for itself."""
    is_part = isinstance(node, ast.Attribute) and is_self(node.value)
    return is_self(node) or (is_part and node.attr not in ("trainer", "network"))


def found_in(look: Callable[[str], Iterator[str]], files: Iterable[Path]) -> dict[str, list[str]]:
    """What ``look`` finds in each file, without the files in which it finds nothing."""
    found = {path.relative_to(PACKAGE).as_posix(): list(look(path.read_text())) for path in files}
    return {name: lines for name, lines in found.items() if lines}


def test_private_names_of_others_stand_in_lightning_internals_alone() -> None:
    found = found_in(private_names, FILES)
    assert found.keys() == {"lightning_internals.py"}, found


@pytest.mark.parametrize(
    "text",
    [
        "trainer._x",
        "trainer.fit_loop._x = 1",
        "class A(B):\n    def f(self): return self._x",
        "from torch import _x",
        "import torch._x",
        "from torch._x import y",
        "getattr(trainer, '_x', None)",
        "setattr(trainer, '_x', 1)",
        "importlib.import_module('torch._x')",
        "class A:\n    def f(self, other): return other._x\n    _x = 1",
    ],
)
def test_a_private_name_of_another_is_found(text: str) -> None:
    assert [line.partition(": ")[2] for line in private_names(text)] == ["_x"]


@pytest.mark.parametrize(
    "text",
    [
        "from __future__ import annotations",
        "class A(B):\n    def __init__(self): self._x = 1\n    def f(self): return self._x",
        "class A:\n    _x: int = 1\n    def f(self): return self._x",
        "class A:\n    def _x(self): return super().__init__()\n    def f(self): return self._x()",
        "def _x(): ...\n_x()",
        "os._exit(1)",
        "for _ in x: y.__class__",
        "getattr(trainer, 'x', None)",
    ],
)
def test_public_and_own_names_are_not(text: str) -> None:
    assert list(private_names(text)) == []


# What a live object of these has as a method, nobody else may replace.
OF_LIVE_OBJECTS = (Trainer, Strategy, Precision, Profiler, LightningModule, DataLoader, Logger)
METHODS = {
    name
    for kind in OF_LIVE_OBJECTS
    for name in dir(kind)
    if callable(getattr(kind, name, None)) and not name.startswith("__")
}


def replaced_methods(text: str) -> Iterator[str]:
    """Methods that a file sets on objects that are not its own, as ``line: name``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign):
            targets = [each for each in node.targets if isinstance(each, ast.Attribute)]
            for target in targets:
                if target.attr in METHODS and not is_own(target.value):
                    yield f"{target.lineno}: {target.attr}"
        if isinstance(node, ast.Call) and called(node) == "setattr" and len(node.args) == 3:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in METHODS:
                yield f"{node.lineno}: {name.value}"


def test_methods_of_live_objects_are_replaced_in_two_files_alone() -> None:
    # The network of a task is the user's own.
    rooms = [path for path in FILES if path.relative_to(PACKAGE).parts[0] not in ("tasks", "data")]
    assert found_in(replaced_methods, {*rooms} - {INTERNALS, SEAMS}) == {}


@pytest.mark.parametrize(
    "text",
    [
        "strategy.process_dataloader = lambda loader: loader",
        "trainer.profiler.start = mine",
        "setattr(module, 'training_step', mine)",
        "trainer.strategy.on_train_start = partial(f, 1)",
    ],
)
def test_a_replaced_method_is_found(text: str) -> None:
    assert len(list(replaced_methods(text))) == 1


def test_every_seam_is_listed_and_looked_up_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for _, name in seams.SEAMS}
    text = SEAMS.read_text()
    used = re.findall(r"self\._replace\(\w+, \"(\w+)\"", text)
    assert sorted(used) == sorted(names)
    monkeypatch.setattr(seams, "SEAMS", [*seams.SEAMS, (Precision, "gone")])
    with pytest.raises(UserError, match="Precision lacks gone"):
        seams.check()


@pytest.mark.parametrize(
    ("missing", "name"),
    [
        ("lightning.pytorch.loops.nowhere", "Module._gone"),
        ("torch.nn", "Module._gone"),
        ("multiprocessing.queues", "Queue._gone"),
    ],
)
def test_a_missing_name_is_told_in_one_line_with_the_versions_that_have_it(
    missing: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning_internals.check()
    monkeypatch.setitem(lightning_internals.NAMES, missing, [name])
    with pytest.raises(
        UserError, match=r"lacks a name .*(_gone|nowhere).* Known to work: lightning 2\.6\.6"
    ) as error:
        lightning_internals.check()
    assert "\n" not in str(error.value)


def test_a_plain_script_is_told_of_a_missing_name_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lightning_internals.NAMES, "torch.nn", ["Module._gone"])
    trainer = Trainer(
        max_epochs=1,
        callbacks=[ExactCheckpoint(tmp_path / "run")],
        logger=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(UserError, match=r"lacks a name .*_gone"):
        trainer.fit(LitAutoEncoder(), Waves())
    assert not (tmp_path / "run").exists()
