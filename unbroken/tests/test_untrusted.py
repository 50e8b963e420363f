"""Promise 15: a stranger's checkpoint runs nothing, writes nothing, fetches nothing."""

from __future__ import annotations

import base64
import importlib
import os
import pickle
import random
import shutil
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import yaml
from torch import nn

from numerals.fit import job as fit
from tests.commands import checkpoint
from tests.example_packages import LACKING
from unbroken.cli import start as entry
from unbroken.cli.cli import configure
from unbroken.cli.read_checkpoint import load
from unbroken.cli.refusals import refusals_as_errors
from unbroken.commands import test as test_command
from unbroken.commands.export import command as export
from unbroken.commands.predict import command as predict
from unbroken.errors import UserError, without_control_characters
from unbroken.storage import own_runs
from unbroken.storage.bounded_reading import BoundedMaking, length_of_range
from unbroken.storage.checkpoint_files import (
    AtomicCheckpointIO,
    drop_states_that_leave,
    is_own,
    is_path,
    outline,
    read,
    record,
)
from unbroken.trust import guard as trust
from unbroken.trust.guard import Guard, guarded, trusted_names

STRANGE = "strange.ckpt"
CANARY = "canary"
SHORT = ["--max_epochs", "1", "--monitors", "none", "--report", "false", "--log_every_n_steps", "4"]
FEW = [
    *("--data.source", "sample", "--data.train_samples", "100", "--data.val_samples", "20"),
    *("--data.test_samples", "20", "--model.network", "MLP"),
]


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The best.ckpt of a run of this user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        patch.chdir(tmp_path_factory.mktemp("trained"))
        assert fit.main([*FEW, *SHORT, "--run_name", "r"]) == 0
        return Path("checkpoints/r/best.ckpt").absolute()


@pytest.fixture
def on_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From here on this user's own files are a stranger's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-of-another"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "state-of-another"))


def forge(trained: Path, keys: str, value: Any) -> str:
    """A copy of a checkpoint with another entry in its configuration."""
    contents = checkpoint(trained)
    *path, last = keys.split(".")
    section = contents["run"]["config"]
    for key in path:
        section = section[key]
    section[last] = value
    torch.save(contents, STRANGE)
    return STRANGE


