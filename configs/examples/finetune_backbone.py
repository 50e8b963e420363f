"""A torchvision backbone with a new last layer, its early layers frozen, for a folder of pictures.

python -m project.fit --config configs/examples/finetune_backbone.yaml --data.root pictures
"""

from torch import Tensor, nn
from torchvision import models

from configs.examples.png_folder import PngFolder


class Pictures(PngFolder):
    """Normalised as the backbone's own training images were."""

    image_shape = (3, 64, 64)
    mean = [0.485, 0.456, 0.406]
    std = [0.229, 0.224, 0.225]


class Backbone(nn.Module):
    """A ResNet or ShuffleNet of which the last stage and a new classifier train.

    ``weights``: None, or DEFAULT.
    """

    def __init__(
        self, num_classes: int, name: str = "resnet18", weights: str | None = None
    ) -> None:
        super().__init__()
        self.backbone = models.get_model(name, weights=weights)
        self.backbone.fc = nn.Linear(self.backbone.fc.in_features, num_classes)
        self.frozen = list(self.backbone.children())[:-3]
        for module in self.frozen:
            module.requires_grad_(False)

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        # Batch statistics of the frozen layers are frozen, too.
        for module in self.frozen:
            module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)  # (batch, 3, height, width) → (batch, num_classes)
