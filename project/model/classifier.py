"""The Lightning module: loss, metrics and optimizer around any network that turns images into logits."""

import inspect
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from project.errors import UserError
from project.model.networks import ConvNet, recompute_activations
from project.model.optimizers import Schedule, make_optimizer, make_schedule

MOST_KEPT = 64  # batches whose logits wait on the device to be counted


class ImageClassifier(LightningModule):
    """Trains a network to classify images. Device, precision, strategy, clipping and accumulation are Trainer flags.

    Logged: ``train/loss`` (log steps: mean over the samples since its last row, all ranks), ``train/accuracy``
    (epoch end: exact over the epoch), ``val/loss``, ``val/accuracy``, ``test/loss``, ``test/accuracy`` (exact over
    the split). Accuracies are fractions, 0-1; losses are cross-entropy in nats.

    Args:
        network: Maps normalised images (batch, channels, height, width) to logits (batch, classes).
        optimizer: Name of a class in ``torch.optim``, or the import path of another optimizer.
        lr: Peak learning rate.
        weight_decay: Given to the optimizer for weights of two or more dimensions, not for biases and norms.
        optimizer_args: Further arguments of the optimizer, such as ``{momentum: 0.9}``.
        schedule: Shape of the learning rate over the run: ``constant``; ``cosine`` or ``linear`` to 0; ``onecycle``
            (cosine up from 1/25, cosine down to 0).
        warmup_fraction: Share of the run in which the rate climbs to ``lr``.
        label_smoothing: Share of the target spread over all classes (training loss only).
        compile: Compile the network in place; its checkpoints are those of the eager network.
        channels_last: Keep images and convolution weights in channels-last memory order, which tensor cores and the
            CPU's convolutions prefer.
        activation_checkpointing: Recompute activations in the backward pass instead of storing them.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: str = "AdamW",
        lr: float = 2e-2,
        weight_decay: float = 0.01,
        optimizer_args: dict[str, Any] = {},  # noqa: B006 - read only
        schedule: Schedule = "linear",
        warmup_fraction: float = 0.2,
        label_smoothing: float = 0.1,
        compile: bool = False,
        channels_last: bool = True,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if not (math.isfinite(lr) and lr > 0):
            raise UserError(f"--model.lr must be above 0, got {lr}.")
        if not 0 <= warmup_fraction < 1:
            raise UserError(f"--model.warmup_fraction must be at least 0 and below 1, got {warmup_fraction}.")
        if not 0 <= label_smoothing < 1:
            raise UserError(f"--model.label_smoothing must be at least 0 and below 1, got {label_smoothing}.")
        self.save_hyperparameters(ignore=["network"])
        self.network = network
        self.lr = lr
        self.optimizer_name = optimizer
        self.optimizer_args = {"weight_decay": weight_decay, **optimizer_args}
        self.schedule: Schedule = schedule
        self.warmup_fraction = warmup_fraction
        self.label_smoothing = label_smoothing
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        if channels_last:
            network.to(memory_format=torch.channels_last)
        if activation_checkpointing:
            recompute_activations(network)
        if compile:
            network.compile()  # in place: torch.compile(network) would prefix every key with `_orig_mod.`
        # Micro-averaged, so the number of classes is not needed to count what is right.
        self.train_accuracy = MulticlassAccuracy(num_classes=None, average="micro", validate_args=False)
        self.eval_accuracy = MulticlassAccuracy(num_classes=None, average="micro", validate_args=False)
        self.eval_loss = MeanMetric()
        # Since the last log step: per batch its mean loss, logits and labels. One update of the metric for many
        # batches costs what one batch would: 938 single updates take about a tenth of an epoch of the MLP.
        self.window: list[tuple[Tensor, Tensor, Tensor]] = []
        self.undecayed: set[str] | None = None  # names, known before a strategy wraps the network

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the hook it is in 42 times a step; nn.Module would look each time whether that is a parameter
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def setup(self, stage: str) -> None:
        """Before training: does the network fit the data? An answer in the user's words instead of a shape error."""
        datamodule = getattr(self.trainer, "datamodule", None)
        self.undecayed = {name for name, p in self.network.named_parameters() if p.ndim < 2}
        if stage == "fit" and hasattr(datamodule, "class_names"):
            check_fit(self.network, datamodule)

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (batch, channels, height, width) → logits (batch, classes)."""
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        if self.memory_format is torch.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        logits = self.network(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        self.window.append((loss.detach(), logits.detach(), labels))
        if len(self.window) % MOST_KEPT == 0:  # log steps may be far apart, and logits large
            self.count_window()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # self.log at every step would cost more than the step's products; Lightning drops it off log steps anyway
        if self.trainer._logger_connector.should_update_logs and not self.trainer.fit_loop._should_accumulate():
            self.log("train/loss", self.take_window_loss(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        if self.window:
            self.log("train/loss", self.take_window_loss(), sync_dist=True)
        self.log("train/accuracy", self.train_accuracy.compute())
        self.train_accuracy.reset()

    def take_window_loss(self) -> Tensor:
        """Mean loss over the batches since the last call; counts them in ``train_accuracy``."""
        losses = torch.stack([loss for loss, _, _ in self.window])
        self.count_window()
        self.window.clear()
        return losses.mean()

    def count_window(self) -> None:
        """Count the predictions of the window in ``train_accuracy``, and keep only its losses."""
        uncounted = [(logits, labels) for _, logits, labels in self.window if len(labels)]
        if uncounted:
            logits, labels = (torch.cat(parts) for parts in zip(*uncounted, strict=True))
            self.train_accuracy.update(logits.argmax(dim=1), labels)
            nothing = logits.new_empty(0), labels.new_empty(0)  # an empty slice would keep the memory of the whole
            self.window = [(loss, *nothing) for loss, _, _ in self.window]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self._evaluate(batch)  # logits, for callbacks that look at predictions

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Class probabilities (batch, classes) of normalised images, with or without labels beside them."""
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        return self(images).float().softmax(dim=1)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(
            self.optimizer_name, self.network, self.lr, self.optimizer_args, self.can_fuse(), self.undecayed
        )
        schedule = make_schedule(optimizer, self.schedule, self.warmup_fraction, self.total_steps())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def can_fuse(self) -> bool:
        """Whether a fused optimizer may be used: not with a gradient scaler, nor with clipping under autocast.

        It would unscale by itself, too late for clipping and for the gradient norm; Lightning's mixed precision
        refuses to clip for it, also where there is no scaler.
        """
        plugin = self.trainer.precision_plugin
        clips = isinstance(plugin, MixedPrecision) and self.trainer.gradient_clip_val
        return getattr(plugin, "scaler", None) is None and not clips

    def total_steps(self) -> int:
        """Optimizer steps of the whole run; -1 where the run has no end.

        Lightning's ``estimated_stepping_batches`` builds the loaders before a resumed run's position is known; our
        data modules know their length without loaders.
        """
        trainer = self.trainer
        count = getattr(getattr(trainer, "datamodule", None), "train_batches_per_epoch", None)
        if count is None:
            return int(trainer.estimated_stepping_batches) if math.isfinite(trainer.estimated_stepping_batches) else -1
        limit = trainer.limit_train_batches
        batches = min(count(), limit) if isinstance(limit, int) else int(count() * limit)
        steps = math.ceil(batches / trainer.accumulate_grad_batches) * (trainer.max_epochs or -1)
        limits = [n for n in (steps, trainer.max_steps) if n > 0]
        return min(limits) if limits else -1

    def _evaluate(self, batch: tuple[Tensor, Tensor]) -> Tensor | None:
        images, labels = batch
        if len(labels) == 0:  # more ranks than samples
            return None
        logits = self(images)
        self.eval_accuracy.update(logits.argmax(dim=1), labels)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        self.eval_loss.update(losses if losses.device.type == "mps" else losses.double())  # MPS knows no float64
        return logits

    def _log_evaluation(self, split: Literal["val", "test"]) -> None:
        # torchmetrics adds up counts and sums over ranks in compute()
        self.log(f"{split}/loss", self.eval_loss.compute(), prog_bar=split == "val")
        self.log(f"{split}/accuracy", self.eval_accuracy.compute(), prog_bar=split == "val")
        self.eval_loss.reset()
        self.eval_accuracy.reset()


