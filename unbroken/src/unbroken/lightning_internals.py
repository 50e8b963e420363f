"""The only file that uses private names of Lightning, torch, torchmetrics and jsonargparse: one
function each, with its reason.

Each function says what it buys and what public way is missing. :func:`check` looks the names up
when a run starts. If a version lacks one, the run ends with one line, instead of ignoring a signal
or losing a sum later.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.metadata
import inspect
import platform
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from lightning.fabric.utilities import data as file_about_loaders
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

# Buys that a method of the loop can be replaced (seams.py). Public way missing: no hook comes
# before an epoch's loaders are made.
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop  # noqa: F401
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    launchers,
)
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors import callback_connector
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from unbroken.errors import UserError
from unbroken.tensors.same_values import is_same, is_strided
from unbroken.tensors.unsized import CANNOT_BE_AVERAGED, has_lazy_layers

# Where layers, weights and optimizers have the hooks that were registered. Public way missing: none
# tells which there are.
HOOKS_OF_LAYERS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_WEIGHTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

KNOWN_VERSIONS = "lightning 2.6.6 to below 2.7"

# Where a state dict keeps the versions of a module's parts. Buys that a stranger's file gives these
# and nothing else that steers how weights are loaded. Public way missing.
METADATA = "_metadata"

# Module: the names in it that this file uses. An attribute that only instances have cannot be
# looked up. A class attribute of the same file stands for it, where there is one.
NAMES = {
    "lightning.pytorch.trainer.connectors.signal_connector": [
        "_SignalConnector.register_signal_handlers",
    ],
    "lightning.pytorch.trainer.connectors.accelerator_connector": [
        "_AcceleratorConnector.is_distributed",
    ],
    "lightning.pytorch.trainer.connectors.callback_connector": [
        "_CallbackConnector._configure_checkpoint_callbacks",
    ],
    "lightning.pytorch.trainer.connectors.checkpoint_connector": [
        "_CheckpointConnector.hpc_save_path",
    ],
    "lightning.pytorch.trainer.connectors.logger_connector": [
        "_LoggerConnector.should_reset_tensors",
    ],
    "lightning.pytorch.loops.fit_loop": [
        "_FitLoop.setup_data",
        "_FitLoop._should_reload_train_dl",
    ],
    "lightning.pytorch.strategies.launchers": ["_MultiProcessingLauncher"],
    "lightning.pytorch.loops.loop": ["_Loop.restarting"],
    "lightning.pytorch.loops.evaluation_loop": [
        "_EvaluationLoop._is_sequential",
        "_ModuleMode.restore",
    ],
    "lightning.pytorch.trainer.call": ["_call_lightning_module_hook"],
    "lightning.pytorch.trainer.trainer": ["Trainer._run"],
    "lightning.pytorch.loops.training_epoch_loop": [
        "_TrainingEpochLoop._broadcast_sigterm_tensor",
    ],
    "lightning.pytorch.trainer.connectors.logger_connector.result": [
        "_ResultCollection.valid_items",
        "_ResultCollection.log",
        "_ResultMetric.update",
        "_Metadata.is_mean_reduction",
    ],
    "lightning.fabric.strategies.launchers.subprocess_script": ["_ChildProcessObserver.run"],
    "lightning.fabric.utilities.data": ["_replace_dunder_methods"],
    "torchmetrics": ["Metric.update_count"],
    "torch": ["Tensor._version"],
    "torch.utils.data": ["DataLoader._get_iterator"],
    "torch.utils.data.dataloader": [
        "_BaseDataLoaderIter",
        "_MultiProcessingDataLoaderIter._mark_worker_as_unavailable",
        "_MultiProcessingDataLoaderIter._shutdown_workers",
    ],
    "torch._utils": ["ExceptionWrapper"],
    "multiprocessing.queues": ["Queue._on_queue_feeder_error"],
    "torch.nn": ["Module._compiled_call_impl", "Module._call_impl"],
    "torch.cuda.memory": ["_record_memory_history", "_dump_snapshot"],
    "torch.utils._python_dispatch": ["TorchDispatchMode"],
    "torch.utils._pytree": ["tree_leaves"],
}

# The same of the command line. A Trainer in a script of the user's own needs none of them.
NAMES_OF_THE_PARSER = {
    "jsonargparse._optionals": ["_config_read_mode"],
    "jsonargparse._common": ["denying_import_path_entry"],
}


def check(modules: dict[str, list[str]] = NAMES) -> None:
    """Look up private names that this file uses; a UserError where one is missing."""
    try:
        for module, names in modules.items():
            attrgetter(*names)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{_version_of(module)} lacks a name that this project needs ({error})."
            f" Known to work: {KNOWN_VERSIONS}, and the versions in requirements.lock."
        ) from None


def _version_of(module: str) -> str:
    """The package of a module, and its version."""
    package = module.partition(".")[0]
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        # It comes with Python.
        return f"Python {platform.python_version()}"


# The Trainer's making


def refuse_without_checkpointing(kind: type[Callback]) -> None:
    """Let a Trainer that has a callback of this kind, and ``enable_checkpointing=False``, end in
    one line that names both.

    Buys: Lightning says that a ModelCheckpoint was found, where there is none. Public way missing:
    nothing of a callback's is called while a Trainer is made.
    """
    original: Any = callback_connector._CallbackConnector._configure_checkpoint_callbacks
    if getattr(original, "refuses", None) is kind:
        return

    def configure(self: Any, enable_checkpointing: bool) -> None:
        has_one = any(isinstance(callback, kind) for callback in self.trainer.callbacks)
        if has_one and not enable_checkpointing:
            raise UserError(
                f"Trainer(enable_checkpointing=False) and Trainer(barebones=True) leave out what"
                f" {kind.__name__} is for: remove that argument, or the callback."
            )
        original(self, enable_checkpointing)

    configure.refuses = kind  # type: ignore[attr-defined]
    connector: Any = callback_connector._CallbackConnector
    connector._configure_checkpoint_callbacks = configure


# Hooks of callbacks

# Those that Lightning calls for every batch of a training and its validations, as a callback has
# them that does nothing there.
EMPTY_HOOKS = frozenset(
    {
        Callback.on_train_batch_start,
        Callback.on_before_zero_grad,
        Callback.on_before_backward,
        Callback.on_after_backward,
        Callback.on_before_optimizer_step,
        Callback.on_train_batch_end,
        Callback.on_validation_batch_start,
        Callback.on_validation_batch_end,
    }
)


def leave_out_empty_hooks() -> None:
    """Keep Lightning from calling hooks of a batch that do nothing.

    It calls six hooks of every callback in a step, and times each call for a profiler, which takes
    longer than most hooks. Before each call it asks ``callable(hook)``. Lightning's module ``call``
    gets a ``callable`` of ours, which answers no for an empty hook. The callbacks stay as they are,
    so that everybody else may call or replace each hook at any time. Public way missing: every
    callback has all hooks.
    """
    vars(call)["callable"] = does_something


def call_empty_hooks_again() -> None:
    """Undo :func:`leave_out_empty_hooks`: Python's own ``callable`` shows again."""
    vars(call).pop("callable", None)


