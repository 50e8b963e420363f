"""The classification form of :class:`SupervisedModule`: cross-entropy, accuracy, class weights,
label smoothing.
"""

import inspect
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from unbroken.errors import UserError, require
from unbroken.tasks.evaluating import evaluating
from unbroken.tasks.standardization import take_mean_and_std
from unbroken.tasks.supervised import SupervisedModule


@runtime_checkable
class ShowsClasses(Protocol):
    """A data module of images, each of one class."""

    image_shape: tuple[int, int, int]  # channels, height, width
    class_names: list[str]  # empty if the targets are no classes


class ImageClassifier(SupervisedModule):
    """Trains a network to classify images by cross-entropy, in nats.

    Logs ``accuracy``, a fraction in 0-1.

    Args:
        network: Maps standardized images (batch, channels, height, width) to logits
            (batch, classes).
        metrics: Further metrics of torchmetrics by name. They are given probabilities
            (batch, classes) and labels.
        monitor: See :class:`SupervisedModule`.
        mode: See :class:`SupervisedModule`.
        lr: Peak learning rate.
        label_smoothing: Share of the target spread over all classes (in the trained loss, not in
            the logged one).
        class_weights: Weight of each class (in the trained loss, not in the logged one). Default:
            equal.
        channels_last: See :class:`SupervisedModule`.
        kwargs: Those of :class:`SupervisedModule`.
    """

    def __init__(
        self,
        network: nn.Module,
        metrics: dict[str, Metric] = {},  # noqa: B006 - read only
        monitor: str = "val/accuracy",
        mode: Literal["min", "max"] = "max",
        lr: float = 2e-2,
        label_smoothing: float = 0.1,
        class_weights: list[float] | None = None,
        channels_last: bool = True,
        **kwargs: Any,
    ) -> None:
        is_share = 0 <= label_smoothing < 1
        option = "--model.label_smoothing"
        require(is_share, option, "be at least 0 and below 1", label_smoothing)
        loss_args: dict[str, Any] = {}
        if label_smoothing:
            loss_args["label_smoothing"] = label_smoothing
        if class_weights:
            loss_args["weight"] = class_weights
        # Micro: to count what is right, the number of classes is not needed.
        accuracy = MulticlassAccuracy(num_classes=None, average="micro", validate_args=False)
        super().__init__(
            network,
            loss="CrossEntropyLoss",
            loss_args=loss_args,
            metrics={"accuracy": accuracy, **metrics},
            monitor=monitor,
            mode=mode,
            lr=lr,
            channels_last=channels_last,
            **kwargs,
        )
        # The loss and its arguments follow from the other values.
        self.save_hyperparameters(ignore=["network", "metrics", "loss", "loss_args"])

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            check_fit(self.network, getattr(self.trainer, "datamodule", None))

    def metric_targets(self, targets: Tensor) -> Tensor:
        """Labels (batch,).

        Mixed labels (batch, classes), as MixUp makes them, become the largest class.
        """
        if targets.is_floating_point():
            return targets.argmax(dim=1)
        return targets


def take_mean_and_check_logits(module: LightningModule, network: nn.Module) -> None:
    """Let a classifier of images be one for its data module, in ``setup``, before training.

    The buffers ``mean`` and ``std`` become the data's, where the data have both.

    Args:
        module: Has the buffers, see :func:`register_mean_and_std`.
        network: Maps images (batch, channels, height, width) to logits (batch, classes).

    Raises:
        UserError: The network does not take the data's images, or has not a logit for each of the
            data's classes.
    """
    datamodule = getattr(module.trainer, "datamodule", None)
    take_mean_and_std(module, datamodule)
    check_fit(network, datamodule)


def check_fit(network: nn.Module, datamodule: Any) -> None:
    """Check that a network gives a logit for each of the data's classes, by one blank image.

    Args:
        network: Maps images (batch, channels, height, width) to logits (batch, classes).
        datamodule: Where it has no ``image_shape`` or names no ``class_names``, there is nothing to
            check.

    Raises:
        UserError: It gives another number, or does not take such images. The message names the
            flags to type.
    """
    if not isinstance(datamodule, ShowsClasses) or not datamodule.class_names:
        return
    weight = next(network.parameters(), None)
    if weight is None or weight.device.type == "meta":
        return
    image_shape = tuple(datamodule.image_shape)
    classes = len(datamodule.class_names)
    blank = torch.zeros(1, *image_shape, device=weight.device, dtype=weight.dtype)
    try:
        with evaluating(network), torch.no_grad():
            # Not network(blank): a compiled network would compile itself for this one image.
            logits = network.forward(blank)
    except (RuntimeError, ValueError, IndexError) as error:
        found = " ".join(str(error).split())[:200]
    else:
        if logits.shape == (1, classes):
            return
        found = f"shape {tuple(logits.shape)} for one"
    data = type(datamodule).__name__
    must = f"must give {classes} logits for {data}'s images of shape {image_shape}, got {found}."
    hint = flags_to_try(network, image_shape, classes)
    raise UserError(f"--model.network {type(network).__name__} {must}{hint}")


def flags_to_try(network: nn.Module, image_shape: tuple[int, ...], classes: int) -> str:
    """`` Try --model.network.num_classes 3``, or nothing for a network that has no such sizes."""
    sizes = {"image_shape": f"[{','.join(map(str, image_shape))}]", "num_classes": classes}
    known = inspect.signature(type(network)).parameters
    flags = [f"--model.network.{name} {size}" for name, size in sizes.items() if name in known]
    if not flags:
        return ""
    return f" Try {' '.join(flags)}"
