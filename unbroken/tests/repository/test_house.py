"""The plan of the house: which room may import which, and where private names of others stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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

PACKAGE = Path(unbroken.__file__).parent
CLONE = Path(__file__).parents[3]
INTERNALS = PACKAGE / "lightning_internals.py"
SEAMS = PACKAGE / "seams.py"
FILES = sorted(PACKAGE.rglob("*.py"))
# With an underscore, and documented: in os, and of named tuples
PUBLIC = {"_exit", "_replace", "_asdict", "_fields"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


@pytest.mark.parametrize("contracts", ["pyproject.toml", "unbroken/pyproject.toml"])
def test_arrows_point_down_and_there_is_no_circle(
    contracts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    linter = pytest.importorskip("importlinter.cli")
    monkeypatch.chdir(Path(__file__).parents[3])
    assert linter.lint_imports(contracts, no_cache=True) == 0, capsys.readouterr().out


def is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.endswith("__")
        and name.strip("_") != ""
        and name not in PUBLIC
    )


def private_names(text: str) -> Iterator[str]:
    """Uses of private names that are not this file's own, as ``line: name``.

    Own is ``self._name`` that a class of the file defines, and a plain name. What another object
    keeps for itself is not, be it of this package or of another.
    """
    tree = ast.parse(text)
    own = set(names_of_classes(tree))
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            found = [] if is_self(node.value) and node.attr in own else [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found = [part for name in names for part in name.split(".")]
        elif isinstance(node, ast.Call) and called(node) in BY_NAME and len(node.args) > 1:
            found = [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
        elif (
            isinstance(node, ast.Call)
            and called(node) == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            found = str(node.args[0].value).split(".")
        yield from (f"{node.lineno}: {name}" for name in found if is_private(str(name)))  # type: ignore[attr-defined]


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_own(node: ast.expr) -> bool:
    """``self``, or a part that a class has made for itself."""
    is_part = isinstance(node, ast.Attribute) and is_self(node.value)
    return is_self(node) or (is_part and node.attr not in ("trainer", "network"))


def called(call: ast.Call) -> str:
    """The last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def names_of_classes(tree: ast.AST) -> Iterator[str]:
    """What the classes of a file define: methods, fields, attributes of ``self``."""
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and is_self(node.value)
            ):
                yield node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_private_names_of_others_stand_in_lightning_internals_alone(path: Path) -> None:
    if path != INTERNALS:
        assert list(private_names(path.read_text())) == []


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


def test_every_private_name_of_lightning_internals_is_looked_up_at_start() -> None:
    """Attributes that only instances have cannot be; the file of their class stands for them, by
    another name.
    """
    modules = lightning_internals.NAMES | lightning_internals.NAMES_OF_THE_PARSER
    listed = {part for module in modules for part in module.split(".")}
    for names in modules.values():
        listed |= {part for name in names for part in name.split(".")}
    of_instances = {
        "_accelerator_connector",
        "_checkpoint_connector",
        "_ddp_comm_state",
        "_schema",
        "_start_method",
        "_average_model",
        "_batches_that_stepped",
        "_child_processes",
        "_combined_loader",
        "_device",
        "_first_loop_iter",
        "_index_queues",
        "_iterator",
        "_lightning_module",
        "_logger_connector",
        "_mode",
        "_module_mode",
        "_non_persistent_buffers_set",
        "_restarting",
        "_results",
        "_seen_batches_per_dataloader",
        "_signal_connector",
    }
    text = INTERNALS.read_text()
    own = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    used = {line.partition(": ")[2] for line in private_names(text)}
    assert used - listed - of_instances - own == set()


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_methods_of_live_objects_are_replaced_in_two_files_alone(path: Path) -> None:
    # The network of a task is the user's own.
    is_users = path.relative_to(PACKAGE).parts[0] in ("tasks", "data")
    if path not in (INTERNALS, SEAMS) and not is_users:
        assert list(replaced_methods(path.read_text())) == []


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
    assert sorted([*used, *seams.HOOKS_OF_BATCHES]) == sorted(names)
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
