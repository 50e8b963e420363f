"""What another version of Lightning, torch, torchmetrics or jsonargparse has changed of all that
the library relies on: ``python -m pytest -m lightning``.

Each thing is a test of its own. One that fails says in one line what is no longer what it was, and
which file relies on it. The lists are read from the library's source (see ``relied_on.py``), so
that nothing can be added there and forgotten here. Whatever may be missing is imported inside of
the tests.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import logging
import os
import re
import signal
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests import relied_on
from tests.relied_on import INTERNALS, LIBRARY, assigned, names_of

pytestmark = pytest.mark.lightning

NAMES: dict[str, list[str]] = assigned(INTERNALS, "NAMES")
NAMES_OF_THE_PARSER: dict[str, list[str]] = assigned(INTERNALS, "NAMES_OF_THE_PARSER")
IMPORTED = relied_on.imported()
# The last is read of a variable of another name.
ATTRIBUTES = relied_on.attributes() | {"trainer.profiler._lightning_module": {INTERNALS}}
TEXTS = relied_on.texts_waited_for()
SENTENCES = relied_on.sentences()
CLI = LIBRARY / "cli" / "cli.py"
PLAIN: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 1,
}


def tell(package: str, what: str, files: Iterable[Path]) -> NoReturn:
    """Fail with one line."""
    name = package.partition(".")[0]
    version = getattr(importlib.import_module(name), "__version__", "")
    line = f"{name} {version} {what}. It is relied on by {names_of(files)}."
    # An error that has led here is told in the line.
    raise pytest.fail.Exception(" ".join(line.split()), pytrace=False) from None


def look_up(module: str, name: str, files: Iterable[Path]) -> Any:
    """The object of that dotted name. The test fails with its first part that is missing."""
    found: Any = None
    path = module
    try:
        found = importlib.import_module(module)
        for part in name.split(".") if name else []:
            path += f".{part}"
            try:
                found = getattr(found, part)
            except AttributeError:
                found = importlib.import_module(path)
    except ImportError as error:
        missing = str(error.name).partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and missing not in relied_on.PACKAGES:
            pytest.skip(f"{missing} is not installed")
        tell(module, f"has no {path}", files)
    return found


# Names


def each_of(names: Iterable[tuple[str, str]]) -> list[Any]:
    """A test for each module and name, called after both."""
    return [pytest.param(*pair, id=".".join(pair).rstrip(".")) for pair in sorted(names)]


def names_in(modules: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(module, name) for module, names in modules.items() for name in names]


@pytest.mark.parametrize(("module", "name"), each_of(IMPORTED))
def test_a_name_that_the_library_imports_is_there(module: str, name: str) -> None:
    look_up(module, name, IMPORTED[module, name])


PRIVATE = [*names_in(NAMES), *names_in(NAMES_OF_THE_PARSER)]


@pytest.mark.parametrize(("module", "name"), each_of(PRIVATE))
def test_a_private_name_is_there(module: str, name: str) -> None:
    look_up(module, name, [INTERNALS])


@pytest.mark.parametrize(("module", "name"), each_of(relied_on.seams()))
def test_a_method_that_is_replaced_is_there(module: str, name: str) -> None:
    look_up(module, name, [LIBRARY / "seams.py"])


# Modules that the library names in a text: where an error comes from, whose lines are shown
NAMED = {
    "lightning.fabric": "cli/shown_warnings.py",
    "lightning.pytorch.callbacks.model_summary": "cli/shown_warnings.py",
    "lightning.pytorch.callbacks.stochastic_weight_avg": "cli/refusals.py",
    "lightning.pytorch.cli.instantiate_module": "storage/savable.py",
    "lightning.pytorch.loggers.mlflow": "loggers/mlflow.py",
    "lightning.pytorch.loops.progress": "cli/refusals.py",
    "lightning.pytorch.profilers.profiler": "cli/shown_warnings.py",
    "lightning.pytorch.strategies.ddp": "cli/refusals.py",
    "lightning.pytorch.trainer.connectors.checkpoint_connector": "cli/refusals.py",
    "torch.nn.parallel": "cli/refusals.py",
    "torch.optim.swa_utils": "cli/refusals.py",
    "torch.utils.data.dataloader": "cli/start.py",
}


@pytest.mark.parametrize("named", NAMED)
def test_what_the_library_names_in_a_text_is_there(named: str) -> None:
    module, _, name = named.rpartition(".")
    look_up(module, name, [LIBRARY / NAMED[named]])


# The parameters of what is called or replaced. One that is replaced is called by Lightning with
# these.
PARAMETERS = {
    "lightning.pytorch.trainer.call:_call_lightning_module_hook": "trainer hook_name",
    "lightning.pytorch.trainer.connectors.checkpoint_connector"
    ":_CheckpointConnector.hpc_save_path": "folderpath",
    "lightning.pytorch.trainer.connectors.callback_connector"
    ":_CallbackConnector._configure_checkpoint_callbacks": "self enable_checkpointing",
    "lightning.pytorch.trainer.connectors.signal_connector"
    ":_SignalConnector.register_signal_handlers": "self",
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor": (
        "self"
    ),
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.on_run_start": (
        "self data_fetcher"
    ),
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.advance": "self data_fetcher",
    "lightning.pytorch.loops.fit_loop:_FitLoop.on_run_start": "self",
    "lightning.pytorch.loops.fit_loop:_FitLoop.on_run_end": "self",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultCollection.valid_items": (
        "self"
    ),
    "lightning.pytorch.strategies:Strategy.process_dataloader": "self dataloader",
    "lightning.pytorch.strategies:Strategy.on_train_start": "self",
    "lightning.pytorch.plugins:Precision.convert_input": "self data",
    "jsonargparse._common:denying_import_path_entry": "path",
    "torch.distributed:all_gather": "tensor_list tensor group async_op",
    "torch._utils:ExceptionWrapper": "exc_info where",
    "torch.utils._pytree:tree_leaves": "tree is_leaf",
    "multiprocessing.queues:Queue._on_queue_feeder_error": "e obj",
}


@pytest.mark.parametrize("called", PARAMETERS)
def test_what_is_called_or_replaced_takes_the_same_arguments(called: str) -> None:
    module, _, name = called.partition(":")
    file = LIBRARY / "seams.py" if (module, name) in relied_on.seams() else INTERNALS
    signature = inspect.signature(look_up(module, name, [file]))
    # What a hook is called with follows behind.
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    optional = {"pl_module"}
    taken = [each.name for each in signature.parameters.values() if each.kind not in kinds]
    told = " ".join(each for each in taken if each not in optional)
    if told != PARAMETERS[called]:
        tell(module, f"has {name}({told}), and it was ({PARAMETERS[called]})", [file])


# Attributes of live objects


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Lightning's notes would stand between the lines that fail."""
    with contextlib.suppress(Exception):
        # It sets the level as it is imported.
        importlib.import_module("lightning.pytorch")
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


