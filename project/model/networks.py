"""The networks: normalised images in, logits out. Every size is a plain constructor argument."""

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from project.errors import UserError

__all__ = ["MLP", "ConvNet"]


class MLP(nn.Module):
    """784-256-128-10 with ReLU, 235,146 parameters by default.

    Args:
        image_shape: Channels, height and width of the images.
        hidden: Width of each hidden layer.
        num_classes: Number of logits.
        dropout: Share of hidden units that training leaves out.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        hidden: list[int] = [256, 128],  # noqa: B006 - read only, and a plain list is what a config file holds
        num_classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check_positive("hidden", hidden)
        channels, height, width = image_shape
        layers: list[nn.Module] = [nn.Flatten()]  # (batch, channels · height · width)
        size = channels * height * width
        for next_size in hidden:
            # Identity keeps the names of the weights the same, with or without dropout
            layers += [nn.Linear(size, next_size), nn.ReLU(), nn.Dropout(dropout) if dropout else nn.Identity()]
            size = next_size
        layers.append(nn.Linear(size, num_classes))
        self.blocks = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) → logits (batch, num_classes)."""
        return self.blocks(images)


class ConvNet(nn.Module):
    """A small convolutional network; every width is a multiple of 8, which suits tensor cores and vector units.

    A stage is convolution, pooling where asked for, batch normalisation, ReLU. Pooling comes before the two
    element-wise layers, which then do a quarter of the work (ReLU and the maximum commute).

    Args:
        image_shape: Channels, height and width of the images.
        widths: Channels of each stage.
        kernels: Kernel size of each stage's convolution.
        strides: Stride of each stage's convolution.
        pools: Whether each stage halves height and width by the maximum.
        padding: Pad convolutions so that they keep the size. Off: MNIST has a margin of 4 pixels, and smaller planes
            need less than half of the multiplications.
        num_classes: Number of logits.
        dropout: Share of the features that training leaves out before the last layer.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        widths: list[int] = [16, 32, 64],  # noqa: B006 - read only, and a plain list is what a config file holds
        kernels: list[int] = [5, 3, 3],  # noqa: B006
        strides: list[int] = [1, 1, 1],  # noqa: B006
        pools: list[bool] = [True, True, False],  # noqa: B006
        padding: bool = False,
        num_classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, sizes in (("widths", widths), ("kernels", kernels), ("strides", strides)):
            _check_positive(name, sizes)
        if not len(widths) == len(kernels) == len(strides) == len(pools):
            raise UserError(
                "--model.network: widths, kernels, strides and pools must have one entry per stage, got "
                f"{len(widths)}, {len(kernels)}, {len(strides)} and {len(pools)}."
            )
        channels, height, width = image_shape
        stages: list[nn.Module] = []
        for out, kernel, stride, pool in zip(widths, kernels, strides, pools, strict=True):
            pad = kernel // 2 if padding else 0
            layers: list[nn.Module] = [nn.Conv2d(channels, out, kernel, stride, pad, bias=False)]
            height, width = ((size + 2 * pad - kernel) // stride + 1 for size in (height, width))
            if pool:
                layers.append(nn.MaxPool2d(2))
                height, width = height // 2, width // 2
            if min(height, width) < 1:
                raise UserError(f"--model.network: the stages leave nothing of images of {tuple(image_shape)}.")
            stages.append(nn.Sequential(*layers, nn.BatchNorm2d(out), nn.ReLU()))
            channels = out
        self.blocks = nn.Sequential(*stages)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels * height * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) → logits (batch, num_classes)."""
        features = self.blocks(images)  # (batch, widths[-1], height', width')
        return self.head(self.dropout(features.flatten(1)))


def _check_positive(name: str, widths: list[int]) -> None:
    if not widths or min(widths) < 1:
        raise UserError(f"--model.network.{name} must list sizes of at least 1, got {widths}.")


# Activation checkpointing: less memory for activations, one more forward pass.


def recompute_activations(network: nn.Module) -> None:
    """Make a network recompute its activations in the backward pass, in place and without new checkpoint keys.

    Every direct child of ``network.blocks`` that has parameters (of ``network`` itself where it has no ``blocks``)
    keeps only its input. Generators are restored for the second pass, so dropout drops the same units.
    """
    for child in getattr(network, "blocks", network).children():
        if any(True for _ in child.parameters()):
            child.forward = _Recomputed(child.forward, child)


class _Recomputed:
    """A module's forward under :func:`torch.utils.checkpoint.checkpoint` while it trains."""

    def __init__(self, forward: Any, module: nn.Module) -> None:
        self.forward = forward
        self.module = module

    def __call__(self, *args: Any) -> Any:
        if not self.module.training:
            return self.forward(*args)
        return checkpoint(self.forward, *args, use_reentrant=False)
