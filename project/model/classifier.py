"""The classification form of :class:`SupervisedModule`: cross-entropy, accuracy, class weights, label smoothing."""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from project.errors import UserError
from project.model.networks import ConvNet
from project.model.supervised import SupervisedModule


class ImageClassifier(SupervisedModule):
    """Trains a network to classify images by cross-entropy, in nats. Logs ``accuracy``, a fraction in 0-1.

    Args:
        network: Maps standardized images (batch, channels, height, width) to logits (batch, classes).
        metrics: Further metrics of torchmetrics by name. They are given probabilities (batch, classes) and labels.
        monitor: See :class:`SupervisedModule`.
        mode: See :class:`SupervisedModule`.
        lr: Peak learning rate.
        label_smoothing: Share of the target spread over all classes (in the trained loss, not in the logged one).
        class_weights: Weight of each class (in the trained loss, not in the logged one). Default: equal.
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
        if not 0 <= label_smoothing < 1:
            raise UserError(f"--model.label_smoothing must be at least 0 and below 1, got {label_smoothing}.")
        loss_args: dict[str, Any] = {"label_smoothing": label_smoothing} if label_smoothing else {}
        super().__init__(
            network,
            loss="CrossEntropyLoss",
            loss_args=loss_args | ({"weight": class_weights} if class_weights else {}),
            # Micro-averaged: the share of right labels, whatever the number of classes.
            metrics={"accuracy": MulticlassAccuracy(num_classes=None, average="micro", validate_args=False), **metrics},
            monitor=monitor,
            mode=mode,
            lr=lr,
            channels_last=channels_last,
            **kwargs,
        )

    def setup(self, stage: str) -> None:
        """Before training: check that the network fits the data, with an error that names the flag to change."""
        super().setup(stage)
        datamodule = getattr(self.trainer, "datamodule", None)
        if stage == "fit" and getattr(datamodule, "class_names", None) and hasattr(datamodule, "image_shape"):
            check_fit(self.network, datamodule)

    def metric_targets(self, targets: Tensor) -> Tensor:
        """Labels (batch,). Mixed labels (batch, classes), as MixUp makes them, become the largest class."""
        return targets.argmax(dim=1) if targets.is_floating_point() else targets


# feature: mnist
class MNISTClassifier(ImageClassifier):
    """:class:`ImageClassifier` with :class:`project.model.ConvNet` unless another network is given.

    Args:
        network: Maps standardized images (batch, 1, 28, 28) to logits (batch, 10).
        kwargs: Those of :class:`ImageClassifier`.
    """

    def __init__(self, network: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__(network if network is not None else ConvNet(), **kwargs)
        self.mean, self.std = torch.tensor([0.1307]), torch.tensor([0.3081])  # older checkpoints lack them


# end feature: mnist


def check_fit(network: nn.Module, datamodule: Any) -> None:
    """Try the network on one blank image. Draws no random number and changes no batch statistics.

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
    known = inspect.signature(type(network)).parameters  # the names that this project's networks use for their sizes
    flags = {"image_shape": f"[{','.join(map(str, shape))}]", "num_classes": classes}
    typed = " ".join(f"--model.network.{name} {value}" for name, value in flags.items() if name in known)
    fix = f" Try {typed}" if typed else ""
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