class MNISTClassifier(ImageClassifier):
    """:class:`ImageClassifier` for MNIST: with :class:`project.model.ConvNet` unless another network is given.

    Args:
        network: Maps normalised images (batch, 1, 28, 28) to logits (batch, 10).
        kwargs: Those of :class:`ImageClassifier`.
    """

    def __init__(self, network: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__(network if network is not None else ConvNet(), **kwargs)


# Whether a network takes a data module's images and has a logit for each of its classes.


def check_fit(network: nn.Module, datamodule: Any) -> None:
    """Try the network on one blank image. Draws no random number and leaves no trace in batch statistics.

    Args:
        network: Maps images (batch, channels, height, width) to logits (batch, classes).
        datamodule: Has ``image_shape`` and ``class_names``.

    Raises:
        UserError: The network refuses the image or answers with another number of logits.
    """
    weight = next(network.parameters(), None)
    if weight is None or weight.device.type == "meta":
        return
    shape, classes = tuple(datamodule.image_shape), len(datamodule.class_names)
    data = f"{type(datamodule).__name__}'s images of shape {shape} and {classes} classes"
    fix = _fix(network, shape, classes)
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            # .forward: a compiled network would compile itself for this one image
            logits = network.forward(torch.zeros(1, *shape, device=weight.device, dtype=weight.dtype))
    except (RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--model.network {type(network).__name__} must take {data}: {reason}.{fix}") from None
    finally:
        network.train(was_training)
    if tuple(logits.shape) != (1, classes):
        raise UserError(
            f"--model.network {type(network).__name__} must give {classes} logits for {data}, "
            f"got shape {tuple(logits.shape)} for one image.{fix}"
        )


def _fix(network: nn.Module, shape: tuple[int, ...], classes: int) -> str:
    """The flags to try, for a network that has this project's names for its sizes."""
    known = inspect.signature(type(network)).parameters
    flags = {"image_shape": f"[{','.join(map(str, shape))}]", "num_classes": classes}
    typed = [f"--model.network.{name} {value}" for name, value in flags.items() if name in known]
    return f" Try {' '.join(typed)}" if typed else ""