def does_something(hook: Any) -> bool:
    """Whether a hook can be called and is not empty."""
    is_empty = isinstance(hook, MethodType) and hook.__func__ in EMPTY_HOOKS
    return callable(hook) and not is_empty


# Stopping


def leave_signals_alone(trainer: Trainer) -> None:
    """Keep Lightning from handling SIGTERM and SLURM's signal, and from a broadcast between ranks
    at every step.

    Buys: a stop at the same step on all ranks, no broadcast inside a signal handler (it hung 1 time
    in 8), no wait for the device. Public way missing: the Trainer has no switch for its handlers
    (Lightning issues 20806, 21406, 21487).
    """

    def nothing() -> None: ...

    trainer._signal_connector.register_signal_handlers = nothing  # type: ignore[method-assign]
    trainer._signal_connector.received_sigterm = False
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = nothing  # type: ignore[method-assign]


def let_lightning_handle_signals(trainer: Trainer) -> None:
    """Undo :func:`leave_signals_alone`: a later ``trainer.predict`` is Lightning's own again."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def note_sigterm(trainer: Trainer) -> None:
    """Let ``trainer.received_sigterm`` be true: the step is saved, and the run ends now.

    Lightning's loops would raise at once where it is true, before anything is saved. Public way
    missing: the property has no setter.
    """
    trainer._signal_connector.received_sigterm = True


def cluster_environment(trainer: Trainer) -> Any:
    """The plugin that knows the cluster. Buys SLURM's requeue in a script. Public way missing: only
    strategies of several ranks have it.
    """
    return trainer._accelerator_connector.cluster_environment


def start_method_of_ranks(trainer: Trainer) -> str | None:
    """``fork`` or ``spawn`` where the Trainer starts its ranks as functions; None elsewhere.

    Buys a refusal at the start in the place of a crash at the end. Public way missing: the
    strategy's name is not kept.
    """
    launcher: Any = trainer.strategy.launcher
    if isinstance(launcher, launchers._MultiProcessingLauncher):
        return str(launcher._start_method)
    return None


def saves_in_parts(strategy: Any) -> bool:
    """Whether a Trainer's strategy writes a checkpoint as a folder, to which each rank adds its
    part.

    Buys a refusal at the start in the place of checkpoints that no resume finds. Public way
    missing: how FSDP and its like save is kept under a private name.
    """
    if isinstance(strategy, FSDPStrategy):
        return bool(strategy._state_dict_type == "sharded")
    if isinstance(strategy, ModelParallelStrategy):
        return bool(strategy._save_distributed_checkpoint)
    return isinstance(strategy, DeepSpeedStrategy)


def next_requeue_checkpoint(trainer: Trainer) -> Path:
    """Where Lightning would save as SLURM's signal comes.

    Buys that a script without a ``ckpt_path`` resumes from there, as from Lightning's own. Public
    way missing: no other name leads there.
    """
    return Path(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def brings_optimizers(trainer: Trainer) -> bool:
    """Whether the checkpoint that was read has states of optimizers to load.

    Public way missing: a hook that is called later than ours may have taken them out.
    """
    return bool(trainer._checkpoint_connector._loaded_checkpoint.get("optimizer_states"))


def asked_checkpoint(trainer: Trainer) -> Any:
    """The ``ckpt_path`` that the running ``trainer.fit`` or ``trainer.test`` was called with.

    Public way missing: ``trainer.ckpt_path`` is the file that was found for it, or None.
    """
    return _checkpoint_given_to(
        [Trainer.fit, Trainer.validate, Trainer.test, Trainer.predict], trainer
    )


def found_checkpoint(trainer: Trainer) -> Any:
    """The file that Lightning has found for it; None where there is none.

    Public way missing: ``trainer.ckpt_path`` tells it only when all ``setup`` hooks are done.
    """
    return _checkpoint_given_to([Trainer._run], trainer)


def _checkpoint_given_to(calls: list[Any], trainer: Trainer) -> Any:
    """The ``ckpt_path`` of the one of these methods that runs."""
    codes = [call.__code__ for call in calls]
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") is trainer:
            return frame.f_locals.get("ckpt_path")
        frame = frame.f_back
    return None


def release_child_processes() -> list[Any]:
    """Keep Lightning's observer from killing this process as its child ranks end with an error.

    Returns the child ranks, each a ``Popen``. Buys: exit code 143, not 137, of a DDP run. Public
    way missing: the observer's thread cannot be stopped.
    """
    released: list[Any] = []
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            released += thread._child_processes  # type: ignore[attr-defined]
            thread._child_processes = []  # type: ignore[attr-defined]
    return released


# Data and ranks


def take_over_sharing(trainer: Trainer) -> bool:
    """Keep Lightning from putting a DistributedSampler of its own into loaders; returns whether it
    would have.

    Buys: exact shares from a Trainer with default arguments, whose sampler would repeat samples in
    an evaluation. The user who typed ``use_distributed_sampler=False`` has shared the data himself.
    Public way missing: the Trainer does not show this argument again.
    """
    connector = trainer._accelerator_connector
    shares = connector.use_distributed_sampler
    connector.use_distributed_sampler = False
    return shares


def let_lightning_share(trainer: Trainer, shares: bool) -> None:
    """Put back what :func:`take_over_sharing` has found."""
    trainer._accelerator_connector.use_distributed_sampler = shares


def unwrap_classes_of_loaders() -> None:
    """Give the classes of loaders and batch samplers their own methods back.

    Lightning wraps three of their methods while it calls a hook that makes loaders
    (``_replace_dunder_methods``), and leaves them wrapped where the hook fails. In a notebook whose
    cell is mended and runs again, each loader would then keep a list of all that is ever set in it.
    Public way missing: none tells that they are wrapped.
    """
    for base in (DataLoader, BatchSampler):
        for kind in {base} | file_about_loaders.get_all_subclasses(base):
            for name in ("__init__", "__setattr__", "__delattr__"):
                if name in vars(kind):
                    setattr(kind, name, _unwrapped(vars(kind)[name]))
                if f"__old{name}" in vars(kind):
                    delattr(kind, f"__old{name}")


def _unwrapped(method: Any) -> Any:
    """A method without the wrappers of Lightning's file about loaders."""
    while getattr(method, "__globals__", None) is vars(file_about_loaders):
        method = method.__wrapped__
    return method