def spec(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


def error_of(capsys: pytest.CaptureFixture[str], main: Any, *words: str) -> str:
    """The one line that a command prints as it refuses."""
    capsys.readouterr()
    assert entry.exit_code(main, list(words)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# What a process does, as Python itself reports it


@dataclass
class Deeds:
    """What happened inside :func:`watched`."""

    events: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    is_watching: bool = False

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_watching:
            return
        if event == "import":
            self.imports.append(str(arguments[0]))
        elif event == "open":
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            mode = str(arguments[1] or "")
            writes = set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes:
                self.events.append(f"open {arguments[0]}")
        elif event in (
            *("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"),
            *("socket.connect", "socket.getaddrinfo", "os.mkdir", "os.remove", "os.rmdir"),
            *("os.rename", "os.truncate", "shutil.rmtree", "sqlite3.connect", "pickle.find_class"),
        ):
            self.events.append(f"{event} {arguments}")


DEEDS = Deeds()
sys.addaudithook(DEEDS.note)


@contextmanager
def watched() -> Iterator[Deeds]:
    DEEDS.events.clear()
    DEEDS.imports.clear()
    DEEDS.is_watching = True
    try:
        yield DEEDS
    finally:
        DEEDS.is_watching = False


# Files that ran something


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


PICKLED = base64.b64encode(pickle.dumps(Payload())).decode()
COMMAND = {"args": f"touch {CANARY}", "shell": True}
EVIL: dict[str, dict[str, Any]] = {
    "unpickles bytes": spec(
        "torch.utils.data.datapipes.utils.decoder.basichandlers",
        extension="pickle",
        data=f"!!binary {PICKLED}",
    ),
    "runs a command of the clone's tests": spec(
        "tests.commands.complete", words=["touch", CANARY], timeout=5, fresh=True
    ),
    "writes a file by the clone's tests": spec(
        "tests.fuzzed.prepare",
        given=spec("tests.fuzzed.Input", command="x", words=[], files={CANARY: "text"}),
    ),
    "a type hint's class": spec(
        "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver",
        main_pid=1,
        child_processes=[COMMAND],
    ),
    "imports a module of one word": spec(
        "torch.nn.attention._fa3._fa3_import_module", module_path="this"
    ),
    "opens a database": spec(
        "unbroken.commands.sweep.trials.RunningTrial",
        trial={
            "study": {"study_name": "x", "storage": f"sqlite:///{CANARY}"},
            "trial_id": 0,
        },
        space=None,
        folder=".",
        fit_arguments=[],
        env={},
    ),
    "downloads": spec("torchvision.models.resnet18", weights="DEFAULT"),
    "an alias": spec("torch.utils.collect_env.subprocess.Popen", **COMMAND),
    "an alias of ours": spec("unbroken.results.facts.subprocess.Popen", **COMMAND),
    "a function": spec("torch.utils.collect_env.run", command=f"touch {CANARY}"),
    "maps a file": spec("torch.from_file", filename=CANARY, shared=True, size=1),
    "parses a command line": spec(
        "lightning.pytorch.cli.LightningCLI", args=["--model=antigravity.Model"]
    ),
    "writes rows": spec("unbroken.tables.write_rows", path=CANARY, rows={}),
    "empties a file": spec("unbroken.tables.write_atomically", data="", path=CANARY),
    "a data set that downloads": spec("torchvision.datasets.MNIST", root=CANARY, download=True),
    "makes a folder": spec("lightning.pytorch.loggers.csv_logs.ExperimentWriter", log_dir=CANARY),
    "in a key": {f"{{class_path: subprocess.Popen, init_args: {COMMAND}}}": 1}
    | spec("subprocess.Popen", **COMMAND),
    "dotted keys": {"class_path": "subprocess.Popen", "init_args.args": f"touch {CANARY}"},
    "as dict_kwargs": {"class_path": "subprocess.Popen", "dict_kwargs": COMMAND},
}
COMMANDS = {
    "fit": (fit.main, []),
    "test": (test_command.main, []),
    "predict": (predict.main, ["digit.png"]),
    "export": (export.main, []),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", EVIL)
def test_what_once_ran_is_refused_in_one_line(
    name: str, command: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, words = COMMANDS[command]
    Path("digit.png").touch()
    path = forge(trained, "model.init_args.optimizer_args", {"x": EVIL[name]})
    before = set(Path.cwd().rglob("*"))
    with watched() as deeds:
        line = error_of(capsys, main, *words, "--ckpt_path", path)
    assert line.startswith("error: --ckpt_path strange.ckpt names ")
    named = {"this", "subprocess", "antigravity", "sqlite3", "optuna", "alembic", "sqlalchemy"}
    assert not named & set(deeds.imports)
    forbidden = ("os.system", "subprocess", "os.posix", "os.exec", "socket", "sqlite3", "pickle")
    assert not [event for event in deeds.events if event.startswith(forbidden)]
    time.sleep(0.05)
    left = set(Path.cwd().rglob("*")) - before
    assert not left, "nothing was written"


# Every place that takes a class or anything


PLACES = {
    "a module": ("model.class_path", "{}.Model"),
    "an optimizer": ("model.init_args.optimizer", "{}.Optimizer"),
    "a loss": ("model.init_args.loss", "{}.Loss"),
    "a schedule": ("model.init_args.schedule", "{}.Schedule"),
    "a network": ("model.init_args.network.class_path", "{}.Network"),
    "a network as text": ("model.init_args.network", "{}.Network"),
    "a network as YAML": ("model.init_args.network", "{{class_path: {}.Network}}"),
    "a metric": ("model.init_args.metrics", {"x": {"class_path": "{}.Metric"}}),
    "a metric as text": ("model.init_args.metrics", {"x": "{}.Metric"}),
    "anything": ("model.init_args.optimizer_args", {"x": {"class_path": "{}.Thing"}}),
    "anything as YAML": ("model.init_args.optimizer_args", {"x": "{{class_path: {}.Thing}}"}),
    "a data module": ("data.class_path", "{}.Data"),
    "a transform as text": ("data.init_args.transforms", ["{}.Transform"]),
    "transforms as YAML": ("data.init_args.transforms", "[{}.Transform]"),
    "transforms as a set": ("data.init_args.transforms", {"{}.Transform"}),
    "a callback": ("trainer.callbacks", ["{}.Callback"]),
    "a logger": ("trainer.logger", [{"class_path": "{}.Logger"}]),
    "a strategy as text": ("trainer.strategy", "{}.Strategy"),
    "a profiler as text": ("trainer.profiler", "{}.Profiler"),
    "a plugin": ("trainer.plugins", ["{}.Plugin"]),
}


def filled(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: filled(item, name) for key, item in value.items()}
    if isinstance(value, (list, set)):
        return type(value)(filled(item, name) for item in value)
    return value.format(name)


@pytest.mark.parametrize("place", PLACES)
def test_a_strangers_class_is_refused_before_it_is_imported(
    place: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"stranger_{list(PLACES).index(place)}"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{name}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    keys, value = PLACES[place]
    forge(trained, keys, filled(value, name))
    mains = (
        [fit.main]
        if keys.startswith("trainer")
        else [fit.main, partial(test_command.main, "numerals")]
    )
    for main in mains:
        line = error_of(capsys, main, "--ckpt_path", STRANGE)
        assert name in line
        assert line.endswith(f"--allow_imports {name}")
        assert name not in sys.modules


def test_a_class_of_an_allowed_package_is_made(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "of_a_friend.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(torch.nn.Flatten())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    forge(trained, "model.init_args.network", spec("of_a_friend.Net"))
    line = error_of(capsys, test_command.main, "--ckpt_path", STRANGE)
    assert line.endswith("If you trust the file: --allow_imports of_a_friend")
    words = ["--ckpt_path", STRANGE, "--allow_imports", "of_a_friend"]
    assert "network is another than this module's" in error_of(capsys, test_command.main, *words)
    assert "of_a_friend" in sys.modules


# A generated suite: every class of four packages at every kind of place


def every_name(packages: tuple[str, ...]) -> list[str]:
    """A name of every class and function that the imported modules of some packages hold."""
    names: dict[int, str] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.split(".")[0] not in packages:
            continue
        for name, thing in list(vars(module).items()):
            # torch.distributed.reduce_op warns when it is looked at.
            if type(thing).__name__ != "_reduce_op" and callable(thing):
                names.setdefault(id(thing), f"{module_name}.{name}")
    return sorted(names.values())


class Holder:
    """A class whose parameters are the kinds of places."""

    def __init__(
        self,
        module: nn.Module | None = None,
        modules: list[nn.Module] | None = None,
        by_name: dict[str, nn.Module] | None = None,
        text_or_module: str | nn.Module | None = None,
        function: Any = None,
        anything: dict[str, Any] | None = None,
        kind: type | None = None,
        untyped=None,  # type: ignore[no-untyped-def]
    ) -> None: ...


SHAPES = {
    "module": ("{0}", {"class_path": "{0}"}, "{{class_path: {0}}}"),
    "modules": (["{0}"], [{"class_path": "{0}"}]),
    "by_name": ({"x": "{0}"}, {"x": {"class_path": "{0}", "init_args": {}}}),
    "text_or_module": ({"class_path": "{0}"},),
    "function": ({"class_path": "{0}"},),
    "anything": ({"x": {"class_path": "{0}"}}, {"x": ["{{class_path: {0}}}"]}),
    "kind": ("{0}",),
    "untyped": ({"class_path": "{0}"}, [{"class_path": "{0}"}]),
}


def shaped(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: shaped(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [shaped(item, name) for item in value]
    return value.format(name)


def made_of(names: list[str]) -> dict[str, int]:
    """Put every name at every place; returns counts. Fails where something else than a listed name
    is made.
    """
    from jsonargparse import ArgumentParser

    made: list[str] = []
    counts = {"places": sum(map(len, SHAPES.values())), "names": len(names), "tried": 0}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Holder, "held", fail_untyped=False)

    class Noting(Guard):
        def check_made(self, kind: Any, arguments: Any) -> None:
            if kind is Holder:
                self.refuse_what_was_not_made(arguments)
                return
            super().check_made(kind, arguments)
            made.append(trust.name_in_lightning(trust.defining_name(kind) or ""))

    for name in names:
        for place, shapes in SHAPES.items():
            for shape in shapes:
                counts["tried"] += 1
                guard = Noting(Path("x.ckpt"))
                with watched() as deeds:
                    try:
                        with guarded(guard):
                            config = parser.parse_object({"held": {place: shaped(shape, name)}})
                            parser.instantiate(config)
                    except UserError:
                        pass
                    except Exception:
                        # The parser's own refusal, or arguments that are missing
                        pass
                assert not deeds.events, (name, place, deeds.events)
    counts["made"] = len(set(made))
    others = set(made) - trusted_names()
    outside = [name for name in others if not trust.is_own_module(name.rpartition(".")[0])]
    assert not outside, outside
    return counts


PACKAGES = ("torch", "torchvision", "torchmetrics", "lightning")


def test_a_sample_of_every_class_is_listed_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    names = every_name((*PACKAGES, "numerals", "tests", "subprocess", "os", "shutil", "pickle"))
    sample = random.Random(15).sample(names, 60)
    sample += ["torch.nn.Linear", "torch.nn.ReLU", "torchvision.models.resnet18"]
    counts = made_of(sample)
    assert counts["made"] >= 2
    with capsys.disabled():
        print(f"\n{counts}")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_class_is_listed_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    counts = made_of(every_name((*PACKAGES, "numerals", "tests", "subprocess", "os", "shutil")))
    with capsys.disabled():
        print(f"\n{counts}")


def test_every_listed_name_is_there_and_is_defined_under_that_name() -> None:
    for name in trusted_names():
        module, _, last = name.rpartition(".")
        found = vars(importlib.import_module(module))[last]
        assert trust.is_listed(found, name), name


# What must go on without a flag


def again(*words: str) -> None:
    """The configuration of a typed line, read as a stranger's, makes the same."""
    first = configure(fit, "fit", [*words])
    trust.refuse_endless_reading(first.resolved, Path("x.ckpt"))
    with guarded(Guard(Path("x.ckpt"), file_bytes=10**9, folder=Path.cwd())):
        second = configure(fit, "fit", [], first.resolved)
    assert second.resolved == first.resolved
    assert str(second.module) == str(first.module)


ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "configs" / "examples").glob("*.yaml"))
F1 = "{f1: {class_path: torchmetrics.F1Score, init_args: {task: multiclass, num_classes: 10}}}"
FLIP = "[{class_path: torchvision.transforms.v2.RandomHorizontalFlip, init_args: {p: 0.3}}]"
TO_FLOAT = "[{class_path: torchvision.transforms.v2.ToDtype, init_args: {dtype: torch.float32}}]"
LINEAR = ["--model.network.in_features", "3", "--model.network.out_features", "2"]
REGRESSION = ["--model", "unbroken.tasks.SupervisedModule", "--model.network", "torch.nn.Identity"]
TYPED = [
    ["--model.network", "torchvision.models.resnet18"],
    ["--model.network", "torchvision.models.mobilenet_v3_small"],
    ["--model.network", "torch.nn.Linear", *LINEAR],
    [*REGRESSION, "--model.loss", "torch.nn.L1Loss"],
    [*REGRESSION, "--model.loss", "HuberLoss", "--model.loss_args", "{delta: 0.1}"],
    ["--model.optimizer", "torch.optim.Adagrad"],
    ["--model.schedule", "torch.optim.lr_scheduler.StepLR"],
    ["--model.metrics", F1],
    ["--data.transforms", FLIP],
    ["--data.transforms", TO_FLOAT],
    ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/loss"],
    ["--trainer.callbacks+", "ModelCheckpoint", "--trainer.callbacks+", "Timer"],
    ["--trainer.callbacks", "StochasticWeightAveraging", "--trainer.callbacks.swa_lrs", "0.1"],
    ["--trainer.callbacks", "EMAWeightAveraging"],
    ["--trainer.callbacks", "LearningRateMonitor"],
    ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "."],
    ["--trainer.profiler", "SimpleProfiler"],
    ["--trainer.strategy", "DDPStrategy"],
]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=LACKING.get(path.stem, ())) for path in EXAMPLES],
)
def test_every_example_is_made_of_trusted_classes(path: Path) -> None:
    again("--config", str(path))


def typed() -> list[Any]:
    """Every fourth line runs with every change, the others nightly."""
    found = []
    for number, words in enumerate(TYPED):
        name = " ".join(words[-2:])[:60]
        marks = () if number % 4 == 0 else pytest.mark.nightly
        found.append(pytest.param(words, id=name, marks=marks))
    return found


@pytest.mark.parametrize("words", typed())
def test_what_training_is_made_of_needs_no_flag(words: list[str]) -> None:
    again(*words)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that is installed, and neither the user's code nor on the list."""
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "somebodys.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n"
        "    def __init__(self, size: int = 10):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, size))\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    return "somebodys.Net"


@pytest.mark.nightly
def test_a_class_of_an_installed_package_that_was_typed_needs_no_flag_later(
    installed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [*FEW[:-2], "--model.network", installed, *SHORT]
    assert fit.main([*typed, "--run_name", "mine"]) == 0
    assert fit.main(["--run_name", "mine", "--ckpt_path", "auto", "--max_epochs", "2"]) == 0
    best = "checkpoints/mine/best.ckpt"
    assert test_command.main("numerals", ["--ckpt_path", best]) == 0
    assert load(fit, Path(best)).module.network[1].out_features == 10
    shutil.copy(best, "copied.ckpt")
    assert test_command.main("numerals", ["--ckpt_path", "copied.ckpt"]) == 0


def test_on_another_machine_it_does_and_typing_it_is_enough(
    installed: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    typed = [*FEW[:-2], "--model.network", installed, *SHORT]
    assert fit.main([*typed, "--run_name", "mine"]) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "empty"))
    best = ["--ckpt_path", "checkpoints/mine/best.ckpt"]
    assert "--allow_imports somebodys" in error_of(capsys, test_command.main, *best)
    assert test_command.main("numerals", [*best, "--allow_imports", "somebodys"]) == 0
    words = [*typed, "--run_name", "mine", "--ckpt_path", "auto", "--max_epochs", "2"]
    assert fit.main(words) == 0, "it was typed"
    assert not record(Path("checkpoints/mine/last.ckpt"))["is_own"]


def test_a_changed_entry_makes_a_file_a_strangers(trained: Path) -> None:
    assert record(trained)["is_own"]
    forge(trained, "model.init_args.lr", 0.5)
    assert not record(Path(STRANGE))["is_own"]
    contents = checkpoint(trained)
    contents["callbacks"]["Evil"] = {"path": "/"}
    torch.save(contents, STRANGE)
    assert not record(Path(STRANGE))["is_own"]


@pytest.mark.nightly
def test_a_run_that_goes_on_from_a_strangers_file_does_not_vouch_for_it(trained: Path) -> None:
    forge(trained, "model.init_args.lr", 0.5)
    assert fit.main(["--ckpt_path", STRANGE, "--run_name", "more", "--max_epochs", "2"]) == 0
    assert not record(Path("checkpoints/more/last.ckpt"))["is_own"]
    assert fit.main(["--ckpt_path", str(trained), "--run_name", "own", "--max_epochs", "2"]) == 0
    assert record(Path("checkpoints/own/last.ckpt"))["is_own"]


def test_the_key_is_the_users_alone_and_a_home_that_is_read_only_seals_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    seal = own_runs.seal(["x", {"a": 1}])
    assert own_runs.is_sealed(["x", {"a": 1}], seal)
    assert not own_runs.is_sealed(["x", {"a": 1.0}], seal)
    assert not own_runs.is_sealed(["x", {"a": 1}], None)
    key = own_runs.folder() / "key"
    assert os.name == "nt" or key.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert own_runs.seal(["x"]) is None
    assert not Path("relative").exists()
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert own_runs.seal(["x"]) is None
    assert not own_runs.is_sealed(["x"], None)


# Names, in disguise and out of it


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ("network", '{class_path: "\\x73ubprocess.Popen", init_args: {args: touch canary}}'),
        ("optimizer_args", {"x": r'{"class_path": "\x73ubprocess.Popen"}'}),
        ("optimizer_args", {"x.class_path": "subprocess.Popen"}),
        ("optimizer_args", {"x": {"class_path": "subprocess.Popen", "init_args": None}}),
        ("network", "tests.commands.os.remove"),
        ("network", "torch.nn.Module.forward.__globals__.pop"),
        ("optimizer", "subprocess.Popen"),
        ("loss", "unittest.__main__.json"),
        ("network", spec("numpy.memmap", filename=CANARY)),
        ("network", spec("torch.nn.Module.load_state_dict")),
        ("network", spec("pytorch_lightning.utilities.imports.os.system", command="x")),
    ],
    ids=str,
)
def test_a_name_in_disguise_is_refused(
    keys: str, value: Any, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(trained, f"model.init_args.{keys}", value)
    with watched() as deeds:
        error_of(capsys, test_command.main, "--ckpt_path", STRANGE)
    assert not deeds.events
    assert "unittest.__main__" not in sys.modules


def test_a_script_of_the_users_is_not_run_to_find_out(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("cleanup.py").write_text("open('canary', 'w')\n\n\ndef Net(): ...\n")
    forge(trained, "model.init_args.network", spec("cleanup.Net"))
    assert "cleanup.Net" in error_of(capsys, test_command.main, "--ckpt_path", STRANGE)
    assert not Path(CANARY).exists()


def test_a_class_in_a_file_of_the_users_is_made(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("my_nets.py").write_text("import torch\n\n\nclass Net(torch.nn.Identity): ...\n")
    forge(trained, "model.init_args.network", spec("my_nets.Net"))
    line = error_of(capsys, test_command.main, "--ckpt_path", STRANGE)
    assert "network is another than this module's" in line, "it was made"


def test_the_name_of_the_file_is_not_a_name_that_the_user_typed(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "cleverly.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    forge(trained, "model.init_args.network", spec("cleverly.Named"))
    shutil.move(STRANGE, "cleverly.Named")
    assert "cleverly" in error_of(capsys, test_command.main, "--ckpt_path", "cleverly.Named")
    assert "cleverly" not in sys.modules


@pytest.mark.parametrize("name", ["unbroken.cli.typed.CommandLine", "numerals.fit.main"])
def test_rooms_of_the_clone_are_no_model(
    name: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(trained, "model.init_args.network", spec(name))
    assert f"names {name}, which is" in error_of(capsys, test_command.main, "--ckpt_path", STRANGE)


@pytest.mark.parametrize("key", ["weights", "dict_kwargs"])
def test_a_factory_that_would_download_is_refused(
    key: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = {"class_path": "torchvision.models.resnet18", key: {"weights": "DEFAULT"}}
    if key == "weights":
        network = spec("torchvision.models.resnet18", weights="DEFAULT")
    forge(trained, "model.init_args.network", network)
    with watched() as deeds:
        line = error_of(capsys, fit.main, "--ckpt_path", STRANGE, "--run_name", "new")
    assert "would download files" in line
    assert not [event for event in deeds.events if event.startswith("socket")]


# What a run writes


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ("logger", spec("lightning.pytorch.loggers.CSVLogger", save_dir="OUT")),
        ("logger", [spec("CSVLogger", save_dir="../elsewhere")]),
        ("logger", "{class_path: CSVLogger, init_args: {save_dir: OUT}}"),
        ("logger", spec("CSVLogger", save_dir=".", name="../elsewhere")),
        ("profiler", spec("SimpleProfiler", dirpath="elsewhere", filename="f")),
        ("callbacks", [spec("ModelCheckpoint", dirpath="OUT")]),
        ("callbacks", [spec("ModelCheckpoint", dirpath="~nobody/elsewhere\0")]),
    ],
    ids=["absolute", "above", "YAML", "a name", "profiler", "callback", "no path"],
)
def test_a_checkpoint_writes_nothing_outside_its_runs_folder(
    keys: str, value: Any, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "elsewhere")
    there = yaml.safe_load(yaml.safe_dump(value).replace("OUT", out))
    path = forge(trained, f"trainer.{keys}", there)
    line = error_of(capsys, fit.main, "--ckpt_path", path, "--max_epochs", "2")
    assert "in its configuration is outside the run's folder" in line
    assert not list(tmp_path.rglob("elsewhere"))


@pytest.mark.parametrize(
    "filename",
    [
        "new/{epoch].__class__.__name__[0:.>2.0}/x",
        # The name of a metric is written into the file's name, too.
        "{/tmp/elsewhere}",
        "{../elsewhere}",
        # Lightning replaces {epoch wherever it stands.
        "{epoch}.{epoch.__doc__:.0}./x",
        # At epoch 46, this is a point.
        "new/{epoch:c}{epoch:c}/x",
        "{{epoch}}",
        "{",
    ],
)
def test_a_file_name_that_could_be_formatted_into_any_path_is_refused(
    filename: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forge(trained, "trainer.callbacks", [spec("ModelCheckpoint", filename=filename)])
    line = error_of(capsys, fit.main, "--ckpt_path", path, "--max_epochs", "2")
    assert "in its configuration could become any file's name" in line


def test_a_file_name_with_metrics_in_it_is_written(trained: Path) -> None:
    name = "{epoch:02d}-{val/loss:.3f}-{step}"
    path = forge(trained, "trainer.callbacks", [spec("ModelCheckpoint", filename=name)])
    assert fit.main(["--ckpt_path", path, "--run_name", "new", "--max_epochs", "2"]) == 0
    assert list(Path("checkpoints/new").rglob("epoch=01-val/loss=*-step=*.ckpt"))


def test_what_is_typed_goes_on_where_it_was(trained: Path, tmp_path: Path) -> None:
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "mine")]
    assert (
        fit.main(["--ckpt_path", str(trained), "--run_name", "typed", *logger, "--max_epochs", "2"])
        == 0
    )
    assert fit.main(["--run_name", "typed", "--ckpt_path", "auto", "--max_epochs", "3"]) == 0
    assert list((tmp_path / "mine").rglob("metrics.csv"))


def test_what_is_typed_again_is_written_where_it_says(trained: Path, tmp_path: Path) -> None:
    logger = spec("CSVLogger", save_dir=str(tmp_path / "mine"))
    path = forge(trained, "trainer.logger", logger)
    typed = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "mine")]
    words = ["--ckpt_path", path, "--run_name", "typed", "--max_epochs", "2", *typed]
    assert fit.main(words) == 0
    assert list((tmp_path / "mine").rglob("metrics.csv"))


def test_a_section_in_disguise_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = checkpoint(trained)
    logger = spec("lightning.pytorch.loggers.CSVLogger", save_dir="../elsewhere")
    contents["run"]["config"]["trainer.logger"] = logger
    torch.save(contents, STRANGE)
    for main in (fit.main, test_command.main):
        line = error_of(capsys, main, "--ckpt_path", STRANGE)
        assert "its entry run.config.trainer.logger is not what this project writes" in line
    assert not list(Path.cwd().parent.glob("elsewhere"))


@pytest.mark.parametrize("is_a_runs", [True, False])
def test_a_callbacks_state_deletes_nothing_outside_the_runs_folder(
    is_a_runs: bool, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("precious").mkdir()
    home = Path("given")
    home.mkdir()
    if is_a_runs:
        (home / "config.yaml").write_text("")
    (home / "config.txt").write_text("")
    inside = home / "epoch=1.ckpt"
    states = {
        "above": {"kth_best_model_path": "given/../precious"},
        "absolute": {"best_k_models": {str(Path("precious").absolute()): 1.0}},
        "the folder itself": {"last_model_path": str(home.absolute())},
        "home": {"x": "~/precious"},
        "inside": {"best_model_path": str(inside.absolute())},
        "its place": {"dirpath": str(home.absolute())},
        "no path": {"monitor": "val/loss", "metrics": {"val/loss": 1.0}, "mode": "min"},
    }
    kept = ["inside", "its place", "no path"] if is_a_runs else ["no path"]
    contents = {"callbacks": dict(states)}
    lines = drop_states_that_leave(contents, home / "last.ckpt")
    assert list(contents["callbacks"]) == kept
    assert len(lines) == len(states) - len(kept)
    forged = checkpoint(trained)
    name = "ModelCheckpoint{'monitor': 'val/loss', 'mode': 'min', 'every_n_train_steps': 0}"
    forged["callbacks"][name] = states["above"]
    torch.save(forged, home / "last.ckpt")
    loaded = AtomicCheckpointIO().load_checkpoint(home / "last.ckpt")
    assert name not in loaded["callbacks"]
    assert "the state of ModelCheckpoint in given/last.ckpt names" in capsys.readouterr().out
    assert Path("precious").is_dir()


def test_a_text_of_an_attribute_names_no_path_outside_and_breaks_the_seal_if_it_is_changed(
    trained: Path,
) -> None:
    home = Path("given")
    home.mkdir()
    attributes = {"module.log_path": "/etc/precious", "module.phase": "main", "module.count": 3}
    contents = {"callbacks": {}, "run": {"state": {"ranks": [{"attributes": dict(attributes)}]}}}
    (line,) = drop_states_that_leave(contents, home / "last.ckpt")
    assert "the attribute module.log_path in given/last.ckpt names a path outside" in line
    (rank,) = contents["run"]["state"]["ranks"]
    assert rank["attributes"].keys() == {"module.phase", "module.count"}
    forged = checkpoint(trained)
    assert is_own(forged)
    forged["run"]["state"]["ranks"][0]["attributes"]["module.phase"] = "another"
    assert not is_own(forged)


@pytest.mark.parametrize(
    ("place", "is_one"),
    [
        ("['dirpath']", True),
        ("['best_model_path']", True),
        ("a key of ['best_k_models']", True),
        ("['files']['first']", True),
        ("module.log_path", True),
        ("module.models.0.phase", False),
        ("module.profile", False),
        ("['direction']", False),
        ("['rootless']", False),
    ],
)
def test_a_text_is_a_path_by_whole_words_of_its_own_name(place: str, is_one: bool) -> None:
    assert is_path(place, "min") == is_one


@pytest.mark.parametrize("name", ["run-id.txt", ".lock", "metrics.csv", "tensorboard"])
def test_nothing_is_written_through_a_link_in_a_runs_folder(
    name: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.parent, "checkpoints/r")
    target = Path("precious")
    target.write_text("text")
    link = Path("checkpoints/r", name)
    link.unlink(missing_ok=True)
    link.symlink_to(target.absolute())
    words = ["--run_name", "r", "--ckpt_path", "auto", "--max_epochs", "2"]
    assert "is a link out of the run's folder" in error_of(capsys, fit.main, *words)
    assert target.read_text() == "text"


# What is shown


def test_control_characters_reach_no_terminal(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    forge(trained, "model.init_args.network", spec(f"somewhere.{evil}"))
    assert "\x1b" not in error_of(capsys, test_command.main, "--ckpt_path", STRANGE)
    contents = checkpoint(trained)
    contents["run"]["run_name"] = f"r{evil}"
    torch.save(contents, STRANGE)
    assert test_command.main("numerals", ["--ckpt_path", STRANGE]) == 0
    assert not set(evil) & set("\x1b\x07\x9b\u202e") & set(capsys.readouterr().out)
    assert without_control_characters("a\tb\nc é 数") == "a\tb\nc é 数"


# Files that claim more than they hold


ALIASES = "{a: &a [x, x], b: &b [*a, *a], c: &c [*b, *b]}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x" * 50_000, "has 50,000 characters"),
        (ALIASES, "YAML with aliases"),
        ("[" * 2000 + "]" * 2000, "nested too deeply"),
        ("- " * 3000, "nested too deeply"),
        ("[" * 100_000, "characters"),
        ("&a [*a]", "YAML with aliases"),
        ({"x" * 50_000: 1}, "has 50,000 characters"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_text_over_which_the_parser_would_take_long_is_refused(
    value: Any, said: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(trained, "model.init_args.optimizer_args", {"x": value})
    start = time.monotonic()
    assert said in error_of(capsys, test_command.main, "--ckpt_path", STRANGE)
    assert time.monotonic() - start < 10


def test_a_class_name_of_ten_thousand_letters_is_refused_at_once(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x" * 9_000, "x." * 4_500 + "x"):
        forge(trained, "model.init_args.network", spec(name))
        start = time.monotonic()
        error_of(capsys, test_command.main, "--ckpt_path", STRANGE)
        assert time.monotonic() - start < 10


def put_deep_lists(path: Path, text: str, depth: int) -> None:
    """Put a list in a list in a list into a checkpoint, in the place of a text.

    No pickler writes so many, but a stranger may: ``]`` begins a list, ``a`` puts it into another.
    """
    written = b"X" + len(text).to_bytes(4, "little") + text.encode()
    lists = b"]" * depth + b"a" * (depth - 1)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            if name.endswith("data.pkl"):
                assert written in data
                data = data.replace(written, lists)
            archive.writestr(name, data)


def test_a_checkpoint_that_is_nested_too_deeply_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forge(trained, "data", {"x": "DEEP"})
    put_deep_lists(Path(path), "DEEP", 3000)
    line = error_of(capsys, test_command.main, "--ckpt_path", path)
    assert "it is nested too deeply" in line


def compressed(contents: dict[str, Any]) -> None:
    """Zeros, packed."""
    contents["state_dict"]["more"] = torch.zeros(50_000_000)
    torch.save(contents, "plain.ckpt")
    packing = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile("plain.ckpt") as plain, zipfile.ZipFile(STRANGE, "w", packing) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    Path("plain.ckpt").unlink()


def huge(contents: dict[str, Any]) -> None:
    contents["state_dict"]["more"] = torch.zeros(1).expand(2**40)
    torch.save(contents, STRANGE)


def multiplied(contents: dict[str, Any]) -> None:
    item: list[Any] = ["x"] * 10
    for _ in range(40):
        item = [item, item]
    contents["callbacks"]["more"] = item
    torch.save(contents, STRANGE)


def hashed(contents: dict[str, Any]) -> None:
    """A key whose hash would visit each of 2**60 places."""
    torch.save(contents, "plain.ckpt")
    with zipfile.ZipFile("plain.ckpt") as plain, zipfile.ZipFile(STRANGE, "w") as changed:
        for name in plain.namelist():
            is_pickle = name.endswith("data.pkl")
            changed.writestr(name, pickled_with_key() if is_pickle else plain.read(name))
    Path("plain.ckpt").unlink()


def pickled_with_key() -> bytes:
    """A pickle of a dictionary with one key: 60 tuples in each other, each holding the one before
    twice.
    """
    level = b""
    for number in range(60):
        place = (1_000_000 + number).to_bytes(4, "little")
        # Remember the tuple, take it a second time, make a tuple of both.
        level += b"r" + place + b"j" + place + b"\x86"
    return b"\x80\x02}" + b"X\x01\x00\x00\x00x\x85" + level + b"K\x01s."


def large(contents: dict[str, Any]) -> None:
    """A network of 40 GB."""
    network = spec("torch.nn.Linear", in_features=100_000, out_features=100_000)
    contents["run"]["config"]["model"]["init_args"]["network"] = network
    torch.save(contents, STRANGE)


def hidden(contents: dict[str, Any]) -> None:
    """Many values in dictionaries whose methods say that there are none."""
    item: Any = ["x"] * 10
    for _ in range(40):
        item = OrderedDict(a=item, b=item)
        item.values = Counter
        item.items = Counter
    contents["callbacks"]["more"] = item
    torch.save(contents, STRANGE)


def truncated(contents: dict[str, Any]) -> None:
    torch.save(contents, STRANGE)
    whole = Path(STRANGE).read_bytes()
    Path(STRANGE).write_bytes(whole[: len(whole) // 2])


def sparse(contents: dict[str, Any]) -> None:
    """A shape of 2**60 values, of which one is stored. It is no danger until somebody makes it
    dense.
    """
    contents["state_dict"]["more"] = torch.sparse_coo_tensor(
        [[0], [0]], [1.0], (2**30, 2**30), check_invariants=True
    )
    torch.save(contents, STRANGE)


KINDS = (compressed, huge, multiplied, hidden, hashed, large, truncated, sparse)
FILES = {kind.__name__: kind for kind in KINDS}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures as Linux does")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.nightly if kind == "compressed" else ())
        for kind in FILES
    ],
)
def test_no_file_takes_more_than_three_times_its_size(
    kind: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FILES[kind](checkpoint(trained))
    torch.zeros(1).add(1)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    start = time.monotonic()
    line = error_of(capsys, test_command.main, "--ckpt_path", STRANGE)
    seconds = time.monotonic() - start
    taken = memory("VmHWM") - before
    size = Path(STRANGE).stat().st_size
    assert taken < 3 * size + 60 * 2**20
    assert seconds < 20
    assert "--ckpt_path" in line
    with capsys.disabled():
        print(f"\n{kind}: {size / 1e6:.1f} MB, {taken / 1e6:.1f} MB taken, {seconds:.1f} s")


MADE_IN_PASSING: dict[str, tuple[str, Any]] = {
    "a row of thresholds": (
        "metrics",
        {"x": spec("torchmetrics.classification.BinaryAUROC", thresholds=1_500_000_000)},
    ),
    "a state for each place": (
        "metrics",
        {"x": spec("torchmetrics.aggregation.RunningMean", window=10**9)},
    ),
    "a thousand million layers": (
        "network",
        spec("torch.nn.LSTM", input_size=1, hidden_size=1, num_layers=10**9),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "a row of thresholds" else pytest.mark.nightly)
        for name in MADE_IN_PASSING
    ],
)
def test_what_a_configuration_makes_is_bounded_by_the_file(
    name: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, value = MADE_IN_PASSING[name]
    forge(trained, f"model.init_args.{key}", value)
    start = time.monotonic()
    line = error_of(capsys, test_command.main, "--ckpt_path", STRANGE)
    assert "makes larger layers than the file holds" in line
    assert time.monotonic() - start < 20


def test_loaders_prepare_no_thousand_million_batches_ahead(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forge(trained, "data.init_args.prefetch_factor", 10**9)
    line = error_of(capsys, test_command.main, "--ckpt_path", path, "--data.num_workers", "1")
    assert "--data.prefetch_factor must be at most 1000, got 1000000000." in line


@pytest.mark.parametrize("name", ["swin_v2_t", "densenet121", "efficientnet_b0"])
def test_a_network_saved_in_half_precision_is_made(name: str) -> None:
    network = torchvision.models.get_model_builder(name)
    size = sum(weight.nbytes for weight in network().state_dict().values()) // 2
    with BoundedMaking(size, AssertionError("refused")):
        network()


def test_a_range_is_as_long_as_torch_makes_it() -> None:
    for words in ((5,), (2, 9), (0, 1, 0.25), (9, 2, -2)):
        assert length_of_range(*words) == len(torch.arange(*words))


def test_a_dictionary_in_a_file_hides_none_of_its_methods(tmp_path: Path) -> None:
    value: Any = OrderedDict(a=1)
    value.values = Counter
    contents = {"state_dict": {}, "loops": {}, "callbacks": {"x": [value]}}
    torch.save(contents, tmp_path / STRANGE)
    with pytest.raises(UserError, match="hides a method"):
        read(tmp_path / STRANGE)


def test_what_a_state_dict_knows_of_its_versions_is_read(tmp_path: Path) -> None:
    weights = nn.BatchNorm1d(2).state_dict()
    torch.save({"state_dict": weights, "loops": {}}, tmp_path / "x.ckpt")
    versions = read(tmp_path / "x.ckpt")["state_dict"]._metadata
    assert versions == weights._metadata  # type: ignore[attr-defined]


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def test_a_file_that_only_just_holds_what_it_claims_is_read(trained: Path) -> None:
    assert read(trained)["run"]["run_name"] == "r"


# Entries of odd types


ODD_CALLBACKS: dict[str, dict[str, Any]] = {
    "a number": {"RunTimer": 7},
    "a text for seconds": {"RunTimer": {"seconds": "text\x1b[2J"}},
    "a number for metrics": {"WrongNumbers": {"metrics": 7, "weights": None}},
}
ODD_STATES: dict[str, Any] = {
    "callback_metrics": {"a": "b"},
    "metric_rows": "x",
    "ranks.module": [[7]],
}


def refused_resume(contents: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a training prints that should go on from such a file."""
    contents["run"]["state"]["outline"] = outline(contents)
    torch.save(contents, STRANGE)
    return error_of(capsys, fit.main, "--ckpt_path", STRANGE, "--max_epochs", "2")


@pytest.mark.parametrize("name", ODD_CALLBACKS)
def test_an_odd_state_of_our_callbacks_is_one_line(
    name: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = checkpoint(trained)
    contents["callbacks"] |= ODD_CALLBACKS[name]
    line = refused_resume(contents, capsys)
    assert "cannot be resumed: it holds something else than such a run saves" in line
    assert "\x1b" not in line


@pytest.mark.parametrize("name", ODD_STATES)
def test_an_odd_entry_of_the_state_is_one_line(
    name: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = checkpoint(trained)
    entries = contents["run"]["state"]
    if name.startswith("ranks."):
        entries = entries["ranks"][0]
    entries[name.removeprefix("ranks.")] = ODD_STATES[name]
    line = refused_resume(contents, capsys)
    assert "cannot be resumed: it holds something else than such a run saves" in line


@pytest.mark.filterwarnings("ignore:Device capability of x unknown")
def test_a_strategy_with_an_odd_backend_is_one_line() -> None:
    # What DDPStrategy(process_group_backend="x") calls
    store = torch.distributed.HashStore()
    refused = pytest.raises(UserError, match="refuses the strategy: Unknown backend type x")
    with refused, refusals_as_errors(None, lambda: False):
        torch.distributed.init_process_group("x", store=store, rank=0, world_size=1)


@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_root_with_a_zero_byte_is_one_line(
    command: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = checkpoint(trained)
    contents["run"]["config"]["data"]["init_args"] |= {"root": "a\0b", "source": "mnist"}
    torch.save(contents, STRANGE)
    main, words = COMMANDS[command]
    line = error_of(capsys, main, *words, "--ckpt_path", STRANGE)
    assert "--data.root must be a folder's name" in line
