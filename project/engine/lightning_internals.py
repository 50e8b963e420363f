"""The only file that uses private names of other packages, such as Lightning: one function each, with its reason.

:func:`check` looks up every name once when a run starts. If a version lacks one, the run ends with one line, instead
of ignoring a signal or losing a sum later.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import threading
import weakref  # feature: tune, memory
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, WeightAveraging
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor, nn
from torchmetrics import Metric, MetricTracker

from project.engine.ranks import of_all_ranks, say
from project.errors import UserError

KNOWN_VERSIONS = "lightning 2.6.6 to below 2.7"
NAMES = {  # module: names in it that are used here. For an attribute of instances, another name of the same file.
    "lightning.pytorch.trainer.connectors.signal_connector": [
        "_SignalConnector.register_signal_handlers"
    ],
    "lightning.pytorch.trainer.connectors.logger_connector": [
        "_LoggerConnector.should_reset_tensors"
    ],
    "lightning.pytorch.loops.loop": ["_Loop.restarting"],
    "lightning.pytorch.loops.evaluation_loop": [
        "_EvaluationLoop._is_sequential",
        "_ModuleMode.restore",
    ],
    "lightning.pytorch.trainer.call": ["_call_lightning_module_hook"],
    "lightning.pytorch.loops.training_epoch_loop": ["_TrainingEpochLoop._broadcast_sigterm_tensor"],
    "lightning.pytorch.trainer.connectors.logger_connector.result": [
        *("_ResultCollection.valid_items", "_ResultCollection.log", "_ResultMetric.update"),
        "_Metadata.is_mean_reduction",
    ],
    "lightning.fabric.strategies.launchers.subprocess_script": ["_ChildProcessObserver.run"],
    "torchmetrics": ["Metric.update_count"],
    "torch.utils.data": ["DataLoader._get_iterator"],
    "jsonargparse._optionals": ["_config_read_mode"],
    "torch.nn": ["Module._compiled_call_impl", "Module._call_impl"],  # feature: profiler
    "torch.cuda.memory": ["_record_memory_history", "_dump_snapshot"],  # feature: memory
    "torch.utils._python_dispatch": ["TorchDispatchMode"],  # feature: tune, memory
    "torch.utils._pytree": ["tree_leaves"],  # feature: tune, memory
}


def check() -> None:
    """Look up every private name that this file uses; a UserError where one is missing."""
    try:
        for module, names in NAMES.items():
            attrgetter(*names)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        version = importlib.metadata.version("lightning")
        lacks = f"lacks a name that stopping and exact resume need ({error}). Known to work: {KNOWN_VERSIONS}"
        raise UserError(
            f"lightning {version} {lacks}. Run pip install 'lightning>=2.6.6,<2.7'."
        ) from None


def leave_signals_alone(trainer: Trainer) -> None:
    """Keep Lightning from handling SIGTERM and SLURM's signal, and from a broadcast between ranks at every step. Buys:
    a stop at the same step on all ranks, no broadcast inside a signal handler (it hung 1 time in 8), no wait for the
    device. Public way missing: the Trainer has no switch for its handlers (Lightning issues 20806, 21406, 21487).
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


@contextmanager
def values_are_no_files() -> Iterator[None]:
    """Inside, a parser reads no value from a file. Buys: a checkpoint brings in no other file. Public way missing."""
    options: Any = importlib.import_module("jsonargparse._optionals")
    mode, options._config_read_mode = options._config_read_mode, "rR"  # readable and not readable
    try:
        yield
    finally:
        options._config_read_mode = mode


def begin_epoch_again(trainer: Trainer) -> None:
    """Call ``on_train_epoch_start`` of the module and of the user's callbacks, for an epoch that goes on. Buys what
    they set for an epoch, such as frozen layers in eval mode. Weights, buffers and callbacks' states stay as they are.
    Public way missing: Lightning leaves the hook out there, and only its own call tells ``self.log`` where it is.
    """
    module, not_again = trainer.lightning_module, ("lightning.", __name__.rpartition(".")[0])
    kept = [
        (tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())
    ]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        hook = callback.on_train_epoch_start
        if not hook.__module__.startswith(not_again) or isinstance(
            callback, GradientAccumulationScheduler
        ):
            state = copy.deepcopy(callback.state_dict())
            hook(trainer, module)
            if state:  # it may count epochs
                callback.load_state_dict(state)
    call._call_lightning_module_hook(trainer, "on_train_epoch_start")
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