def makes_loaders_now(trainer: Trainer) -> bool:
    """Whether the fit loop is about to ask for the training's loaders: it has none yet, or makes
    them anew.

    Buys that their maker finds in a resumed run what it found before (``BeforeHooksOfEpoch``).
    Public way missing: each epoch's start calls ``setup_data``, which decides.
    """
    loop: Any = trainer.fit_loop
    return loop._combined_loader is None or bool(loop._should_reload_train_dl)


def exchange_loaders(trainer: Trainer, other: Callable[[Any], Any]) -> None:
    """Let the Trainer have ``other(loader)`` in the place of each loader that it has read.

    Buys that ``trainer.train_dataloader`` is the user's own after a run. Public way missing: it
    cannot be set.
    """
    loops: list[Any] = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
    for loop in (*loops, trainer.validate_loop, trainer.test_loop):
        loaders = loop._combined_loader
        if loaders is not None:
            loaders.flattened = [other(loader) for loader in loaders.flattened]


def evaluated(trainer: Trainer, batch_idx: int, loader_idx: int) -> tuple[list[Any], bool]:
    """The loaders of the evaluation that runs, and whether this is the last batch of one of them.

    For loaders that are read side by side: of all. Public way missing: how they are read is the
    loop's secret.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    if trainer.testing:
        loop = trainer.test_loop
    elif trainer.state.fn == "validate":
        loop = trainer.validate_loop
    if loop._is_sequential:
        is_last = batch_idx + 1 == loop.max_batches[loader_idx]
    else:
        is_last = loop.batch_progress.is_last_batch
    return loop._combined_loader.flattened, is_last


def mode_of_training_loaders(trainer: Trainer) -> str:
    """How training reads several loaders: a mode of :class:`CombinedLoader`, such as ``min_size``.

    Buys that nothing is promised of an epoch whose end Lightning would count anew. Public way
    missing: ``trainer.train_dataloader`` gives the loaders without their mode.
    """
    loaders: Any = trainer.fit_loop._combined_loader
    mode: str = loaders._mode
    return mode


def makes_its_own_iterator(loader: DataLoader[Any]) -> bool:
    """Whether a loader's class does more to its batches than PyTorch's.

    Buys that what PyTorch Geometric's loaders of neighbours do to each batch is done. Public way
    missing: they override this method alone.
    """
    return type(loader)._get_iterator is not DataLoader._get_iterator


def iterator_of(part: str) -> property:
    """The ``_iterator`` of an attribute, as a loader's own.

    Buys that Lightning ends its workers after training. Public way missing: Lightning looks for
    this attribute of a loader alone.
    """
    owner = attrgetter(part)

    def read(self: Any) -> Any:
        return owner(self)._iterator

    def write(self: Any, value: Any) -> None:
        owner(self)._iterator = value

    def forget(self: Any) -> None:
        # Lightning deletes it since 2.7. Workers end with the last name of their iterator.
        owner(self)._iterator = None

    return property(read, write, forget)


def queues_to_workers(batches: Any) -> list[Any]:
    """The queues through which a loader's iterator asks its workers for batches; none for other
    iterators.

    Buys that the garbage collector leaves them open until the iterator has told its workers to end
    (see :func:`unbroken.loading.workers.iterate`). Public way missing: they are attributes of
    the iterator alone.
    """
    return getattr(batches, "_index_queues", [])


def let_go_of_workers(workers: Iterable[BaseProcess]) -> None:
    """Let torch shut down the iterators of loaders that have these workers, without waiting for the
    workers themselves. They can be killed then.

    Buys: torch tells workers to end through locks, and a worker that is killed may hold one, so
    that torch would wait for ever. It would also end the run, because a worker has died. Public way
    missing: torch waits five seconds for each worker.
    """
    ending = set(workers)
    for iterator in gc.get_objects():
        # Some objects pretend to be of another class, and import a package when they are asked.
        if not issubclass(type(iterator), _BaseDataLoaderIter):
            continue
        if not ending.isdisjoint(getattr(iterator, "_workers", [])):
            iterator._workers = []
            iterator._shutdown_workers()


def tell_what_cannot_be_sent() -> None:
    """In a loader's worker: send the error where a batch cannot be sent, and the run ends with it.

    Buys one line where ``/dev/shm`` is full, or a batch cannot be pickled: else Python prints the
    error of its sending thread and drops the batch, and the training waits for it for ever, deaf
    to signals. Public way missing: torch makes the queue, and Python calls its method private.
    """
    from multiprocessing.queues import Queue

    from torch._utils import ExceptionWrapper

    def send_error(queue: Any, error: BaseException, item: Any) -> None:
        if isinstance(error, ConnectionError):
            # The training has ended.
            return
        number = item[0]
        told = ExceptionWrapper((type(error), error, error.__traceback__), "as a batch was sent")
        queue.put((number, told))

    Queue._on_queue_feeder_error = send_error  # type: ignore[attr-defined]


# Loops


def call_module_hook(trainer: Trainer, name: str) -> None:
    """Call a hook of the module as Lightning's loop does.

    Public way missing: Lightning leaves ``on_train_epoch_start`` out where an epoch goes on, and
    only its own call tells ``self.log`` where it is.
    """
    call._call_lightning_module_hook(trainer, name)


def end_restart(trainer: Trainer) -> None:
    """Let a resumed epoch begin or end like any other.

    Buys that a ReduceLROnPlateau steps at its end, and that no step is counted twice. Public way
    missing: the setter of ``restarting`` sets it again where ``max_steps`` ends the run.
    """
    trainer.fit_loop._restarting = False
    trainer.fit_loop.epoch_loop.restarting = False


def prepare_resumed_epoch(
    trainer: Trainer,
    before_batches: Callable[[], None],
    *,
    is_before_batch: bool,
    was_validated: bool,
) -> None:
    """Let the epoch that a resumed run begins with begin where the run was stopped.

    ``before_batches`` is called once in it: samplers have been told the epoch, and the hooks of its
    start were called. No batch was read, but for the first one of a loader without a length. Before
    that the epoch is made as long as its loaders say now.
    Lightning asks for the lengths anew as each epoch begins, but for the first one of a start: that
    one has the lengths of before those hooks, which may set another batch size. Buys that a resumed
    epoch knows its last batch.

    Where a validation was due after the last batch, Lightning would begin with the end of that
    batch, without the validation. Buys that a ReduceLROnPlateau which is stepped within epochs does
    not step twice. Public way missing: nothing is called between the hooks, the loop's counters and
    its first batch.

    Args:
        trainer: Has read the checkpoint.
        before_batches: Called without arguments.
        is_before_batch: Whether the run was stopped before a batch, and begins with it.
        was_validated: Whether a validation had followed the last batch: see ``clean_counters`` in
            parts/loops.py.
    """
    loop: Any = trainer.fit_loop.epoch_loop

    def start(data_fetcher: Any) -> None:
        # The class's method shows again as soon as the instance has none of that name.
        del loop.on_run_start
        length = sized_len(data_fetcher.combined_loader)
        # The first epoch of a run has the lengths of before its hooks, also where it is resumed.
        if trainer.current_epoch > 0 and None not in (data_fetcher.length, length):
            data_fetcher.length = length
        before_batches()
        loop.on_run_start(data_fetcher)
        if is_before_batch:
            # clean_counters has taken it off.
            loop._batches_that_stepped += int(was_validated)
            loop._restarting = False

    loop.on_run_start = start


def stop_after_validation(trainer: Trainer) -> None:
    """Let a resumed epoch begin with the validation that an early stop had asked for, and end.

    Lightning validates where ``should_stop`` is set, but enters no epoch with it. Buys that this
    validation is not left out. Public way missing: nothing is called between the look whether the
    epoch is done and the one whether a validation is due.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    original = loop.advance

    def advance(data_fetcher: Any) -> None:
        # The class's method shows again as soon as the instance has none of that name.
        del loop.advance
        trainer.should_stop = True
        original(data_fetcher)

    loop.advance = advance


