"""The classification form of :class:`SupervisedModule`: cross-entropy, accuracy, class weights, label smoothing."""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from project.errors import UserError, require
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
        require(
            0 <= label_smoothing < 1,
            "--model.label_smoothing",
            "be at least 0 and below 1",
            label_smoothing,
        )
        loss_args = {"label_smoothing": label_smoothing, "weight": class_weights}
        loss_args = {name: value for name, value in loss_args.items() if value}
        # micro: the number of classes is not needed to count what is right
        metrics = {
            "accuracy": MulticlassAccuracy(num_classes=None, average="micro", validate_args=False),
            **metrics,
        }
        super().__init__(
            network,
            "CrossEntropyLoss",
            loss_args,
            metrics,
            monitor,
            mode,
            lr=lr,
            channels_last=channels_last,
            **kwargs,
        )
        self.save_hyperparameters(
            ignore=["network", "metrics", "loss", "loss_args"]
        )  # the last two follow from others

    def setup(self, stage: str) -> None:
        super().setup(stage)
        datamodule = getattr(self.trainer, "datamodule", None)
        if (
            stage == "fit"
            and getattr(datamodule, "class_names", None)
            and hasattr(datamodule, "image_shape")
        ):
            check_fit(self.network, datamodule)

    def metric_targets(self, targets: Tensor) -> Tensor:
        """Labels (batch,). Mixed labels (batch, classes), as MixUp makes them, become the largest class."""
        return targets.argmax(dim=1) if targets.is_floating_point() else targets


class MNISTClassifier(ImageClassifier):  # feature: mnist
    """:class:`ImageClassifier` with :class:`project.model.ConvNet` unless another network is given.

    Args:
        network: Maps standardized images (batch, 1, 28, 28) to logits (batch, 10).
        kwargs: Those of :class:`ImageClassifier`.
    """

    def __init__(self, network: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__(network if network is not None else ConvNet(), **kwargs)
        self.mean, self.std = (
            torch.tensor([0.1307]),
            torch.tensor([0.3081]),
        )  # older checkpoints lack them


def check_fit(network: nn.Module, datamodule: Any) -> None:
    """A UserError, with the flags to type, unless a blank image gives a logit for each of the data's classes."""
    weight = next(network.parameters(), None)
    if weight is None or weight.device.type == "meta":
        return
    image_shape, classes = tuple(datamodule.image_shape), len(datamodule.class_names)
    training = [part for part in network.modules() if part.training]
    try:
        network.eval()  # changes no batch statistics, draws no random number
        with torch.no_grad():
            # .forward: a compiled network would compile itself for this one image
            logits = network.forward(
                torch.zeros(1, *image_shape, device=weight.device, dtype=weight.dtype)
            )
        if logits.shape == (1, classes):
            return
        found = f"shape {tuple(logits.shape)} for one"
    except (RuntimeError, ValueError, IndexError) as error:
        found = " ".join(str(error).split())[:200]
    finally:
        for part in training:
            part.training = True
    flags = {"image_shape": f"[{','.join(map(str, image_shape))}]", "num_classes": classes}
    known = inspect.signature(
        type(network)
    ).parameters  # this project's names for a network's sizes
    typed = " ".join(
        f"--model.network.{name} {value}" for name, value in flags.items() if name in known
    )
    must = f"must give {classes} logits for {type(datamodule).__name__}'s images of shape {image_shape}, got {found}."
    raise UserError(
        f"--model.network {type(network).__name__} {must}{' Try ' if typed else ''}{typed}"
    )
