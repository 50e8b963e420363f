"""The Lightning module for supervised tasks: network, loss, metrics, optimizer and schedule are configuration."""

import importlib
import inspect
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric, MetricCollection

from project.errors import UserError, nearest, require

SHAPES = ("constant", "cosine", "linear", "onecycle")  # of the learning rate over a run
# Training batches, or output values, that wait on the device to be counted in one metric update, which costs as much as
# the update for one batch: 938 of these take a tenth of an epoch of the MLP.
MOST_BATCHES, MOST_OUTPUTS = 64, 2**22
HALF = (torch.float16, torch.bfloat16)
MOST_CHANNELS = 2**20  # of a mean or standard deviation that a checkpoint may bring


class SupervisedModule(LightningModule):
    """Trains a network on batches of (inputs, targets). Device, precision, clipping and the like are Trainer flags.

    Inputs (batch, channels, ...) are uint8 in 0-255, taken as 0-1, or floating; :meth:`forward` standardizes them by
    the ``mean`` and ``std`` of the data module (one number or one per channel, of the inputs in 0-1), which are part of
    the state dict. Inputs of another type (token numbers) reach the network as they are.

    Logged, each exact over its samples and over all ranks: ``train/loss`` (log steps: the samples since the last log
    step; epoch end: the epoch), ``val/loss``, ``test/loss``, and ``train/NAME``, ``val/NAME``, ``test/NAME`` for every
    entry of ``metrics`` (epoch end). Logged losses have no class weights and no label smoothing.

    Args:
        network: Maps standardized inputs to outputs.
        loss: Name of a class in ``torch.nn``, or the import path of another loss.
        loss_args: Arguments of the loss; a list of numbers, such as class weights, becomes a tensor.
        metrics: Metrics of torchmetrics by name. They are given :meth:`predictions` and targets.
        monitor: The logged metric by which checkpoints are compared, and which ReduceLROnPlateau follows.
        mode: Whether a good ``monitor`` is small (``min``) or large (``max``).
        optimizer: Name of a class in ``torch.optim``, or the import path of another optimizer.
        lr: Peak learning rate.
        weight_decay: Given to the optimizer for weights of two or more dimensions, not for biases and norms.
        optimizer_args: Further arguments of the optimizer, such as ``{momentum: 0.9}``.
        schedule: The learning rate over the run: ``constant``; ``cosine`` or ``linear`` to 0; ``onecycle`` (cosine up
            from 1/25, cosine down to 0). Or a class of ``torch.optim.lr_scheduler``, or an import path.
        schedule_args: Arguments of a class named as ``schedule``.
        schedule_interval: How often such a class sets the rate; a shape does it at every step.
        warmup_fraction: Share of the run in which a shape climbs to ``lr``.
        compile: Compile the network in place; its checkpoints are those of the eager network.
        channels_last: Keep images and weights in channels-last order, which tensor cores and a CPU's convolutions like.
        activation_checkpointing: Recompute activations in the backward pass instead of storing them.
    """

    mean: Tensor  # buffers, (1,) or (channels,)
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        loss: str = "MSELoss",
        loss_args: dict[str, Any] = {},  # noqa: B006 - read only, as are the other plain values
        metrics: dict[str, Metric] = {},  # noqa: B006
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
        optimizer: str = "AdamW",
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        optimizer_args: dict[str, Any] = {},  # noqa: B006
        schedule: str = "linear",
        schedule_args: dict[str, Any] = {},  # noqa: B006
        schedule_interval: Literal["epoch", "step"] = "epoch",
        warmup_fraction: float = 0.2,
        compile: bool = False,
        channels_last: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        is_shape = schedule in SHAPES
        require(0 < lr < math.inf, "--model.lr", "be above 0", lr)
        require(0 <= weight_decay < math.inf, "--model.weight_decay", "be at least 0", weight_decay)
        require(
            0 <= warmup_fraction < 1,
            "--model.warmup_fraction",
            "be at least 0 and below 1",
            warmup_fraction,
        )
        must = f"be empty: {schedule} has none"
        require(not (is_shape and schedule_args), "--model.schedule_args", must, schedule_args)
        must = "be without reduction: the mean is trained"
        require("reduction" not in loss_args, "--model.loss_args", must, loss_args)
        self.save_hyperparameters(ignore=["network", "metrics"])
        self.network, self.network_text = network, str(network)  # as it was given
        self.monitor, self.mode, self.lr, self.warmup_fraction = monitor, mode, lr, warmup_fraction
        self.optimizer_name, self.weight_decay, self.optimizer_args = (
            optimizer,
            weight_decay,
            optimizer_args,
        )
        self.schedule, self.schedule_args = schedule, schedule_args
        self.schedule_interval = "step" if is_shape else schedule_interval
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        if channels_last:
            network.to(memory_format=torch.channels_last)
        if activation_checkpointing:
            recompute_activations(network)
        if compile:
            network.compile()  # in place: torch.compile(network) would prefix every key with `_orig_mod.`
        loss_class = named_class("--model.loss", loss, nn, nn.Module)
        trained = {
            k: torch.tensor(v, dtype=torch.float32) if isinstance(v, list) else v
            for k, v in loss_args.items()
        }
        measured = {
            key: value for key, value in trained.items() if key not in ("weight", "label_smoothing")
        }
        # a loss of the subclass's own is logged as it is trained
        self.measures_apart = (
            len(measured) < len(trained) and type(self).loss is SupervisedModule.loss
        )
        if "reduction" in inspect.signature(loss_class).parameters:
            measured["reduction"] = "none"  # a value per sample
        self.trained_loss, self.measured_loss = (
            make("--model.loss", loss_class, args) for args in (trained, measured)
        )
        if any(True for _ in self.trained_loss.parameters()):  # only these weights are trained
            self.measured_loss, self.measures_apart = self.trained_loss, False
        # compute groups would share one metric's sums, and checkpoints would miss the others'
        self.train_metrics = MetricCollection(dict(metrics), compute_groups=False).clone()
        self.eval_metrics = self.train_metrics.clone()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("std", torch.ones(1))
        self.register_load_state_dict_pre_hook(take_over_standardization)
        self.undecayed: list[bool] = []  # which of parameters() are spared weight decay
        self.window: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # uncounted batches: loss, outputs, targets
        self.sums: dict[
            str, Tensor
        ] = {}  # loss and samples, (2,): "recent" (log step), "epoch", "eval"

    # What a subclass may change

    def inputs(self, batch: Any) -> Any:
        """The network's input: the first part of a batch, or a batch without targets."""
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    def targets(self, batch: Any) -> Tensor:
        """The targets of the outputs, (batch, ...): the second part of a batch."""
        return batch[1]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """The loss of a batch, yours to override: a scalar, the mean, or a value per sample (batch, ...). In training
        (``self.training``) its mean is minimised; in evaluation its exact sum over samples is logged.
        """
        return self._loss(
            self.trained_loss if self.training else self.measured_loss, outputs, self.targets(batch)
        )

    def predictions(self, outputs: Tensor) -> Tensor:
        """What metrics and ``predict`` see: probabilities where the loss takes logits, else the outputs."""
        outputs = (
            outputs.float() if outputs.dtype in HALF else outputs
        )  # probabilities would be coarse
        if isinstance(self.trained_loss, nn.CrossEntropyLoss | nn.NLLLoss):
            return outputs.softmax(dim=1)
        takes_logits = isinstance(
            self.trained_loss, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss
        )
        return outputs.sigmoid() if takes_logits else outputs

    def metric_targets(self, targets: Tensor) -> Tensor:
        """Targets as metrics take them."""
        return targets

    # What Lightning calls

    def setup(self, stage: str) -> None:
        """Before training: take over ``mean`` and ``std`` of the data module, forget a training that was broken off."""
        widest = exact(torch.empty(0, device=self.trainer.strategy.root_device)).dtype
        for metrics in (self.train_metrics, self.eval_metrics):
            metrics.set_dtype(
                widest
            )  # a resumed run counts its batches in other groups; the sums must not tell
        if stage != "fit":
            return
        self.window, self.sums = [], {}
        self.train_metrics.reset()
        self.undecayed = [
            parameter.ndim < 2 for parameter in self.parameters()
        ]  # before a strategy wraps them
        datamodule = getattr(self.trainer, "datamodule", None)
        mean, std = getattr(datamodule, "mean", None), getattr(datamodule, "std", None)
        if mean is not None and std is not None:
            require(min(std) > 0, f"{type(datamodule).__name__}.std", "be above 0", std)
            self.mean, self.std = (
                torch.tensor(x, dtype=self.mean.dtype, device=self.device) for x in (mean, std)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs as the data module gives them (batch, ...), raw → outputs of the network (batch, ...)."""
        return self.network(self.standardize(inputs))

    def standardize(self, inputs: Tensor) -> Tensor:
        """Mean 0 and deviation 1 for uint8 and floating inputs (batch, channels, ...), in the type of the weights."""
        if inputs.dtype != torch.uint8 and not inputs.is_floating_point():
            return inputs
        whole = 255.0 if inputs.dtype == torch.uint8 else 1.0
        wide = torch.promote_types(torch.float32, self.mean.dtype)
        one_per_channel = (-1, *[1] * (inputs.ndim - 2))
        mean, std = ((x.to(wide) * whole).view(one_per_channel) for x in (self.mean, self.std))
        standard = inputs.sub(mean).div_(std).to(self.mean.dtype)
        return (
            standard.contiguous(memory_format=self.memory_format) if inputs.ndim == 4 else standard
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs, targets = self._answer(batch)
        loss = self.loss(outputs, batch)
        loss = loss.mean() if loss.ndim else loss
        if (
            self.window and outputs.shape != self.window[-1][1].shape
        ):  # batches are counted as one tensor
            self.count_window()
        self.window.append((loss.detach(), outputs.detach(), targets))
        # log steps may be far apart, and outputs may be large
        if len(self.window) >= MOST_BATCHES or len(self.window) * outputs.numel() > MOST_OUTPUTS:
            self.count_window()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer: Any = self.trainer
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        every = trainer.log_every_n_steps
        # self.log at every step would cost more than the step itself; Lightning drops it between log steps
        if stepped and every > 0 and trainer.global_step % every == 0:
            self.count_window()
            self._log("train", "recent")

    def on_train_epoch_end(self) -> None:
        self.count_window()
        self._log("train", "epoch", self.train_metrics)
        self.sums = {}

    def on_validation_epoch_start(self) -> None:
        self.sums.pop("eval", None)  # of a validation that was broken off
        self.eval_metrics.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Count a batch. Its outputs are for callbacks that look at predictions."""
        if len(self.targets(batch)) == 0:  # more ranks than samples
            return None
        outputs, targets = self._answer(batch)
        self._count(["eval"], self.eval_metrics, self.loss(outputs, batch), outputs, targets)
        return outputs

    def on_validation_epoch_end(self) -> None:
        self._log("test" if self.trainer.testing else "val", "eval", self.eval_metrics)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """:meth:`predictions` for raw inputs, with or without targets beside them."""
        return self.predictions(self(self.inputs(batch)))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        if self.schedule in SHAPES:
            shape = self.schedule, self.warmup_fraction, self.trainer.estimated_stepping_batches
            schedule: LRScheduler = LambdaLR(optimizer, partial(rate_factor, *shape))
        else:
            cls = named_class("--model.schedule", self.schedule, lr_scheduler, LRScheduler, SHAPES)
            mode = {"mode": self.mode} if issubclass(cls, ReduceLROnPlateau) else {}
            schedule = make("--model.schedule", cls, mode | self.schedule_args, optimizer)
        settings = {
            "scheduler": schedule,
            "interval": self.schedule_interval,
            "monitor": self.monitor,
        }
        return {"optimizer": optimizer, "lr_scheduler": settings}

    def make_optimizer(self) -> Optimizer:
        """The optimizer, fused where that can be; biases and norms, of less than two dimensions, do not decay."""
        cls = named_class("--model.optimizer", self.optimizer_name, torch.optim, Optimizer)
        require(
            cls is not torch.optim.SparseAdam,
            "--model.optimizer",
            "take dense gradients",
            cls.__name__,
        )
        # A fused optimizer unscales gradients by itself, too late for clipping and for the gradient norm; Lightning's
        # mixed precision refuses to clip for it, also where there is no scaler.
        plugin = self.trainer.precision_plugin
        clips = isinstance(plugin, MixedPrecision) and self.trainer.gradient_clip_val
        accepted, parameters = inspect.signature(cls).parameters, list(self.parameters())
        if len(self.undecayed) != len(parameters):  # without setup(), or there are new ones since
            self.undecayed = [parameter.ndim < 2 for parameter in parameters]
        arguments: dict[str, Any] = {"lr": self.lr}
        trained = [
            (p, spared)
            for p, spared in zip(parameters, self.undecayed, strict=True)
            if p.requires_grad
        ]
        decayed = [p for p, spared in trained if not spared]
        groups: list[dict[str, Any]] = [
            {"params": decayed},
            {"params": [p for p, spared in trained if spared]},
        ]
        if "fused" in accepted and getattr(plugin, "scaler", None) is None and not clips:
            arguments["fused"] = True
        if "weight_decay" in accepted:
            arguments["weight_decay"], groups[1]["weight_decay"] = self.weight_decay, 0.0
        groups = [group for group in groups if group["params"]]
        return make("--model.optimizer", cls, arguments | self.optimizer_args, groups)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["network"] = self.network_text

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Warn of another network's weights: where their shapes are equal, they would load without a word."""
        if checkpoint.get("network", self.network_text) != self.network_text:
            rank_zero_warn(
                "the checkpoint's network is another than this module's: load_from_checkpoint(network=...)."
            )

    def metric_state(self) -> dict[str, Tensor]:
        """What a resumed run goes on from: the sums of ``train/loss``. Those of torchmetrics are saved elsewhere."""
        self.count_window()  # adds to torchmetrics' sums, too
        return {name: sums.cpu() for name, sums in self.sums.items()}

    def load_metric_state(self, state: dict[str, Tensor]) -> None:
        self.sums = {name: sums.to(self.device) for name, sums in state.items()}

    def _answer(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Outputs and targets of a batch. Outputs (batch, 1) become (batch,) if the targets are (batch,)."""
        outputs, targets = self(self.inputs(batch)), self.targets(batch)
        if outputs.shape == (
            *targets.shape,
            1,
        ):  # (batch, 1) and (batch,) would broadcast to (batch, batch)
            outputs = outputs.squeeze(-1)
        if targets.is_floating_point() and outputs.shape != targets.shape:
            shapes = f"{tuple(targets.shape)}, got {tuple(outputs.shape)}"
            raise UserError(
                f"--model.network {type(self.network).__name__} must give the targets' shape {shapes}."
            )
        return outputs, targets

    def _loss(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dtype in HALF:
            outputs, loss = outputs.float(), loss.float()
        # class numbers stay integers; targets of the outputs' shape get the outputs' type
        return loss(
            outputs, targets.to(outputs.dtype) if outputs.shape == targets.shape else targets
        )

    @torch.no_grad()
    def count_window(self) -> None:
        """Add the waiting batches to the sums of ``train/loss`` and to the training metrics."""
        if not self.window:
            return
        losses, outputs, targets = zip(*self.window, strict=True)
        self.window = []
        together, wanted = torch.cat(outputs), torch.cat(targets)
        loss = (
            self._loss(self.measured_loss, together, wanted)
            if self.measures_apart
            else torch.stack(losses)
        )
        self._count(["recent", "epoch"], self.train_metrics, loss, together, wanted)

    def _count(
        self, names: list[str], metrics: Any, loss: Tensor, outputs: Tensor, targets: Tensor
    ) -> None:
        # the loss is the mean of all samples, the mean of each of several equal parts, or has values for each sample
        total = exact(loss.detach()).sum() * (len(targets) / loss.numel())
        for name in names:
            self.sums[name] = self.sums.get(name, 0) + torch.stack(
                [total, torch.full_like(total, len(targets))]
            )
        both = self.predictions(outputs), self.metric_targets(targets)
        metrics.update(*(map(exact, both) if both[1].is_floating_point() else both))

    def _log(self, split: str, counted: str, metrics: Any = None) -> None:
        """The mean loss and the metrics, over all ranks; what was counted for them is then forgotten."""
        sums = self.sums.pop(counted, exact(torch.zeros(2, device=self.device)))
        updated = sums.new_tensor(
            [any(getattr(x, "update_called", 0) for x in (metrics.modules() if metrics else ()))]
        )
        # every rank must meet the others; a step of one's own may have counted no loss, or filled no metric
        loss, samples, updated = self.trainer.strategy.reduce(
            torch.cat([sums, updated]), reduce_op="sum"
        )
        values = ({"loss": loss / samples} if samples else {}) | (
            metrics.compute() if updated else {}
        )
        self.log_dict(
            {f"{split}/{name}": value.float() for name, value in values.items()},
            prog_bar=split == "val",
        )
        if metrics:
            metrics.reset()


def exact(tensor: Tensor) -> Tensor:
    """Float64, so that the order of a sum does not matter; float32 on MPS, which has no float64."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def take_over_standardization(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Before weights are loaded: give ``mean`` and ``std`` the checkpoint's size; older files lack them."""
    for name in ("mean", "std"):
        mine = getattr(module, name)
        saved = state_dict.setdefault(prefix + name, mine)
        if saved.ndim == 1 and saved.shape != mine.shape and len(saved) <= MOST_CHANNELS:
            setattr(module, name, mine.new_ones(len(saved)))
    if len(module.mean) != len(module.std):  # type: ignore[arg-type]
        raise RuntimeError(f"mean has {len(module.mean)} channels, std {len(module.std)}")  # type: ignore[arg-type]


def named_class(
    option: str, name: str, home: ModuleType, base: type, also: tuple[str, ...] = ()
) -> Any:
    """The subclass of ``base`` called ``name`` in ``home``, or with this import path. Errors name the ``option``."""
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(
            importlib.import_module(module_name) if module_name else home, class_name, None
        )
    except (ImportError, TypeError, ValueError) as error:
        raise UserError(f"{option} {name}: {error}.") from None
    if inspect.isclass(found) and issubclass(found, base) and found is not base:
        return found
    known = [
        *also,
        *(n for n, c in vars(home).items() if inspect.isclass(c) and issubclass(c, base)),
    ]
    allowed = ", ".join([*also, f"a class of {home.__name__}"])
    raise UserError(
        f"{option} must be {allowed} or an import path, got {name}.{nearest(name, known)}"
    )


def make(option: str, cls: Any, arguments: dict[str, Any], *first: Any) -> Any:
    """``cls(*first, **arguments)``, its refusals as a :class:`UserError`."""
    accepted = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name in arguments:
        if name not in accepted and not takes_any:
            raise UserError(
                f"{option}_args.{name} is no argument of {cls.__name__}.{nearest(name, accepted)}"
            )
    try:
        return cls(*first, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{option} {cls.__name__} refuses its arguments {arguments}: {error}."
        ) from None


def rate_factor(shape: str, warmup_fraction: float, total_steps: float, step: int) -> float:
    """Factor on the peak rate at ``step`` (0 is the first); 1 throughout a run without end. Torch's schedules keep the
    run's length and peak in their state, but a resumed run may change both.
    """
    if not 1 <= total_steps < math.inf:
        return 1.0
    done = min(1.0, step / total_steps)
    climbs = done < warmup_fraction
    height = done / warmup_fraction if climbs else (1 - done) / (1 - warmup_fraction)
    cosine = (1 - math.cos(math.pi * height)) / 2
    if climbs:
        return (
            0.04 + 0.96 * cosine
            if shape == "onecycle"
            else max(height, 1 / max(1, warmup_fraction * total_steps))
        )
    return {"constant": 1.0, "linear": height}.get(shape, cosine)


def recompute_activations(network: nn.Module) -> None:
    """Activation checkpointing in place: less memory, one more forward pass, the same keys in a checkpoint. Every
    direct child of ``network.blocks``, else of ``network``, that has parameters keeps only its input. Generators are
    restored for the second pass, so dropout drops the same units.
    """
    for child in getattr(network, "blocks", network).children():
        if any(True for _ in child.parameters()):
            child.forward = partial(
                _recomputed, child, child.forward
            )  # no closure: a copy must call its own layers


def _recomputed(module: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False) if module.training else forward(*args)
