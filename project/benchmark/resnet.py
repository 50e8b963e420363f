"""A network large enough that precision shows: ResNet-18 on enlarged digits."""

import torch.nn.functional as F
from torch import Tensor, nn


class ResNet18(nn.Module):
    """Torchvision's ResNet-18 (He et al. 2015, arXiv 1512.03385; 11.2 million parameters) for images of few channels.

    Args:
        image_size: Height and width to which images are enlarged.
        in_channels: Channels of the images.
        num_classes: Number of logits.
    """

    def __init__(self, image_size: int = 64, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.image_size = image_size
        self.blocks = resnet18(num_classes=num_classes)
        self.blocks.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, in_channels, height, width) → logits (batch, num_classes)."""
        size = (self.image_size, self.image_size)
        return self.blocks(F.interpolate(images, size=size, mode="bilinear", align_corners=False))