def end_restart(trainer: Trainer) -> None:
    """Let a resumed epoch begin or end like any other: a ReduceLROnPlateau steps at its end, and no step is counted
    twice. Public way missing: the setter of ``restarting`` sets it again where ``max_steps`` ends the run.
    """
    trainer.fit_loop._restarting = trainer.fit_loop.epoch_loop.restarting = False


def release_child_processes() -> list[Any]:
    """Keep Lightning's observer from killing this process as its child ranks end with an error; returns these, each a
    ``Popen``. Buys: exit code 143, not 137, of a DDP run. Public way missing: the observer's thread cannot be stopped.
    """
    released: list[Any] = []
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            released += thread._child_processes  # type: ignore[attr-defined]
            thread._child_processes = []  # type: ignore[attr-defined]
    return released


def averaged_models(trainer: Trainer) -> dict[Any, Any]:
    """The averaged weights that ``WeightAveraging`` callbacks hold, and the device that the callback was told, if any.
    Buys: the same running statistics on every rank. Public way missing: the callback has no attribute for its model.
    """
    found = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]  # type: ignore[attr-defined]
    return {each._average_model: each._device for each in found if each._average_model is not None}


def average_on_the_device(trainer: Trainer) -> None:
    """Put averaged weights where the trained ones are, unless the callback was told where, and their count on the host.
    Buys: no copy of all weights to the CPU and no wait for the count at every step. Public way missing: no switch.
    """
    for average, device in averaged_models(trainer).items():
        count: Any = average.n_averaged.cpu()
        average.to(device or trainer.strategy.root_device)
        count.to = lambda *_, count=count: (
            count
        )  # a number on the host may be added to numbers on a device
        average.n_averaged = count


def parts_in_eval_mode(trainer: Trainer, within_validation: bool) -> list[str]:
    """Names of the parts of the module that are trained in eval mode. Buys that they stay so after a resume.
    Public way missing: within a validation all parts are in eval mode, and only its loop knows which ones return.
    """
    kept = trainer.fit_loop.epoch_loop.val_loop._module_mode.mode if within_validation else None
    modes = kept or {name: part.training for name, part in trainer.lightning_module.named_modules()}
    return [name for name, training in modes.items() if not training]


def validated_batches(trainer: Trainer) -> dict[int, int]:
    """Batches of each loader that validations have read: the steps of what they log in a step. Public way missing: no
    checkpoint holds it.
    """
    return trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader


def metric_states(module: LightningModule) -> dict[str, Any]:
    """The unfinished sums of every torchmetrics metric of a module: plain values and tensors on the CPU. Public way
    missing: ``metric_state`` lacks what a wrapper counts or keeps for itself, such as a minimum.
    """
    states: dict[str, Any] = {}
    for name, metric in module.named_modules():
        if isinstance(metric, Metric):
            own = {
                k: x
                for k, x in vars(metric).items()
                if isinstance(x, Tensor) or (k[0] == "_" and type(x) is int)
            }
            states[name] = recursive_detach(
                own | metric.metric_state, to_cpu=True
            )  # lists may hang on their graph
    return states


def restore_metric_states(module: LightningModule, states: Mapping[str, Any]) -> None:
    """Restore the sums that :func:`metric_states` returned, in a tracker of metrics those of earlier epochs, too."""
    for name, part in [*module.named_modules()]:
        while isinstance(part, MetricTracker) and any(
            key.startswith(f"{name}.{len(part)}") for key in states
        ):
            part.increment()
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and name in states:
            for key, value in states[
                name
            ].items():  # each its own: those of a compute group are one tensor
                setattr(metric, key, move_data_to_device(copy.deepcopy(value), metric.device))