class Looks:
    """Looks attributes up while a Trainer trains, and keeps a checkpoint of that moment."""

    def __init__(self) -> None:
        # Chain of attributes → its first part that is missing.
        self.missing: dict[str, str] = {}
        self.checkpoint: dict[str, Any] = {}
        # Why there was no such training; empty where there was one.
        self.error = ""

    def look(self, trainer: Any) -> None:
        results = trainer.fit_loop.epoch_loop._results
        roots = {"trainer": trainer, "logged": next(iter(results.values()))}
        for chain in ATTRIBUTES:
            root, *parts = chain.split(".")
            number = found_parts(roots[root], parts)
            if number < len(parts):
                self.missing[chain] = ".".join([root, *parts[: number + 1]])


def found_parts(found: Any, parts: list[str]) -> int:
    """How many of the attributes there are, each of the one before."""
    for number, part in enumerate(parts):
        try:
            found = getattr(found, part)
        except AttributeError:
            return number
        except Exception:
            # It is there, and has no value in a training.
            found = None
        # Elsewhere it may have a value that has the others.
        if found is None:
            break
    return len(parts)


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> Looks:
    """A short training, looked at behind its second step."""
    from lightning.pytorch import Callback

    looks = Looks()
    file = tmp_path_factory.mktemp("live") / "inside.ckpt"

    class LooksOn(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(file)
                io = trainer.strategy.checkpoint_io
                looks.checkpoint = io.load_checkpoint(file, weights_only=False)
                looks.look(trainer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            train(regression(), limit_train_batches=4, max_steps=3, callbacks=[LooksOn()])
        except Exception as error:
            looks.error = repr(error)
    return looks


@pytest.fixture(scope="module")
def trained(looks: Looks) -> Looks:
    if looks.error:
        pytest.skip("the short training has failed")
    return looks


def test_a_short_training_can_be_looked_at(looks: Looks) -> None:
    if looks.error:
        tell("lightning", f"does not train as before: {looks.error}", [INTERNALS])


@pytest.mark.parametrize("chain", ATTRIBUTES)
def test_an_attribute_of_a_live_trainer_is_there(chain: str, trained: Looks) -> None:
    if chain in trained.missing:
        tell("lightning", f"has no {trained.missing[chain]} in a training", ATTRIBUTES[chain])


def observer() -> Any:
    from lightning.fabric.strategies.launchers import subprocess_script

    return subprocess_script._ChildProcessObserver(main_pid=os.getpid(), child_processes=[])


def launcher() -> Any:
    from lightning.pytorch.strategies import DDPStrategy, launchers

    return launchers._MultiProcessingLauncher(DDPStrategy(), "spawn")


def with_workers() -> Any:
    from torch.utils.data import DataLoader

    return iter(DataLoader([1], num_workers=1))  # type: ignore[arg-type]


def operation() -> Any:
    import torch

    return torch.ops.aten.add.Tensor


def of(path: str, *arguments: Any) -> Callable[[], Any]:
    """A function that makes an object of the class of that name."""

    def make() -> Any:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)(*arguments)

    return make


# Private attributes of other objects than a Trainer: how one is made
OF_OBJECTS: dict[tuple[str, str], Callable[[], Any]] = {
    ("WeightAveraging", "_average_model"): of("lightning.pytorch.callbacks.WeightAveraging"),
    ("WeightAveraging", "_device"): of("lightning.pytorch.callbacks.WeightAveraging"),
    ("StochasticWeightAveraging", "_average_model"): of(
        "lightning.pytorch.callbacks.StochasticWeightAveraging", 0.1
    ),
    ("DDPStrategy", "_ddp_comm_state"): of("lightning.pytorch.strategies.DDPStrategy"),
    ("FSDPStrategy", "_state_dict_type"): of("lightning.pytorch.strategies.FSDPStrategy"),
    ("ModelParallelStrategy", "_save_distributed_checkpoint"): of(
        "lightning.pytorch.strategies.ModelParallelStrategy"
    ),
    ("_MultiProcessingLauncher", "_start_method"): launcher,
    ("_ChildProcessObserver", "_child_processes"): observer,
    ("DataLoader", "_iterator"): of("torch.utils.data.DataLoader", [1]),
    ("_MultiProcessingDataLoaderIter", "_index_queues"): with_workers,
    ("_MultiProcessingDataLoaderIter", "_workers"): with_workers,
    ("LightningModule", "_param_requires_grad_state"): of("lightning.pytorch.LightningModule"),
    ("Module", "_non_persistent_buffers_set"): of("torch.nn.ReLU"),
    ("Module", "_compiled_call_impl"): of("torch.nn.ReLU"),
    ("OpOverload", "_schema"): operation,
}


@pytest.mark.parametrize("owned", OF_OBJECTS, ids=".".join)
def test_an_attribute_of_another_object_is_there(owned: tuple[str, str]) -> None:
    owner, name = owned
    try:
        found = OF_OBJECTS[owned]()
    except (ImportError, AttributeError, TypeError) as error:
        tell("lightning", f"makes no {owner} as before ({error})", [INTERNALS])
    if not hasattr(found, name):
        tell(type(found).__module__, f"has no {owner}.{name}", [INTERNALS])


def test_the_observer_of_ranks_is_known_by_its_name() -> None:
    name = observer().name
    if name != "child-process-observer":
        tell("lightning", f"calls its thread {name}, not child-process-observer", [INTERNALS])


def test_every_private_name_of_lightning_internals_is_looked_up_here() -> None:
    text = INTERNALS.read_text(encoding="utf-8")
    looked_up = {name for _, name in OF_OBJECTS}
    for modules in (NAMES, NAMES_OF_THE_PARSER):
        for module, names in modules.items():
            looked_up.update(module.split("."), *(name.split(".") for name in names))
    for chain in ATTRIBUTES:
        looked_up.update(chain.split("."))
    used = {line.partition(": ")[2] for line in relied_on.private_names(text)}
    assert used - looked_up == set()


def test_attributes_are_found_through_the_variables_that_stand_for_them() -> None:
    text = """
def f(self, trainer):
    loop: Any = self._trainer.fit_loop
    if trainer.testing:
        loop = trainer.test_loop
    loop._x = 1
    return trainer.datamodule.rows
"""
    function = relied_on.ast.parse(text).body[0]
    assert isinstance(function, relied_on.ast.FunctionDef)
    assert set(relied_on.chains_in(function, {"trainer"})) == {
        "trainer.fit_loop",
        "trainer.fit_loop._x",
        "trainer.testing",
        "trainer.test_loop",
        "trainer.test_loop._x",
        "trainer.datamodule",
    }


# The layout of `loops` in a checkpoint

READY = {"ready", "completed"}
STARTED = READY | {"started"}
PROCESSED = STARTED | {"processed"}
OPTIMIZER = "epoch_loop.automatic_optimization.optim_progress/optimizer"
BATCHES = {"total": PROCESSED, "current": PROCESSED}
# Counter of the fit loop → its values
LAYOUT: dict[str, set[str]] = {
    "": {
        "state_dict",
        "epoch_progress",
        *("epoch_loop.state_dict", "epoch_loop.batch_progress", "epoch_loop.scheduler_progress"),
        "epoch_loop.automatic_optimization.state_dict",
        "epoch_loop.automatic_optimization.optim_progress",
        "epoch_loop.manual_optimization.state_dict",
        "epoch_loop.manual_optimization.optim_step_progress",
        "epoch_loop.val_loop.state_dict",
        "epoch_loop.val_loop.batch_progress",
    },
    "state_dict": set(),
    "epoch_progress": {"total", "current"},
    "epoch_progress/total": PROCESSED,
    "epoch_progress/current": PROCESSED,
    "epoch_loop.state_dict": {"_batches_that_stepped"},
    "epoch_loop.batch_progress": {"total", "current", "is_last_batch"},
    "epoch_loop.batch_progress/total": PROCESSED,
    "epoch_loop.batch_progress/current": PROCESSED,
    "epoch_loop.scheduler_progress": {"total", "current"},
    "epoch_loop.scheduler_progress/total": READY,
    "epoch_loop.scheduler_progress/current": READY,
    "epoch_loop.automatic_optimization.state_dict": set(),
    "epoch_loop.automatic_optimization.optim_progress": {"optimizer"},
    OPTIMIZER: {"step", "zero_grad"},
    f"{OPTIMIZER}/step": {"total", "current"},
    f"{OPTIMIZER}/step/total": READY,
    f"{OPTIMIZER}/step/current": READY,
    f"{OPTIMIZER}/zero_grad": {"total", "current"},
    f"{OPTIMIZER}/zero_grad/total": STARTED,
    f"{OPTIMIZER}/zero_grad/current": STARTED,
    "epoch_loop.manual_optimization.state_dict": set(),
    "epoch_loop.manual_optimization.optim_step_progress": {"total", "current"},
    "epoch_loop.manual_optimization.optim_step_progress/total": READY,
    "epoch_loop.manual_optimization.optim_step_progress/current": READY,
    "epoch_loop.val_loop.state_dict": set(),
    "epoch_loop.val_loop.batch_progress": {"total", "current", "is_last_batch"},
    "epoch_loop.val_loop.batch_progress/total": PROCESSED,
    "epoch_loop.val_loop.batch_progress/current": PROCESSED,
}


@pytest.mark.parametrize("counter", LAYOUT, ids=lambda counter: f"fit_loop/{counter}")
def test_the_loops_in_a_checkpoint_have_the_same_layout(counter: str, trained: Looks) -> None:
    found: Any = trained.checkpoint["loops"]["fit_loop"]
    for key in counter.split("/") if counter else []:
        found = found.get(key, {})
    _tell_of_keys(f"loops/fit_loop/{counter}", set(found), LAYOUT[counter])


def _tell_of_keys(place: str, found: set[str], known: set[str]) -> None:
    changes = [f"lacks {key}" for key in sorted(known - found)]
    changes += [f"has a new {key}" for key in sorted(found - known)]
    if changes:
        files = ("parts/loops.py", "checkpoint/resume.py", "checkpoint/cut_epoch.py")
        what = f"saves another checkpoint: {place} {', '.join(changes)}"
        tell("lightning", what, [LIBRARY / file for file in files])


def test_a_checkpoint_has_the_same_entries(trained: Looks) -> None:
    loops = {"fit_loop", "validate_loop", "test_loop", "predict_loop"}
    _tell_of_keys("loops", set(trained.checkpoint["loops"]), loops)
    entries = {"epoch", "global_step", "pytorch-lightning_version", "state_dict"}
    entries |= {"loops", "callbacks", "optimizer_states", "lr_schedulers"}
    # A user's module may have hyperparameters.
    _tell_of_keys("its top", set(trained.checkpoint), entries)


# Texts of warnings and errors


def said_by(act: Callable[[], Any]) -> list[str]:
    """The warnings of an act, and the error that it may end with, each in one line."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except Exception as error:
            said.append(str(error))
    said += [str(warning.message) for warning in caught]
    return [" ".join(text.split()) for text in said]


def nearest(text: str, said: list[str]) -> str:
    """What was said that resembles a text most, in quotation marks."""

    def likeness(each: str) -> float:
        return difflib.SequenceMatcher(None, text, each[: len(text)]).ratio()

    return f"'{max(said, key=likeness)[:300]}'" if said else "nothing"


def train(module: Any, checkpoint: Any = None, **flags: Any) -> None:
    from lightning.pytorch import Trainer

    Trainer(**{**PLAIN, "max_epochs": 1, "limit_train_batches": 2, **flags}).fit(
        module, ckpt_path=checkpoint
    )


def regression() -> Any:
    from tests.plain_module import Regression

    return Regression()


def resumes(checkpoint: dict[str, Any], folder: Path) -> None:
    """Inside an epoch, without the callback that was there, and with a logger."""
    import torch
    from lightning.pytorch.loggers import CSVLogger

    torch.save({**checkpoint, "callbacks": {"Gone": {}}}, folder / "inside.ckpt")
    flags = {"limit_train_batches": 4, "logger": CSVLogger(folder)}
    with pytest.MonkeyPatch.context() as patched:
        # Lightning advises more workers where there are more cores.
        patched.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
        patched.setattr(os, "cpu_count", lambda: 8)
        train(regression(), folder / "inside.ckpt", **flags)


def resumes_behind_its_end(checkpoint: dict[str, Any], folder: Path) -> None:
    import torch

    torch.save(checkpoint, folder / "later.ckpt")
    for counts in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
        counts.update(dict.fromkeys(counts, 5))
    torch.save(checkpoint, folder / "later.ckpt")
    train(regression(), folder / "later.ckpt")


def overfits(checkpoint: dict[str, Any], folder: Path) -> None:
    train(regression(), overfit_batches=1, limit_train_batches=None)


def evaluates_averaged_weights(checkpoint: dict[str, Any], folder: Path) -> None:
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import WeightAveraging

    from tests.plain_module import Regression

    class Tested(Regression):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    torch.save(checkpoint, folder / "averaged.ckpt")
    module = Tested()
    trainer = Trainer(**PLAIN, limit_test_batches=1, callbacks=[WeightAveraging()])
    trainer.test(module, module.val_dataloader(), ckpt_path=folder / "averaged.ckpt")


def follows(checkpoint: dict[str, Any], folder: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    train(regression(), callbacks=[EarlyStopping("nowhere")])


def keeps_best(checkpoint: dict[str, Any], folder: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    keeps = ModelCheckpoint(folder, monitor="nowhere")
    train(regression(), enable_checkpointing=True, callbacks=[keeps])


def trains_without_a_step(checkpoint: dict[str, Any], folder: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    Trainer(**PLAIN).fit(LightningModule())


def trains_without_a_loader(checkpoint: dict[str, Any], folder: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from tests.plain_module import Regression

    class WithoutLoader(Regression):
        train_dataloader = LightningModule.train_dataloader

    Trainer(**PLAIN).fit(WithoutLoader())


def predicts(checkpoint: dict[str, Any], folder: Path) -> None:
    """With a loader whose arguments have no names."""
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from tests.plain_module import Regression, rows

    class NamesNoArguments(Regression):
        def forward(self, x: Any) -> Any:
            return self.net(x)

        def predict_dataloader(self) -> Any:
            return DataLoader(rows(8, 0), 4)

    Trainer(**PLAIN).predict(NamesNoArguments())


def is_in_slurm(checkpoint: dict[str, Any], folder: Path) -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    with pytest.MonkeyPatch.context() as patched:
        (folder / "srun").touch(0o755)
        patched.setenv("PATH", str(folder), prepend=os.pathsep)
        SLURMEnvironment.detect()


def leaves_parameters_out(checkpoint: dict[str, Any], folder: Path) -> None:
    """Under DDP, which also says what it thinks of ``self.log``."""
    import torch.distributed as dist
    from lightning.pytorch.trainer.connectors.logger_connector import result
    from torch import nn

    module = regression()
    module.unused = nn.Linear(2, 2)

    # Lightning gives this warning once in a process.
    result.warning_cache.clear()
    try:
        train(module, strategy="ddp", devices=1, limit_train_batches=3)
    finally:
        dist.destroy_process_group()


def trains_lazy_layers_in_ranks(checkpoint: dict[str, Any], folder: Path) -> None:
    import torch.distributed as dist
    from torch import nn

    file = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(nn.LazyLinear(1))
    finally:
        dist.destroy_process_group()


def starts_an_unknown_backend(checkpoint: dict[str, Any], folder: Path) -> None:
    import torch.distributed as dist

    file = f"file://{folder}/other"
    dist.init_process_group("nope", init_method=file, rank=0, world_size=1)


def uses_lazy_layers(checkpoint: dict[str, Any], folder: Path) -> None:
    from torch import nn

    _ = nn.LazyLinear(1).weight + 1


def loads_other_weights(checkpoint: dict[str, Any], folder: Path) -> None:
    from torch import nn

    nn.Linear(1, 1).load_state_dict({})


def loads_sparse_values(checkpoint: dict[str, Any], folder: Path) -> None:
    import torch

    torch.save(torch.eye(2).to_sparse(), folder / "sparse.pt")
    torch.load(folder / "sparse.pt", weights_only=True)


def calls_a_class_without_forward(checkpoint: dict[str, Any], folder: Path) -> None:
    from torch import nn

    nn.ModuleList()(1)


def asks_for_all_memory(checkpoint: dict[str, Any], folder: Path) -> None:
    import torch

    torch.empty(2**60)


def starts_many_workers(checkpoint: dict[str, Any], folder: Path) -> None:
    from torch.utils.data import DataLoader

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
        DataLoader([1], num_workers=2)  # type: ignore[arg-type]


# A text that is waited for → what brings it
def opens_pictures(checkpoint: dict[str, Any], folder: Path) -> None:
    """A picture of many pixels, and an icon whose picture is larger than the icon says."""
    from PIL import Image

    Image.new("1", (10_000, 9_000)).save(folder / "large.png")
    Image.open(folder / "large.png").close()
    Image.new("RGB", (32, 32)).save(folder / "small.png")
    inside = (folder / "small.png").read_bytes()
    header = struct.pack("<3H4B2H2I", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inside), 22)
    (folder / "x.ico").write_bytes(header + inside)
    with Image.open(folder / "x.ico") as icon:
        icon.load()


BROUGHT_BY: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "You're resuming from a checkpoint that ended before the epoch": resumes,
    "You're resuming from a checkpoint that ended before the epoch ended": resumes,
    "The '.*_dataloader' does not have many workers": resumes,
    r"Image size \(\d+ pixels\) exceeds limit": opens_pictures,
    "Image was not the expected size": opens_pictures,
    "Be aware that when using `ckpt_path`": resumes,
    "The number of training batches .* is smaller than the logging interval": resumes,
    "It is recommended to use `self.log": leaves_parameters_out,
    "parameters that were not used in producing": leaves_parameters_out,
    "You requested to overfit": overfits,
    "The `srun` command is available": is_in_slurm,
    "You're using the WeightAveraging callback, but loading a checkpoint outside": (
        evaluates_averaged_weights
    ),
    "which is not available": follows,
    "could not find the monitored key": keeps_best,
    "restored a checkpoint with current_epoch": resumes_behind_its_end,
    "method defined": trains_without_a_step,
    "must be implemented": trains_without_a_loader,
    "more than one `__init__` argument can be passed": predicts,
    "`isinstance.treespec, LeafSpec.` is deprecated": resumes,
    "This DataLoader will create": starts_many_workers,
    r"This DataLoader will create \d+ worker processes in total. Our suggested max number of worker"
    " in current system is 1,": starts_many_workers,
    "Validating sparse tensor invariants because weights_only": loads_sparse_values,
    "loading state_dict": loads_other_weights,
    'is missing the required "forward" function': calls_a_class_without_forward,
    "ninitialized parameters can't be used": trains_lazy_layers_in_ranks,
    "use an uninitialized parameter": uses_lazy_layers,
    "nknown backend": starts_an_unknown_backend,
    "t allocate memory": asks_for_all_memory,
}
# Texts that are not brought here, and why
NOT_BROUGHT = {
    **dict.fromkeys(
        (
            *("Bus error", "out of shared memory", "allocate shared memory", "write .*/torch_"),
            *("No space left on device.*shm", "bad_alloc", "failed to map segment"),
        ),
        "the machine's memory would have to be full",
    ),
    r"DataLoader worker \(pid": "test_refusals.py kills a worker",
    "Connection (reset by peer|refused)": "test_refusals.py kills a worker",
    "gloo/.*Connection (closed|reset) by peer": "test_refusals.py ends a rank",
    "nvalid backend": "older versions of torch say it",
    "must define": "the library's own data modules say it",
}


def test_every_text_that_is_waited_for_is_brought_here() -> None:
    """Whoever waits for another text adds what brings it, or why nothing here can."""
    assert sorted(TEXTS) == sorted([*BROUGHT_BY, *NOT_BROUGHT])


@pytest.fixture(scope="module")
def said(trained: Looks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], list[str]]:
    """What is said as something of :data:`BROUGHT_BY` is done, once for all of its texts."""

    @functools.cache
    def tell_what_was_said(bring: Callable[[dict[str, Any], Path], None]) -> list[str]:
        from copy import deepcopy

        folder = tmp_path_factory.mktemp(bring.__name__)
        return said_by(lambda: bring(deepcopy(trained.checkpoint), folder))

    return tell_what_was_said


@pytest.mark.parametrize("text", BROUGHT_BY, ids=lambda text: text)
def test_a_text_that_is_waited_for_is_said(text: str, said: Callable[[Any], list[str]]) -> None:
    bring = BROUGHT_BY[text]
    found = said(bring)
    # An error is known by a part of it, and a warning is filtered by how it begins.
    is_of_an_error = {path.name for path in TEXTS[text]} <= {"refusals.py", "start.py"}
    is_known = re.search if is_of_an_error else re.match
    if not any(is_known(text, each) for each in found):
        where = bring.__name__.replace("_", " ")
        what = f"(or torch) no more says '{text}' where it {where}, but {nearest(text, found)}"
        tell("lightning", what, TEXTS[text])


# Sentences of jsonargparse

CLASSES = ["--model.class_path", "tests.typed_settings.Typed"]
CLASSES += ["--data.class_path", "tests.typed_settings.Numbers"]
WRONG_NAME = ["--model.lrr", "1"]
WRONG_TYPE = ["--model.lr", "x"]
WRONG_GROUP = ["--trainer", "{nope: 1}"]
WRONG_CHOICE = ["--matmul_precision", "low"]
WRONG_FILE = ["--trainer", "no_file.yaml"]
NO_CLASS = ["--model.class_path", "Nix"]
NO_MODULE = ["--logger", "nowhere.X"]
NO_NAME = ["--logger", "torch.nn.Nix"]
OTHER_CLASS = ["--logger", "torch.nn.Linear"]
REFUSES = ["--trainer.callbacks+=tests.test_explain.Refuses"]
REFUSES_NESTED = ["--trainer.callbacks+=nowhere.X"]
LACKS = ["--trainer.callbacks+=EarlyStopping"]


def lacks_a_model() -> None:
    from lightning.pytorch import LightningModule
    from unbroken.cli.cli import OneLineParser

    parser = OneLineParser()
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.parse_args([])


def names_no_file() -> None:
    from jsonargparse.typing import Path_fr
    from unbroken.cli.cli import OneLineParser

    parser = OneLineParser()
    parser.add_argument("--path", type=Path_fr)
    parser.parse_args(["--path", "no_file"])


# What is looked for in an error → command lines, or acts, whose errors must have it
TYPED: dict[str, list[list[str] | Callable[[], None]]] = {
    r'[Pp]arser key "([\w.]+)"': [WRONG_TYPE, WRONG_CHOICE],
    r"(?:^Option|Group '([\w.]+)' does not accept option) '([\w.]+)'": [WRONG_NAME, WRONG_GROUP],
    r"[Uu]nrecognized arguments?:? (.*)": [["--nope", "1"], ["nope"]],
    r"argument (?:\S+/)?(\S+): expected one argument": [["--max_epochs"]],
    r"Errors:\ \-\ ": [REFUSES],
    r"\ Given\ value\ type:\ ": [REFUSES],
    r"Does\ not\ validate\ against\ any\ of\ the\ Union": [REFUSES],
    "arguments are required: (model|data)$": [lacks_a_model],
    "File does not exist: '?([^']+)'?": [names_no_file],
    r"class_path='([\w.]+)'": [REFUSES],
    r"Expected\ a": [REFUSES],
    r"Not\ a\ valid": [REFUSES],
    r"Subclass\ types\ expect": [REFUSES],
    r"a\ class\ path": [REFUSES],
    r"a\ dict\ with": [REFUSES],
    r"Problem with given class_path '([\w.]+)': (.+)": [REFUSES_NESTED],
    r"- --([\w.]+) (must be .+?, got .+?[.?])(?= - |$)": [WRONG_TYPE],
    r"the following arguments are required: (\w+)": [LACKS],
    r"([\w.]+)\": Unable to load config '(.+?)'": [WRONG_FILE],
    r"Expected a typing\.Literal\[([^\]]*)\]": [WRONG_CHOICE],
    r"Expected an? <class '(\w+)'>": [WRONG_TYPE, ["--max_epochs", "x"]],
    r"(?:Given value|Got value):(.+?)?(?: - | Given | Expected |$)": [WRONG_TYPE, WRONG_CHOICE],
    r"NestedArg\(key='[\w.]+', val=(.+?)\)(?: -|$| Given)": [WRONG_TYPE],
    r"Errors: - (.+?)(?= - Expected| Given value|$)": [WRONG_CHOICE],
    "dot import path": [NO_CLASS],
    "correspond to a subclass": [OTHER_CLASS],
    r"Import path(?: ([\w.]+))? does not correspond to a subclass of (\w+)": [OTHER_CLASS],
    "No module named": [NO_MODULE],
    "has no attribute": [NO_NAME],
}


def test_every_sentence_of_the_parser_that_is_read_is_brought_here() -> None:
    assert sorted(SENTENCES) == sorted(TYPED)


@functools.cache
def errors_of(words: tuple[str, ...] | Callable[[], None]) -> list[str]:
    """What jsonargparse and argparse say of a command line, as ``explain`` gets it."""
    from numerals.fit import job
    from unbroken.cli import cli
    from unbroken.errors import UserError

    found: list[str] = []
    explain = cli.explain

    def note(message: str, *further: Any) -> str:
        found.append(" ".join(message.split()))
        return explain(message, *further)

    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(cli, "explain", note)
        with contextlib.suppress(UserError):
            if callable(words):
                words()
            else:
                cli.configure(job, "fit", [*CLASSES, *words])
    return found


@functools.cache
def error_of_the_parser() -> str:
    """Why no command line can be read; empty where one can."""
    try:
        errors_of(())
    except Exception as error:
        return repr(error)
    return ""


def test_a_command_line_can_be_read() -> None:
    if error_of_the_parser():
        tell("lightning", f"reads no command line: {error_of_the_parser()}", [CLI])


@pytest.mark.parametrize(
    ("sentence", "words"),
    [(sentence, words) for sentence, lines in TYPED.items() for words in lines],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_parser_says_what_is_read(sentence: str, words: list[str] | Callable[[], None]) -> None:
    if error_of_the_parser():
        pytest.skip("no command line can be read")
    found = errors_of(words if callable(words) else tuple(words))
    if not any(re.search(sentence, each) for each in found):
        typed = words.__name__.replace("_", " ") if callable(words) else " ".join(words)
        what = f"no more says '{sentence}' of {typed}, but {nearest(sentence, found)}"
        tell("jsonargparse", what, SENTENCES[sentence])


def test_the_help_lists_known_subclasses_as_it_did() -> None:
    from jsonargparse import ArgumentParser
    from torch import nn

    parser = ArgumentParser()
    parser.add_argument("--network", type=nn.Module)
    # It warns of classes of other tests, whose files are gone.
    warnings.simplefilter("ignore")
    if re.search(r",\s+known\s+subclasses:[^)]*\)", parser.format_help()) is None:
        tell("jsonargparse", "lists no known subclasses in a help", [CLI])


# What Lightning does


def test_a_stop_is_lightnings_own_exception_with_the_code_of_its_signal() -> None:
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from unbroken.stopping.agreement import Terminated

    try:
        stop = Terminated()
    except TypeError as error:
        files = [LIBRARY / "stopping" / "agreement.py"]
        tell("lightning", f"makes its SIGTERMException in another way ({error})", files)
    assert isinstance(stop, SIGTERMException)
    assert (stop.code, stop.exit_code) == (128 + signal.SIGTERM, 128 + signal.SIGTERM)


def test_lightning_ends_the_workers_of_a_loader() -> None:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from torch.utils.data import DataLoader
    from unbroken.loading import exact_form

    plain = DataLoader(list(range(8)), 2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type,var-annotated]
    loader = exact_form(plain, training=True, seed=0)
    combined = CombinedLoader([loader])
    next(iter(combined))
    (worker,) = loader._iterator._workers
    try:
        combined.reset()
    except AttributeError as error:
        files = [INTERNALS, LIBRARY / "loading" / "exact_loader.py"]
        tell("lightning", f"ends a loader's workers in another way ({error})", files)
    assert loader._iterator is None
    worker.join(10)
    assert worker.exitcode is not None


PLANTED = [
    {"_instantiator": "planted.work"},
    {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "_class_path": "planted.Thing",
    },
]


@pytest.mark.parametrize("named", PLANTED, ids=["function", "class"])
def test_lightning_imports_nothing_that_a_checkpoint_alone_names(
    named: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``load_from_checkpoint`` did, before 2.6.6."""
    import lightning
    import torch

    from tests.plain_module import Regression

    class TakesAnything(Regression):
        def __init__(self, **_: Any) -> None:
            super().__init__()

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    checkpoint = {
        "state_dict": Regression().state_dict(),
        "pytorch-lightning_version": lightning.__version__,
        "hyper_parameters": named,
    }
    torch.save(checkpoint, tmp_path / "planted.ckpt")
    said = said_by(lambda: TakesAnything.load_from_checkpoint(tmp_path / "planted.ckpt"))
    if (tmp_path / "ran").exists():
        what = f"imports what a checkpoint's hyperparameters name ({', '.join(named)})"
        tell("lightning", what, [LIBRARY / "storage" / "savable.py"])
    assert any("planted" in each for each in said)
