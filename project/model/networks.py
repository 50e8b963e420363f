"""The networks: normalised images in, logits out. Every size is a plain constructor argument."""

from torch import Tensor, nn

from project.errors import UserError

__all__ = ["MLP", "ConvNet"]


class MLP(nn.Module):
    """The course's classifier: 784-256-128-10 with ReLU, 235,146 parameters by default.

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
            layers += [nn.Linear(size, next_size), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            size = next_size
        layers.append(nn.Linear(size, num_classes))
        self.blocks = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) → logits (batch, num_classes)."""
        return self.blocks(images)


class ConvNet(nn.Module):
    """A small convolutional network; every stage halves height and width, sizes are multiples of 8.

    Args:
        in_channels: Channels of the images.
        widths: Channels of each stage.
        convs_per_stage: 3 × 3 convolutions (each with batch normalisation and ReLU) before each pooling.
        num_classes: Number of logits.
        dropout: Share of the features that training leaves out before the last layer.
    """

    def __init__(
        self,
        in_channels: int = 1,
        widths: list[int] = [16, 32, 64],  # noqa: B006 - read only, and a plain list is what a config file holds
        convs_per_stage: int = 1,
        num_classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check_positive("widths", widths)
        _check_positive("convs_per_stage", [convs_per_stage])
        stages: list[nn.Module] = []
        channels = in_channels
        for width in widths:
            layers: list[nn.Module] = []
            for _ in range(convs_per_stage):
                layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.blocks = nn.Sequential(*stages)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, in_channels, height, width) → logits (batch, num_classes)."""
        features = self.blocks(images)  # (batch, widths[-1], height / 2^stages, width / 2^stages)
        return self.head(self.dropout(features.amax(dim=(2, 3))))


def _check_positive(name: str, widths: list[int]) -> None:
    if not widths or min(widths) < 1:
        raise UserError(f"--model.network.{name} must list sizes of at least 1, got {widths}.")
