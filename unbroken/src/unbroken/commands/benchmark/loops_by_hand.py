"""What real runs are compared with: training loops written by hand, on the same data and
network.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms
from unbroken import contract
from unbroken.cli.cli import Configuration
from unbroken.commands.benchmark.real_runs import Epoch, wanted_devices
from unbroken.errors import UserError
from unbroken.loading.batch_size import batch_size_of, eval_batch_size_of
from unbroken.loading.log_steps import synchronize

# The loops that the table ``overhead`` compares. The first two are written by hand, here.
FLOOR = "hand-written floor"
PLAIN = "plain PyTorch loop"
FULL = "all features"
BARE = "Lightning, nothing on"
LOOPS = (FLOOR, PLAIN, FULL, BARE)

# Mean and standard deviation of images whose data module names none.
GREY = [0.5]
LEARNING_RATE = 1e-3
HALF = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def in_memory(config: Configuration, split: str) -> contract.HoldsImages:
    """The dataset of a split ("train" or "val"); a UserError where the data are of another kind."""
    data = cast(Any, config.datamodule)
    dataset = None
    # There may be no loader, or one without a dataset.
    with suppress(MisconfigurationException, AttributeError):
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader() if split == "train" else data.val_dataloader()
        dataset = loader.dataset
    if isinstance(dataset, contract.HoldsImages):
        are_tensors = isinstance(dataset.images, Tensor) and isinstance(dataset.labels, Tensor)
        if are_tensors and dataset.images.ndim == 4:
            return dataset
    name = type(data).__name__
    raise UserError(
        f"--data: loops written by hand need TensorImages, {name} has none for {split}."
    )


def mean_and_std(data: Any) -> tuple[list[float], list[float]]:
    """By channel, of pixels in 0-1."""
    if isinstance(data, contract.StandardizesImages):
        return data.mean, data.std
    return GREY, GREY


def normalizer(data: Any, images: Tensor, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function: a batch of ``images`` on ``device`` → float32 of mean 0, standard deviation 1."""
    whole = 1.0 if images.is_floating_point() else 255.0
    mean, std = mean_and_std(data)
    # They are made once, because copying them to the device at every step takes time.
    shift = (whole * torch.tensor(mean, device=device)).view(1, -1, 1, 1)
    scale = (1 / (whole * torch.tensor(std, device=device))).view(1, -1, 1, 1)

    def normalize(batch: Tensor) -> Tensor:
        return batch.to(torch.float32, copy=True).sub_(shift).mul_(scale)

    return normalize


class PerSampleImages(TensorDataset):
    """Single images as torchvision's data sets give them with the usual transforms.

    Each goes from a tensor to a Pillow image and back, and is normalised.
    """

    def __init__(self, data: Any, samples: contract.HoldsImages) -> None:
        pixels = transforms.functional.convert_image_dtype(samples.images, torch.uint8)
        # (count, channels, height, width) → (count, height, width[, channels])
        super().__init__(pixels.permute(0, 2, 3, 1).squeeze(-1), samples.labels)
        normalize = transforms.Normalize(*mean_and_std(data))
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        image, label = super().__getitem__(index)
        return self.transform(Image.fromarray(image.numpy())), int(label)


