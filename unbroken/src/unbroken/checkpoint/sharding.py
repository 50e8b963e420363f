"""FSDP as the runs of this project need it: Lightning's strategy, mended where its result would be
wrong or unsafe.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - PyTorch's own short name
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim import Optimizer
from unbroken.errors import UserError
from unbroken.tensors.unsized import CANNOT_BE_SHARED, has_lazy_layers

# Parameters of a part that is gathered, and freed, by itself.
LARGE = 1_000_000


class ShardedStrategy(FSDPStrategy):
    """What ``--strategy fsdp`` chooses: every device keeps a share of weights, gradients and
    optimizer state.

    Lightning's own strategy gathers all weights at once unless it is told where to cut the module.
    Under mixed precision it adds gradients and keeps running means in 16 bits. It numbers the
    optimizer's parameters as the module does, and unpickles whatever a checkpoint holds. Here a
    checkpoint is plain data, the same file that any other strategy writes.
    """

    # Of the module before it was cut.
    whole_parameters = 0
    lightning_restore_optimizer = True

    def __init__(self, **kwargs: Any) -> None:
        cut_where_large = partial(size_based_auto_wrap_policy, min_num_params=LARGE)
        super().__init__(**{"auto_wrap_policy": cut_where_large, **kwargs})

    def setup(self, trainer: Trainer) -> None:
        if has_lazy_layers(trainer.lightning_module):
            raise UserError(CANNOT_BE_SHARED)
        parameters = list(trainer.lightning_module.parameters())
        self.whole_parameters = sum(parameter.numel() for parameter in parameters)
        if self.world_size == 1 or self.sharding_strategy is fsdp.ShardingStrategy.NO_SHARD:
            lay_out_in_order(parameters)
        super().setup(trainer)

    @property
    def mixed_precision_config(self) -> fsdp.MixedPrecision | None:
        config = super().mixed_precision_config
        if config is None or self.mixed_precision is not None:
            return config
        buffers = config.buffer_dtype
        if "mixed" in self.precision_plugin.precision:
            buffers = torch.float32
        return replace(config, reduce_dtype=torch.float32, buffer_dtype=buffers)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with whole_state(self) as model:
            model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with whole_state(self, rank_zero_only=True) as model:
            state = FSDP.optim_state_dict(model, optimizer)
        if not self.is_global_zero:
            return state
        by_number = fsdp.OptimStateKeyType.PARAM_ID
        return FSDP.rekey_optim_state_dict(state, by_number, model, optim=optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        by_name = fsdp.OptimStateKeyType.PARAM_NAME
        states = checkpoint["optimizer_states"]
        with whole_state(self) as model:
            for optimizer, saved in zip(self.optimizers, states, strict=False):
                named = FSDP.rekey_optim_state_dict(saved, by_name, model, optim=optimizer)
                share = FSDP.optim_state_dict_to_load(model, optimizer, named)
                optimizer.load_state_dict(share)


StrategyRegistry.register("fsdp", ShardedStrategy, override=True)
StrategyRegistry.register("fsdp_cpu_offload", ShardedStrategy, override=True, cpu_offload=True)


@contextmanager
def whole_state(strategy: FSDPStrategy, rank_zero_only: bool = False) -> Iterator[Any]:
    """The sharded model. In the block its state dicts are those of the whole one, on the CPU.

    Every rank must enter it.
    """
    model: Any = strategy.model
    weights = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=rank_zero_only)
    optimizer = fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank_zero_only)
    with FSDP.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, weights, optimizer):
        yield model


def for_float32_test(strategy: FSDPStrategy, fresh: LightningModule) -> LightningModule:
    """``fresh`` with the trained weights, for a test in float32.

    The trained module cannot be cut a second time.
    """
    with whole_state(strategy) as model:
        fresh.load_state_dict(model.state_dict())
    strategy.precision_plugin = FSDPPrecision("32-true")
    return fresh


def lay_out_in_order(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters the memory format of a new tensor, in the place of channels_last.

    Where FSDP shards nothing, it reads the gradient of a parameter in channels_last as that of
    other elements: an optimizer then moves the wrong weights, and a fused one refuses to on a GPU.
    """
    for parameter in parameters:
        parameter.data = parameter.data.contiguous()
