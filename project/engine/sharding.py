"""FSDP as the runs of this project need it: Lightning's strategy, mended where its result would be wrong or unsafe."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - PyTorch's own short name
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim import Optimizer

LARGE = 1_000_000  # parameters of a part that is gathered, and freed, by itself


class ShardedStrategy(FSDPStrategy):
    """Every device keeps a share of the weights, gradients and optimizer state: what ``--strategy fsdp`` chooses.

    Lightning's own gathers all weights at once unless it is told where to cut the module, adds gradients and keeps
    running means in 16 bits under mixed precision, numbers the optimizer's parameters as the module does, and unpickles
    whatever a checkpoint holds. Here a checkpoint is plain data, the same file that any other strategy writes.
    """

    whole_parameters = 0  # of the module before it was cut

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=LARGE), **kwargs})

    @classmethod
    def replace_lightnings(cls) -> None:
        """Let the names ``fsdp`` and ``fsdp_cpu_offload`` mean this strategy."""
        StrategyRegistry.register("fsdp", cls, override=True)
        StrategyRegistry.register("fsdp_cpu_offload", cls, override=True, cpu_offload=True)

    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        self.whole_parameters = sum(parameter.numel() for parameter in self.lightning_module.parameters())
        super().setup(trainer)

    @property
    def mixed_precision_config(self) -> fsdp.MixedPrecision | None:
        config = super().mixed_precision_config
        if config is None or self.mixed_precision is not None:
            return config
        is_mixed = "mixed" in self.precision_plugin.precision
        buffers = torch.float32 if is_mixed else config.buffer_dtype
        return replace(config, reduce_dtype=torch.float32, buffer_dtype=buffers)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        with whole_state(self.model):
            self.model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        with whole_state(self.model, rank_zero_only=True):
            state = FSDP.optim_state_dict(self.model, optimizer)
        if not self.is_global_zero:
            return state
        return FSDP.rekey_optim_state_dict(state, fsdp.OptimStateKeyType.PARAM_ID, self.model, optim=optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.model is not None
        by_name = fsdp.OptimStateKeyType.PARAM_NAME
        with whole_state(self.model):
            for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
                names = FSDP.rekey_optim_state_dict(saved, by_name, self.model, optim=optimizer)
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(self.model, optimizer, names))


def whole_state(model: torch.nn.Module, rank_zero_only: bool = False) -> AbstractContextManager[Any]:
    """A block in which state dicts of a sharded model are those of the whole one, on the CPU. Every rank enters it."""
    return FSDP.state_dict_type(
        model,
        fsdp.StateDictType.FULL_STATE_DICT,
        fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=rank_zero_only),
        fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank_zero_only),
    )


def for_float32_test(strategy: FSDPStrategy, fresh: LightningModule) -> LightningModule:
    """``fresh`` with the trained weights, for a test in float32. The trained module cannot be cut a second time."""
    assert strategy.model is not None
    with whole_state(strategy.model):
        fresh.load_state_dict(strategy.model.state_dict())
    strategy.precision_plugin = FSDPPrecision("32-true")
    return fresh
