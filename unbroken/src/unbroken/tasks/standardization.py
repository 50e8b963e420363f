"""Inputs with mean 0 and deviation 1, by numbers that are part of the module and of its
checkpoints.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from unbroken.errors import require

# Channels of a mean or deviation that a checkpoint may bring. A file that names more was changed.
MOST_CHANNELS = 2**20


@runtime_checkable
class KnowsItsMean(Protocol):
    """A data module that says how its inputs are standardized: one number, or one per channel, of
    inputs in 0-1.
    """

    mean: list[float] | None
    std: list[float] | None


def register_mean_and_std(module: nn.Module, mean: list[float], std: list[float]) -> None:
    """Give a module the buffers ``mean`` and ``std``, which its state dict holds.

    A checkpoint of another number of channels can be loaded. One of an older version that lacks
    both leaves them as they are.

    Args:
        module: It gets the buffers.
        mean: Of the inputs in 0-1: one number, or one per channel.
        std: Their standard deviation, of the same length.
    """
    module.register_buffer("mean", torch.tensor(mean))
    module.register_buffer("std", torch.tensor(std))
    module.register_load_state_dict_pre_hook(take_over_standardization)


def take_mean_and_std(module: nn.Module, datamodule: Any) -> None:
    """Let a module's buffers ``mean`` and ``std`` be those of its data module, where it has both.

    Call it in ``setup``, before training.
    """
    if not isinstance(datamodule, KnowsItsMean):
        return
    if datamodule.mean is None or datamodule.std is None:
        return
    option = f"{type(datamodule).__name__}.std"
    require(min(datamodule.std) > 0, option, "be above 0", datamodule.std)
    buffer: Any = module.mean
    module.mean = torch.tensor(datamodule.mean, dtype=buffer.dtype, device=buffer.device)
    module.std = torch.tensor(datamodule.std, dtype=buffer.dtype, device=buffer.device)


def standardized(inputs: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Inputs with mean 0 and deviation 1, in the type of ``mean``, which is that of the weights.

    Args:
        inputs: (batch, channels, ...), uint8 in 0-255 or floating. Those of another type, such as
            the numbers of tokens, are returned as they are.
        mean: Of the inputs in 0-1: one number (1,), or one per channel (channels,).
        std: Their standard deviation, of the same shape.
    """
    is_bytes = inputs.dtype == torch.uint8
    if not is_bytes and not inputs.is_floating_point():
        return inputs
    whole = 255.0 if is_bytes else 1.0
    # At least float32: in half precision, 255 times a mean is too coarse.
    wide = torch.promote_types(torch.float32, mean.dtype)
    one_per_channel = (-1, *[1] * (inputs.ndim - 2))  # (channels, 1, 1) for images
    middle = (mean.to(wide) * whole).view(one_per_channel)
    spread = (std.to(wide) * whole).view(one_per_channel)
    return inputs.sub(middle).div_(spread).to(mean.dtype)


def take_over_standardization(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Before weights are loaded: give the buffers ``mean`` and ``std`` of a module the size of the
    checkpoint's.

    Checkpoints of older versions lack both; the module's own then stay.
    """
    for name in ("mean", "std"):
        mine: Tensor = getattr(module, name)
        saved = state_dict.setdefault(prefix + name, mine)
        if saved.ndim == 1 and saved.shape != mine.shape and len(saved) <= MOST_CHANNELS:
            setattr(module, name, mine.new_ones(len(saved)))
    means: Tensor = module.mean  # type: ignore[assignment]
    deviations: Tensor = module.std  # type: ignore[assignment]
    if len(means) != len(deviations):
        raise RuntimeError(f"mean has {len(means)} channels, std {len(deviations)}")
