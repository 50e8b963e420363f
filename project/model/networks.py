"""The networks: standardized images in, logits out. Every size is a plain constructor argument."""

import math

from torch import Tensor, nn
from unbroken.errors import UserError, require

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
        # Lists, because a config file holds these. They are only read.
        hidden: list[int] = [256, 128],  # noqa: B006
        num_classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes("hidden", hidden, len(hidden))
        layers: list[nn.Module] = [nn.Flatten()]  # (batch, channels · height · width)
        size = math.prod(image_shape)
        for next_size in hidden:
            layers.append(nn.Linear(size, next_size))
            layers.append(nn.ReLU())
            # Something always stands here, so that the weights have the same names without dropout.
            layers.append(nn.Dropout(dropout) if dropout else nn.Identity())
            size = next_size
        layers.append(nn.Linear(size, num_classes))
        self.blocks = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) → logits (batch, num_classes)."""
        return self.blocks(images)


class ConvNet(nn.Module):
    """A small convolutional network; every width is a multiple of 8, which suits tensor cores and
    vector units.

    A stage is convolution, pooling where asked for, batch normalization, ReLU. Pooling comes before
    the last two because it saves three quarters of their work. The first stage quarters the image
    by its stride: pooling would take a third of a step.

    Args:
        image_shape: Channels, height and width of the images.
        widths: Channels of each stage.
        kernels: Kernel size of each stage's convolution.
        strides: Stride of each stage's convolution.
        pools: Whether each stage halves height and width by the maximum. As many as stages.
        padding: Pad convolutions to keep the size. MNIST's margin needs no padding, and smaller
            planes are faster.
        num_classes: Number of logits.
        dropout: Share of the features that training leaves out before the last layer.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        # Lists, because a config file holds these. They are only read.
        widths: list[int] = [16, 32, 64],  # noqa: B006
        kernels: list[int] = [5, 3, 3],  # noqa: B006
        strides: list[int] = [2, 1, 1],  # noqa: B006
        pools: list[bool] = [False, True, False],  # noqa: B006
        padding: bool = False,
        num_classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes("widths", widths, len(pools))
        check_sizes("kernels", kernels, len(pools))
        check_sizes("strides", strides, len(pools))
        channels, height, width = image_shape
        stages: list[nn.Module] = []
        for out, kernel, stride, pool in zip(widths, kernels, strides, pools, strict=True):
            pad = kernel // 2 if padding else 0
            layers: list[nn.Module] = [nn.Conv2d(channels, out, kernel, stride, pad, bias=False)]
            height = (height + 2 * pad - kernel) // stride + 1
            width = (width + 2 * pad - kernel) // stride + 1
            if pool:
                layers.append(nn.MaxPool2d(2))
                height = height // 2
                width = width // 2
            if min(height, width) < 1:
                shape = tuple(image_shape)
                raise UserError(f"--model.network: the stages leave nothing of images of {shape}.")
            stages.append(nn.Sequential(*layers, nn.BatchNorm2d(out), nn.ReLU()))
            channels = out
        self.blocks = nn.Sequential(*stages)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels * height * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) → logits (batch, num_classes)."""
        features = self.blocks(images)  # (batch, widths[-1], height', width')
        return self.head(self.dropout(features.flatten(1)))


def check_sizes(name: str, sizes: list[int], count: int) -> None:
    """A UserError unless there are ``count`` sizes, at least one of them, and each at least 1."""
    fit = len(sizes) == count and min(sizes, default=0) >= 1
    require(fit, f"--model.network.{name}", f"list {count or 'some'} sizes of at least 1", sizes)