def training_sums(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """What ``self.log`` has summed up in this epoch of training so far, how it was logged, and its value of a step.
    Buys the logged mean of an interrupted epoch. Public way missing: a checkpoint does not hold it (issue 17543).
    """
    sums: dict[str, dict[str, Any]] = {}
    for key, logged in trainer.fit_loop.epoch_loop._results.items():
        meta, sync, reduce = logged.meta, logged.meta.sync, logged.meta.reduce_fx
        if not logged.has_reset and (meta.on_epoch or sync.group is None):
            how = {
                name: value for name, value in vars(meta).items() if isinstance(value, (bool, str))
            }
            how |= {
                "reduce_fx": reduce.__name__,
                "sync_dist": sync.should,
                "rank_zero_only": sync.rank_zero_only,
            }
            sums[key] = {
                "how": how,
                "is_grouped": sync.group is not None,
                "is_pythons": reduce in (max, min, sum),
            }
            # its sum, the samples in it, its value of the last step; a torchmetrics metric has its own: metric_states
            sums[key]["parts"] = {
                k: x.detach().cpu() for k, x in vars(logged).items() if isinstance(x, Tensor)
            }
    return sums


def restore_training_sums(trainer: Trainer, sums: dict[str, dict[str, Any]]) -> None:
    """Restore sums of :func:`training_sums` before the first batch, which then counts as a later one of the epoch: at
    an epoch's first batch Lightning forgets what was logged before.
    """
    results, module = trainer.fit_loop.epoch_loop._results, trainer.lightning_module
    for key, saved in sums.items():
        if saved[
            "is_grouped"
        ]:  # a group cannot be saved, and must be the same when a value is logged again
            say(
                f"{saved['how']['name']} is logged with a sync_dist_group: in this epoch its sum begins anew."
            )
            continue
        if saved["is_pythons"]:  # Lightning finds torch's by their names
            saved["how"]["reduce_fx"] = {"max": max, "min": min, "sum": sum}[
                saved["how"]["reduce_fx"]
            ]
        parts = {name: part.to(module.device) for name, part in saved["parts"].items()}
        value = (
            parts["value"]
            if "value" in parts
            else module.get_submodule(saved["how"]["metric_attribute"])
        )
        results.log(value=value, **saved["how"], sync_dist_fn=trainer.strategy.reduce, batch_size=1)
        vars(results[key]).update(parts)
        trainer._logger_connector._first_loop_iter = False


def share_sums(trainer: Trainer) -> None:
    """Add up over all ranks, weighted by samples, what ``self.log`` has summed in steps of an epoch, or of this loader.
    Buys: metrics that do not depend on the number of devices. Public way missing: only the module's author could set
    ``sync_dist=True``, and it counts ranks of 17 and 16 samples as 16 each; it changes no mean that is the same on all.
    """
    if trainer.world_size == 1:
        return
    results: Any = trainer._results
    entries = {
        key: logged
        for key, logged in results.valid_items()
        if logged.is_tensor
        and (x := logged.meta).fx.startswith(("training_step", "validation_step", "test_step"))
        if not x.sync.should or (x.is_mean_reduction and x.sync.group is None)
    }
    sums = {
        key: (float(x.value), int(getattr(x, "cumulated_batch_size", 0)))
        for key, x in entries.items()
    }
    ranks = of_all_ranks(sums)
    for key, logged in entries.items():
        values, counts = zip(*(rank[key] for rank in ranks if key in rank), strict=True)
        join: Any = (
            max if logged.meta.is_max_reduction else min if logged.meta.is_min_reduction else sum
        )
        logged.value = torch.tensor(join(values), dtype=torch.float64).to(logged.value)
        if logged.meta.is_mean_reduction:
            logged.cumulated_batch_size = torch.tensor(sum(counts), device=logged.value.device)


def of_rank_zero_alone(trainer: Trainer) -> list[str]:
    """What an evaluation logged outside of its step, with another value on each rank: nobody can tell how to join them.
    Buys a line about a wrong value. Public way missing: ``trainer.callback_metrics`` holds the training's values, too.
    """
    items = trainer._results.valid_items() if trainer._results is not None else ()
    alone = [
        x for _, x in items if x.is_tensor and x.meta.fx.endswith("_end") and not x.meta.sync.should
    ]
    own = {
        x.meta.name: f"{float(x.value) / float(getattr(x, 'cumulated_batch_size', 1)):.5g}"
        for x in alone
    }
    ranks = of_all_ranks(own)
    return [name for name in own if any(rank.get(name) != own[name] for rank in ranks)]


def evaluated(trainer: Trainer, batch_idx: int, loader_idx: int) -> tuple[list[Any], bool]:
    """The loaders of the evaluation that runs, and whether this is the last batch of one of them, or of all that are
    read side by side. Public way missing: how they are read is the loop's secret.
    """
    loop: Any = trainer.test_loop if trainer.testing else trainer.fit_loop.epoch_loop.val_loop
    last = (
        batch_idx + 1 == loop.max_batches[loader_idx]
        if loop._is_sequential
        else loop.batch_progress.is_last_batch
    )
    return loop._combined_loader.flattened, last


def iterator_of(part: str) -> property:
    """The ``_iterator`` of an attribute, as a loader's own. Buys that Lightning ends its workers after training. Public
    way missing: Lightning looks for this attribute of a loader alone.
    """
    owner = attrgetter(part)
    return property(
        lambda self: owner(self)._iterator,
        lambda self, value: setattr(owner(self), "_iterator", value),
    )


def profiled_module(profiler: Profiler) -> LightningModule:  # feature: profiler
    """The module that is trained. Buys regions around the network in the step profiler. Public way missing: a Profiler
    has none to its Trainer or module.
    """
    return profiler._lightning_module  # type: ignore[attr-defined]


@contextmanager  # feature: profiler
def surround_calls(
    network: nn.Module, before: Callable[[], Any], after: Callable[[], Any]
) -> Iterator[None]:
    """Inside, call ``before`` and ``after`` around every call of a network, compiled or not. Buys the time of its
    forward pass. Public way missing: ``nn.Module.compile`` would compile hooks as well.
    """
    compiled = network._compiled_call_impl
    call = compiled or network._call_impl

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        before()
        outputs = call(*args, **kwargs)
        after()
        return outputs

    network._compiled_call_impl = surrounded
    yield
    network._compiled_call_impl = compiled


@contextmanager  # feature: memory
def memory_history(path: Path, max_entries: int) -> Iterator[None]:
    """Record CUDA allocations and frees inside, and write the newest, with their stacks, for PyTorch's memory viewer.
    Buys ``--memory_snapshot``. PyTorch documents these underscored names, and has no others.
    """
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")
    yield
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager  # feature: tune, memory
def results_of_operations(tell: Callable[[list[Any]], None]) -> Iterator[None]:
    """Inside, call ``tell`` with what each PyTorch operation returns, as a flat list.

    Buys a count of the CPU's memory. Public way missing: PyTorch has ``TorchDispatchMode`` in this
    module alone; ``TorchFunctionMode``, which is public, does not see the backward pass.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Results(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            tell(tree_leaves(result))
            return result

    with Results():
        yield


class LiveMemory(ExitStack):  # feature: tune, memory
    """Counts the bytes of every CPU tensor that is made while this is active and still alive; costs microseconds each.

    Not within one operation. A compiled network runs eagerly. Above ``limit_bytes``: ``torch.OutOfMemoryError``.
    Buys what the CPU's allocator does not count. Public way missing: PyTorch has ``TorchDispatchMode`` in this module
    alone; ``TorchFunctionMode``, which is public, does not see the backward pass.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.live_bytes = self.peak_bytes = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __enter__(self) -> LiveMemory:
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        class Results(TorchDispatchMode):
            def __torch_dispatch__(
                _, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:  # noqa: N805
                result = func(*args, **(kwargs or {}))
                self.count(tree_leaves(result))
                return result

        self.enter_context(Results())
        return super().__enter__()

    def count(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made before, such as weights; one that is counted already is not counted again."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if (
                    storage not in self._counted
                ):  # PyTorch keeps one Python object per storage while that lives
                    self._counted.add(storage)
                    weakref.finalize(storage, self._add, -storage.nbytes())
                    self._add(storage.nbytes())
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            used, limit = (
                f"{self.live_bytes / 2**30:.3f} GiB",
                f"{self.limit_bytes / 2**30:.3f} GiB",
            )
            raise torch.OutOfMemoryError(f"{used} of tensors, the limit is {limit}")

    def _add(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