def validated_batches(trainer: Trainer) -> dict[int, int]:
    """Batches of each loader that validations have read: the steps of what they log in a step.

    Public way missing: no checkpoint holds it.
    """
    return trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader


def modes_before_validation(trainer: Trainer) -> dict[str, bool]:
    """Within a validation: whether each part of the module was in training mode before it.

    Buys that parts which are trained in eval mode stay so after a resume. Public way missing:
    within a validation all parts are in eval mode, and only its loop knows which ones return.
    """
    return trainer.fit_loop.epoch_loop.val_loop._module_mode.mode


# Values that were logged


def training_results(trainer: Trainer) -> Any:
    """What ``self.log`` has collected in this epoch of training, by key.

    Public way missing (issue 17543).
    """
    return trainer.fit_loop.epoch_loop._results


def current_results(trainer: Trainer) -> Iterable[tuple[str, Any]]:
    """What ``self.log`` has collected in the loop that runs, and has not reset.

    Public way missing: ``trainer.callback_metrics`` holds other loops' values, too, and not their
    samples.
    """
    results = trainer._results
    return () if results is None else results.valid_items()


def log_again(
    trainer: Trainer, key: str, value: Any, how: dict[str, Any], parts: dict[str, Tensor]
) -> None:
    """Let the training have logged a value before: the one under ``key``, with its sums ``parts``.

    Public way missing: ``self.log`` cannot be told of samples that are already summed up.
    """
    results = training_results(trainer)
    results.log(value=value, **how, sync_dist_fn=trainer.strategy.reduce, batch_size=1)
    vars(results[key]).update(parts)
    trainer._logger_connector._first_loop_iter = False