class FloorLoop:
    """The least that a training loop can do, on a copy of the module's network.

    It gathers a batch by index from data on the device, goes forward and backward, and takes a
    fused step of Adam. After every epoch comes a validation, batched as ours. There is no metric,
    no logging, no progress bar and no checkpoint.
    """

    def __init__(self, config: Configuration, network: nn.Module, device: torch.device) -> None:
        data = cast(Any, config.datamodule)
        train = in_memory(config, "train")
        val = in_memory(config, "val")
        self.device = device
        self.images = train.images.to(device)
        self.labels = train.labels.to(device)
        self.val_images = val.images.to(device)
        self.val_labels = val.labels.to(device)
        self.normalize = normalizer(data, self.images, device)
        self.memory_format = memory_format_of(config.module)
        self.network = network
        self.adam = optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=True)
        batch_size = batch_size_of(data) or len(self.labels)
        self.size = min(batch_size, len(self.labels))
        self.eval_size = eval_batch_size_of(data) or batch_size
        dtype = HALF.get(str(config.trainer["precision"]))
        self.autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)

    def epoch(self) -> Epoch:
        """Train and validate once."""
        began = time.perf_counter()
        self.train()
        synchronize(self.device)
        train_s = time.perf_counter() - began
        self.validate()
        return Epoch(train_s, time.perf_counter() - began)

    def train(self) -> None:
        """One pass over the training data."""
        self.network.train()
        for images, labels in self.batches():
            with self.autocast:
                loss = nn.functional.cross_entropy(self.network(images), labels)
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole batches in a random order, (batch, channels, height, width) and (batch,)."""
        order = torch.randperm(len(self.labels), device=self.device)
        whole_batches = len(self.labels) // self.size
        for chosen in order.split(self.size)[:whole_batches]:
            # index_select copies whole images; images[chosen] goes byte by byte.
            images = self.as_input(self.images.index_select(0, chosen))
            yield images, self.labels.index_select(0, chosen)

    def as_input(self, images: Tensor) -> Tensor:
        """Images as the network wants them."""
        return self.normalize(images).contiguous(memory_format=self.memory_format)

    def validate(self) -> None:
        """Count what is right in the validation data."""
        self.network.eval()
        correct = torch.zeros((), device=self.device, dtype=torch.int64)
        images_of = self.val_images.split(self.eval_size)
        labels_of = self.val_labels.split(self.eval_size)
        for images, labels in zip(images_of, labels_of, strict=True):
            with torch.no_grad(), self.autocast:
                logits = self.network(self.as_input(images))
                correct += (logits.argmax(dim=1) == labels).sum()
        # Reading the number waits for the device.
        correct.item()


class PlainLoop:
    """A training loop as most tutorials write it: single samples, and the loss is read each
    step.
    """

    def __init__(self, config: Configuration, network: nn.Module, device: torch.device) -> None:
        data = cast(Any, config.datamodule)
        self.device = device
        self.network = network
        self.adam = optim.Adam(network.parameters(), lr=LEARNING_RATE)
        samples = PerSampleImages(data, in_memory(config, "train"))
        self.loader: DataLoader[Any] = DataLoader(samples, batch_size_of(data), shuffle=True)

    def epoch(self) -> Epoch:
        """Train once; there is no validation."""
        began = time.perf_counter()
        running_loss = 0.0
        self.network.train()
        for images, labels in self.loader:
            images = images.to(self.device)
            labels = labels.to(self.device)
            loss = nn.functional.cross_entropy(self.network(images), labels)
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
            running_loss += loss.item()
        synchronize(self.device)
        seconds = time.perf_counter() - began
        return Epoch(seconds, seconds)


def loops_by_hand(config: Configuration) -> dict[str, Callable[[], Epoch]]:
    """The loops of this file: name → function that trains one epoch.

    Each trains a copy of the module's network. A UserError for a module or data of another kind.
    """
    module = config.module
    if not isinstance(module, contract.HasNetwork) or not isinstance(module.network, nn.Module):
        name = type(module).__name__
        raise UserError(f"--model: loops written by hand train module.network, {name} has none.")
    device = torch.device(wanted_devices(config)[-1])
    network = copy.deepcopy(module.network).to(device)
    network.to(memory_format=memory_format_of(module))
    floor = FloorLoop(config, network, device)
    plain = PlainLoop(config, copy.deepcopy(network), device)
    return {FLOOR: floor.epoch, PLAIN: plain.epoch}


def memory_format_of(module: Any) -> torch.memory_format:
    """How the module wants its images in memory."""
    if isinstance(module, contract.ChoosesMemoryFormat):
        return module.memory_format
    return torch.contiguous_format
