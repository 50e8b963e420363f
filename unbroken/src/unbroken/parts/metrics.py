"""Sums of metrics that are not finished yet, and values that were logged."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor
from torchmetrics import Metric, MetricTracker
from unbroken import contract, lightning_internals
from unbroken.parts.part import Part
from unbroken.stopping.ranks import say

PYTHONS_REDUCTIONS = {"max": max, "min": min, "sum": sum}


class ModuleSums(Part):
    """The sums that a module, or an object in an attribute of it, keeps outside of torchmetrics and
    ``self.log``.

    See :class:`contract.KeepsSums`.
    """

    name = "module"

    def take(self, trainer: Trainer) -> dict[str, Any]:
        module = trainer.lightning_module
        sums: dict[str, Any] = {}
        if isinstance(module, contract.KeepsSums):
            sums |= module.metric_state()
        for name, keeper in keepers_in_attributes(module):
            sums[name] = keeper.metric_state()
        return sums

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        module = trainer.lightning_module
        own = dict(value)
        for name, keeper in keepers_in_attributes(module):
            if name in own:
                keeper.load_metric_state(own.pop(name))
        if own and isinstance(module, contract.KeepsSums):
            module.load_metric_state(own)


def keepers_in_attributes(module: LightningModule) -> Iterator[tuple[str, contract.KeepsSums]]:
    """The objects in attributes of a module that keep sums, each with its name in a checkpoint. It
    begins with a dot, unlike the names of the module's own sums.
    """
    for name, value in vars(module).items():
        # Its class is asked, because some objects have an attribute of any name.
        if hasattr(type(value), "metric_state") and isinstance(value, contract.KeepsSums):
            yield f".{name}", value


class MetricStates(Part):
    """The unfinished sums of every torchmetrics metric of a module.

    Torchmetrics' own ``metric_state`` lacks what a wrapper counts or keeps for itself, such as a
    minimum so far. Numbers, texts and lists that a metric keeps in plain attributes are of
    :class:`unbroken.parts.undeclared.attributes.PlainAttributes`.
    """

    name = "metrics"
    is_read_after_training = True

    def take(self, trainer: Trainer) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, metric in trainer.lightning_module.named_modules():
            if isinstance(metric, Metric):
                # Lists of tensors may hang on their graph.
                states[name] = recursive_detach(own_values(metric), to_cpu=True)
        return states

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        module = trainer.lightning_module
        for name, part in list(module.named_modules()):
            if isinstance(part, MetricTracker):
                make_earlier_epochs(name, part, value)
        for name, metric in module.named_modules():
            if isinstance(metric, Metric):
                give_values(metric, value.get(name, {}))


def give_values(metric: Metric, values: dict[str, Any]) -> None:
    """Give a metric back what :func:`own_values` has found."""
    for key, state in values.items():
        # Each metric gets its own copy: those of a compute group were saved as one tensor.
        setattr(metric, key, move_data_to_device(copy.deepcopy(state), metric.device))


def own_values(metric: Metric) -> dict[str, Any]:
    """The sums of a metric, with the tensors and counters that it keeps beside them."""
    values: dict[str, Any] = {}
    for name, value in vars(metric).items():
        is_counter = name.startswith("_") and type(value) is int
        if isinstance(value, Tensor) or is_counter:
            values[name] = value
    return values | metric.metric_state


def make_earlier_epochs(name: str, tracker: MetricTracker, states: dict[str, Any]) -> None:
    """Let a tracker of metrics have as many epochs as it had when the states were taken."""
    while any(key.startswith(f"{name}.{len(tracker)}") for key in states):
        tracker.increment()


class LoggedSums(Part):
    """What ``self.log`` has summed up in this epoch of training so far, how it was logged, and its
    value of a step.

    Without it the logged mean of an interrupted epoch would be the mean of its end (Lightning issue
    17543).
    """

    name = "logged"
    changes_in_validation = False

    def take(self, trainer: Trainer) -> dict[str, dict[str, Any]]:
        sums: dict[str, dict[str, Any]] = {}
        for key, logged in lightning_internals.training_results(trainer).items():
            meta = logged.meta
            is_a_group_of_steps = meta.sync.group is not None and not meta.on_epoch
            if logged.has_reset or is_a_group_of_steps:
                continue
            how = {
                name: value for name, value in vars(meta).items() if isinstance(value, (bool, str))
            }
            how["reduce_fx"] = meta.reduce_fx.__name__
            how["sync_dist"] = meta.sync.should
            how["rank_zero_only"] = meta.sync.rank_zero_only
            # Its sum, the samples in it, and its value of the last step. A torchmetrics metric has
            # its own sums, which are of MetricStates.
            parts = {k: x.detach().cpu() for k, x in vars(logged).items() if isinstance(x, Tensor)}
            sums[key] = {
                "how": how,
                "is_grouped": meta.sync.group is not None,
                "is_pythons": meta.reduce_fx in PYTHONS_REDUCTIONS.values(),
                "parts": parts,
            }
        return sums

    def give_back(self, trainer: Trainer, value: dict[str, dict[str, Any]]) -> None:
        """Before the first batch.

        It then counts as a later one: at an epoch's first batch Lightning forgets.
        """
        module = trainer.lightning_module
        for key, saved in value.items():
            how = dict(saved["how"])
            if saved["is_grouped"]:
                # A group of ranks cannot be saved, and must be the same when a value is logged
                # again.
                what = f"{how['name']} is logged with a sync_dist_group"
                say(f"{what}: in this epoch its sum begins anew.")
                continue
            if saved["is_pythons"]:
                # Lightning finds torch's functions by their names, and Python's it wants as
                # functions.
                how["reduce_fx"] = PYTHONS_REDUCTIONS[how["reduce_fx"]]
            parts = {name: part.to(module.device) for name, part in saved["parts"].items()}
            if "value" in parts:
                first = parts["value"]
            else:
                first = module.get_submodule(how["metric_attribute"])
            lightning_internals.log_again(trainer, key, first, how, parts)


def logged_since(before: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """The values that were logged since others were the latest. Lightning keeps those of earlier
    epochs and validations, and replaces the object of each that is logged again.
    """
    latest = trainer.callback_metrics
    return {name: value for name, value in latest.items() if value is not before.get(name)}


class CallbackMetrics(Part):
    """The latest value of everything that was logged.

    A plateau scheduler may follow an earlier validation's.
    """

    name = "callback_metrics"
    is_read_after_training = True
    of_each_rank = False

    def take(self, trainer: Trainer) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = {}
        for name, value in getattr(trainer, self.name).items():
            metrics[name] = torch.as_tensor(value).detach().cpu()
        return metrics

    def give_back(self, trainer: Trainer, value: dict[str, Tensor]) -> None:
        for name, number in value.items():
            if not isinstance(number, Tensor):
                raise TypeError(f"the metric {name} is no tensor")
        getattr(trainer, self.name).update(value)


class LoggedMetrics(CallbackMetrics):
    """The latest value of everything that loggers get. A step may read it."""

    name = "logged_metrics"


class ProgressBarMetrics(CallbackMetrics):
    """The latest value of everything that the progress bar shows."""

    name = "progress_bar_metrics"