@contextmanager
def as_inside_the_epoch(trainer: Trainer) -> Iterator[None]:
    """Let a look at the logged values, in the hooks of an epoch's end, compute none of that epoch.

    Lightning computes an epoch's value when it is first asked for, and keeps it. Buys that hooks
    which come later still add to a metric, and that ranks add up their sums before. Public way
    missing: nothing tells the latest values without computing.
    """
    connector = trainer._logger_connector
    before = connector._first_loop_iter
    connector._first_loop_iter = False
    try:
        yield
    finally:
        connector._first_loop_iter = before


def buffers_left_out(part: nn.Module) -> set[str]:
    """The names of a layer's own buffers that its state dict leaves out.

    Public way missing: to compare ``named_buffers`` with a state dict starts FSDP at the wrong
    module, and gathers all weights.
    """
    return part._non_persistent_buffers_set


def before_toggle(module: LightningModule) -> dict[nn.Parameter, bool]:
    """Which parameters ``module.untoggle_optimizer`` lets train again. Empty: no optimizer is
    toggled.

    Buys a resume between the two. Public way missing: the module notes it under this name alone.
    """
    states: dict[Any, bool] = module._param_requires_grad_state
    return states


def toggle_again(module: LightningModule, states: dict[nn.Parameter, bool]) -> None:
    """Let an optimizer be toggled as :func:`before_toggle` has found it."""
    module._param_requires_grad_state = states  # type: ignore[assignment]


def versions_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """By parameter, numbers that are others as soon as it has been changed in place or replaced.

    A lazy parameter, which a forward pass is still to make, has none.
    """
    versions = {}
    for name, parameter in module.named_parameters():
        if not is_lazy(parameter):
            versions[name] = version_of(parameter)
    return versions


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Numbers that are others as soon as a tensor has been changed in place or replaced.

    Buys a look whether a validation changes weights, without a copy of them. Public way missing: a
    tensor tells its version under this name alone.
    """
    # A sparse or nested tensor has no memory of its own. On the device "meta" none has.
    place = tensor.data_ptr() if is_strided(tensor) else id(tensor)
    # One that was made in inference mode cannot be changed in place outside of it.
    return place, 0 if tensor.is_inference() else tensor._version


# Validations by the clock


def validates_by_the_clock(trainer: Trainer) -> bool:
    """Whether ``val_check_interval`` is a time.

    Buys a line that says that a resume is not exact. Public way missing: the Trainer keeps no
    ``val_check_interval`` then.
    """
    interval: float | None = trainer._val_check_time_interval  # type: ignore[attr-defined]
    return interval is not None


# Communication of gradients


def state_of_communication(trainer: Trainer) -> Any:
    """What the communication hook of DDP keeps from step to step, such as PowerSGD's errors; None
    where there is no hook, or it keeps nothing.

    Buys a line that says so. Public way missing: a DDPStrategy tells its arguments under no public
    name. A strategy of another kind has none.
    """
    state = getattr(trainer.strategy, "_ddp_comm_state", None)
    # Hooks that keep nothing are given the ranks' group.
    group = getattr(torch.distributed, "ProcessGroup", ())
    return None if isinstance(state, group) else state


# Averaged weights


def averaged_models(trainer: Trainer) -> dict[Any, Any]:
    """The averaged weights of ``WeightAveraging`` callbacks, and the device that the callback was
    told, if any.

    Buys: the same running statistics on every rank. Public way missing: the callback has no
    attribute for its model.
    """
    found: dict[Any, Any] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            found[callback._average_model] = callback._device
    return found


def forget_averages(trainer: Trainer) -> None:
    """After training: let a checkpoint that is tested give the module its averaged weights.

    A callback that still has its averages would load the trained weights into the module instead.
    Public way missing: the callback does not ask whether it is in a training.
    """
    advice = "You're using the WeightAveraging callback, but loading a checkpoint outside"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):
            callback._average_model = None
            # It tells what happens then, and that it can be ignored.
            warnings.filterwarnings("ignore", advice)


def average_what_setup_has_made(trainer: Trainer, is_loaded: bool) -> None:
    """Let averaged weights begin as a copy of the module that its own ``setup`` has made.

    Lightning calls ``setup`` of callbacks before the module's own. So their copy lacks what the
    module makes or changes there: layers, buffers of another size, the mean of the data. Public way
    missing: the callbacks have no attribute for their model.

    Args:
        trainer: Its module has been set up.
        is_loaded: Whether the module has the weights of a checkpoint, and the callbacks are still
            to load theirs.

    Raises:
        UserError: for lazy layers, which have no values to average.
    """
    module = trainer.lightning_module
    for average in averaged_models(trainer):
        average.module = _as_set_up(average.module, module, is_loaded)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging) and callback._average_model is not None:
            callback._average_model = _as_set_up(callback._average_model, module, is_loaded)


def _as_set_up(copied: Any, module: LightningModule, is_loaded: bool) -> Any:
    """``copied``, or a new copy of the module where that one lacks what ``setup`` has made."""
    if has_lazy_layers(module):
        raise UserError(CANNOT_BE_AVERAGED)
    if not _lacks_what_setup_has_made(copied, module, is_loaded):
        return copied
    before = next(copied.parameters(), None)
    made = copy.deepcopy(module)
    if before is not None:
        # Where it was, and not in the half precision that the strategy may have brought since.
        made.to(before.device)
        if next(made.parameters()).dtype != before.dtype:
            made.to(before.dtype)
    return made


def _lacks_what_setup_has_made(copied: Any, module: LightningModule, is_loaded: bool) -> bool:
    ours = _tensors_by_name(module)
    theirs = _tensors_by_name(copied)
    our_shapes = {name: tensor.shape for name, tensor in ours.items()}
    their_shapes = {name: tensor.shape for name, tensor in theirs.items()}
    if our_shapes != their_shapes:
        return True
    compared = set(ours)
    if is_loaded:
        # The others have the values of the checkpoint, as the copy will have.
        compared -= module.state_dict().keys()
    for name in compared:
        value = theirs[name].to(ours[name])
        if not is_same(value, ours[name]):
            return True
    return False


def _tensors_by_name(module: nn.Module) -> dict[str, Tensor]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in tensors}


def average_on_the_device(trainer: Trainer) -> None:
    """Put averaged weights where the trained ones are, unless the callback was told where; their
    count on the host.

    Buys: no copy of all weights to the CPU and no wait for the count at every step. Public way
    missing: no switch.
    """
    for average, device in averaged_models(trainer).items():
        count: Any = average.n_averaged.cpu()
        average.to(device or trainer.strategy.root_device)
        average.n_averaged = stays_on_the_host(count)


def stays_on_the_host(count: Any) -> Any:
    """A count that is not moved by ``to``.

    A number on the host may be added to numbers on a device.
    """

    def stay(*_: Any) -> Any:
        return count

    count.to = stay
    return count


# The command line


@contextmanager
def values_are_no_files() -> Iterator[None]:
    """Inside, a parser reads no value from a file.

    Buys: a checkpoint brings in no other file. Public way missing.
    """
    options: Any = importlib.import_module("jsonargparse._optionals")
    mode = options._config_read_mode
    # "Readable and not readable": no path is both.
    options._config_read_mode = "rR"
    try:
        yield
    finally:
        options._config_read_mode = mode


@contextmanager
def parser_asks_before_it_imports(ask: Callable[[str], None]) -> Iterator[None]:
    """Inside, a parser calls ``ask`` with each name that a value gives, before it imports what has
    that name. ``ask`` raises where that may not be.

    Buys: nothing that a stranger's file names is imported before it is judged. The parser looks
    each such name up in its list of names that are denied. Public way missing: such a list is fixed
    beforehand, and holds until the process ends.
    """
    check(NAMES_OF_THE_PARSER)
    common: Any = importlib.import_module("jsonargparse._common")
    look_up = common.denying_import_path_entry

    def ask_and_look_up(path: str) -> Any:
        ask(path)
        return look_up(path)

    common.denying_import_path_entry = ask_and_look_up
    try:
        yield
    finally:
        common.denying_import_path_entry = look_up


# Profiling


def profiled_module(profiler: Profiler) -> LightningModule:
    """The module that is trained.

    Buys regions around the network in the step profiler. Public way missing: a Profiler has none to
    its Trainer or module.
    """
    return profiler._lightning_module  # type: ignore[attr-defined]


@contextmanager
def surround_calls(
    network: nn.Module, before: Callable[[], Any], after: Callable[[], Any]
) -> Iterator[None]:
    """Inside, call ``before`` and ``after`` around every call of a network, compiled or not.

    Buys the time of its forward pass. Public way missing: ``nn.Module.compile`` would compile hooks
    as well.
    """
    compiled = network._compiled_call_impl
    call_network = compiled or network._call_impl

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        before()
        outputs = call_network(*args, **kwargs)
        after()
        return outputs

    network._compiled_call_impl = surrounded
    yield
    network._compiled_call_impl = compiled


@contextmanager
def memory_history(path: Path, max_entries: int) -> Iterator[None]:
    """Record CUDA allocations and frees inside, and write the newest, with their stacks, for
    PyTorch's memory viewer.

    Buys ``--memory_snapshot``. PyTorch documents these underscored names, and has no others.
    """
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")
    yield
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except OSError as error:
        # A picture of the memory is not worth a run.
        warnings.warn(f"the memory snapshot could not be written ({error})", stacklevel=2)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def operations_in(call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Inside, each PyTorch operation is handed to ``call`` with its arguments. It returns what
    ``call`` returns.

    Buys a count of the CPU's memory, before it is taken too. Public way missing: PyTorch has
    ``TorchDispatchMode`` in this module alone; ``TorchFunctionMode``, which is public, sees neither
    the backward pass nor what an operation makes inside.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return call(func, args, kwargs or {})

    with Operations():
        yield


def takes_device(operation: Any) -> bool:
    """Whether a PyTorch operation, as :func:`operations_in` has it, is told the device of its
    result.

    Buys the size of a tensor before its memory is taken. Public way missing.
    """
    return any(argument.name == "device" for argument in operation._schema.arguments)


def results_of_operations(
    tell: Callable[[list[Any]], None],
) -> AbstractContextManager[None]:
    """Inside, call ``tell`` with what each PyTorch operation returns, as a flat list."""
    from torch.utils._pytree import tree_leaves

    def call(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = operation(*arguments, **named)
        tell(tree_leaves(result))
        return result

    return operations_in(call)
