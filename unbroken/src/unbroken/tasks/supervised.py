"""The Lightning module for supervised tasks: network, loss, metrics, optimizer and schedule are
configuration.
"""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from unbroken.errors import UserError, require
from unbroken.tasks.activation_checkpointing import recompute_activations
from unbroken.tasks.lazy_layers import give_size, has_no_size
from unbroken.tasks.losses import HALF, counted_targets, evaluate_loss, make_losses
from unbroken.tasks.metrics import check_metrics, gather_metrics
from unbroken.tasks.optimizers import check_rates, make_optimizer, which_decay
from unbroken.tasks.running_sums import Metrics, RunningSums, exact, is_log_step
from unbroken.tasks.schedules import SHAPES, named_schedule, shaped_schedule
from unbroken.tasks.standardization import register_mean_and_std, standardized, take_mean_and_std


class SupervisedModule(LightningModule):
    """Trains a network on batches of (inputs, targets).

    Device, precision, clipping and the like are Trainer flags.

    Inputs (batch, channels, ...) are uint8 in 0-255, taken as 0-1, or floating; :meth:`forward`
    standardizes them by the ``mean`` and ``std`` of the data module (one number or one per channel,
    of the inputs in 0-1), which are part of the state dict. Inputs of another type (token numbers)
    reach the network as they are.

    Logged, each exact over its samples and over all ranks: ``train/loss`` (log steps: the samples
    since the last log step; epoch end: the epoch), ``val/loss``, ``test/loss``, and ``train/NAME``,
    ``val/NAME``, ``test/NAME`` for every entry of ``metrics`` (epoch end). Logged losses have no
    class weights and no label smoothing, and leave out the targets that the loss ignores
    (``ignore_index``).

    Args:
        network: Maps standardized inputs to outputs.
        loss: Name of a class in ``torch.nn``, or the import path of another loss.
        loss_args: Arguments of the loss; a list of numbers, such as class weights, becomes a
            tensor.
        metrics: Metrics of torchmetrics by name. They are given :meth:`predictions` and targets.
        monitor: The logged metric by which checkpoints are compared, and which ReduceLROnPlateau
            follows.
        mode: Whether a good ``monitor`` is small (``min``) or large (``max``).
        optimizer: Name of a class in ``torch.optim``, or the import path of another optimizer.
        lr: Peak learning rate.
        weight_decay: Given to the optimizer for weights of two or more dimensions, not for biases
            and norms.
        optimizer_args: Further arguments of the optimizer, such as ``{momentum: 0.9}``.
        schedule: The learning rate over the run: ``constant``; ``cosine`` or ``linear`` to 0;
            ``onecycle`` (cosine up from 1/25, cosine down to 0). Or a class of
            ``torch.optim.lr_scheduler``, or an import path. Where nothing says how many steps the
            run takes (``--max_time`` alone, or data without a length), a shape stays at ``lr``.
        schedule_args: Arguments of a class named as ``schedule``.
        schedule_interval: How often such a class sets the rate; a shape does it at every step.
        warmup_fraction: Share of the run in which a shape climbs to ``lr``.
        compile: Compile the network in place; its checkpoints are those of the eager network.
        channels_last: Keep images and weights in channels-last order, which tensor cores and a
            CPU's convolutions like.
        activation_checkpointing: Recompute activations in the backward pass instead of storing
            them.
    """

    # No hook of this puts other weights in for a validation.
    validates_trained_weights = True

    mean: Tensor  # buffers, (1,) or (channels,)
    std: Tensor
    train_metrics: Metrics
    eval_metrics: Metrics

    def __init__(
        self,
        network: nn.Module,
        loss: str = "MSELoss",
        loss_args: dict[str, Any] = {},  # noqa: B006 - read only, as are the other plain values
        metrics: dict[str, Metric] = {},  # noqa: B006
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
        optimizer: str = "AdamW",
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        optimizer_args: dict[str, Any] = {},  # noqa: B006
        schedule: str = "linear",
        schedule_args: dict[str, Any] = {},  # noqa: B006
        schedule_interval: Literal["epoch", "step"] = "epoch",
        warmup_fraction: float = 0.2,
        compile: bool = False,
        channels_last: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_rates(lr, weight_decay, warmup_fraction)
        check_arguments(loss_args, schedule, schedule_args)
        self.save_hyperparameters(ignore=["network", "metrics"])
        self.monitor = monitor
        self.mode = mode
        self.optimizer_name = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.optimizer_args = optimizer_args
        self.schedule = schedule
        self.schedule_args = schedule_args
        self.schedule_interval = "step" if schedule in SHAPES else schedule_interval
        self.warmup_fraction = warmup_fraction

        self.network = network
        self.network_text = str(network)  # before anything changes it
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        prepare_network(network, channels_last, activation_checkpointing, compile)

        losses = make_losses(loss, loss_args)
        self.trained_loss = losses.trained
        self.measured_loss = losses.measured
        # A loss of the subclass's own is logged as it is trained.
        self.has_own_loss = type(self).loss is not SupervisedModule.loss
        self.measures_apart = losses.differ and not self.has_own_loss

        self.train_metrics = gather_metrics(metrics)
        self.eval_metrics = self.train_metrics.clone()
        # In a tuple, so that it is no part of the module: a profiler registers hooks on each part,
        # and a part with such hooks cannot be copied.
        self.metrics_to_try = (self.train_metrics.clone(),)
        self.sums = RunningSums(self)

        register_mean_and_std(self, [0.0], [1.0])
        self.decays: list[bool] = []  # for each of parameters(): whether it has weight decay

    # What a subclass may change

    def inputs(self, batch: Any) -> Any:
        """The network's input: the first part of a batch, or a batch without targets."""
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    def targets(self, batch: Any) -> Tensor:
        """The targets of the outputs, (batch, ...): the second part of a batch."""
        return batch[1]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """The loss of a batch, yours to override.

        It is a scalar, the mean, or a value per sample (batch, ...). In training
        (``self.training``) its mean is minimised; in evaluation its exact mean
        over all samples is logged.
        """
        loss = self.trained_loss if self.training else self.measured_loss
        return evaluate_loss(loss, outputs, self.targets(batch))

    def predictions(self, outputs: Tensor) -> Tensor:
        """What metrics and ``predict`` see, (batch, ...).

        These are probabilities where the loss takes logits, else the outputs as they are.
        """
        if outputs.dtype in HALF:
            outputs = outputs.float()  # probabilities of half precision would be coarse
        if isinstance(self.trained_loss, nn.CrossEntropyLoss | nn.NLLLoss):
            return outputs.softmax(dim=1)
        if isinstance(self.trained_loss, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss):
            return outputs.sigmoid()
        return outputs

    def metric_targets(self, targets: Tensor) -> Tensor:
        """Targets as metrics take them."""
        return targets

    # What Lightning calls

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the network for inputs as the data module gives them, both (batch, ...)."""
        return self.network(self.standardize(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss of a batch, a scalar, which Lightning minimises."""
        outputs, targets = self.outputs_and_targets(batch)
        loss = self.loss(outputs, batch)
        if loss.ndim > 0:
            loss = loss.mean()
        self.sums.count_later(loss.detach(), outputs.detach(), targets)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Count a batch. Its outputs (batch, ...) are for callbacks that look at predictions."""
        if len(self.targets(batch)) == 0:
            return None  # there are more ranks than samples
        outputs, targets = self.outputs_and_targets(batch)
        self.sums.count(self.loss(outputs, batch), outputs, targets)
        return outputs

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """:meth:`predictions` for raw inputs, with or without targets beside them."""
        return self.predictions(self.outputs_of(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        if self.schedule in SHAPES:
            shape = self.schedule
            schedule = shaped_schedule(optimizer, shape, self.warmup_fraction, self.trainer)
        else:
            schedule = named_schedule(optimizer, self.schedule, self.schedule_args, self.mode)
        settings = {
            "scheduler": schedule,
            "interval": self.schedule_interval,
            "monitor": self.monitor,
        }
        return {"optimizer": optimizer, "lr_scheduler": settings}

    def setup(self, stage: str) -> None:
        """Before training: take over the data's ``mean`` and ``std``, forget another training."""
        # A resumed run counts its batches in other groups, and the sums must not tell the
        # difference.
        widest = exact(torch.empty(0, device=self.trainer.strategy.root_device)).dtype
        self.train_metrics.set_dtype(widest)
        self.eval_metrics.set_dtype(widest)
        self.sums.are_tried = False
        if stage != "fit":
            return
        self.sums.begin_training()
        datamodule = getattr(self.trainer, "datamodule", None)
        take_mean_and_std(self, datamodule)
        if has_no_size(self.network):
            give_size(self.network, self.outputs_of, datamodule)
            self.network.to(memory_format=self.memory_format)
        self.decays = which_decay(self.parameters())  # before a strategy wraps the parameters

    # When what is logged

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning drops what is logged between log steps, and to log in every step costs more than
        # the step itself.
        if is_log_step(self.trainer, batch_idx):
            self.log_means("train", self.sums.means_since_log_step())

    def on_train_epoch_end(self) -> None:
        self.log_means("train", self.sums.means_of_epoch())

    def on_validation_epoch_start(self) -> None:
        self.sums.begin_evaluation()

    def on_validation_epoch_end(self) -> None:
        self.log_means("val", self.sums.means_of_evaluation())

    def on_test_epoch_start(self) -> None:
        self.sums.begin_evaluation()

    def on_test_epoch_end(self) -> None:
        self.log_means("test", self.sums.means_of_evaluation())

    def log_means(self, split: str, means: dict[str, Tensor]) -> None:
        """Log means of all ranks as ``split/NAME``. The progress bar shows those of validation."""
        named = {f"{split}/{name}": mean for name, mean in means.items()}
        self.log_dict(named, prog_bar=split == "val")

    # What a checkpoint holds besides weights

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["network"] = self.network_text

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Warn of another network's weights, which load without an error where shapes are equal."""
        saved_text = checkpoint.get("network", self.network_text)
        if saved_text != self.network_text:
            rank_zero_warn(
                "the checkpoint's network is another than this module's: "
                "load_from_checkpoint(network=...)."
            )

    def metric_state(self) -> dict[str, Tensor]:
        """What a resumed run goes on from: sums of losses. The engine saves torchmetrics' sums."""
        return self.sums.state()

    def load_metric_state(self, state: dict[str, Tensor]) -> None:
        self.sums.load_state(state)

    # The parts of the above

    def standardize(self, inputs: Tensor) -> Tensor:
        """Inputs (batch, channels, ...) with mean 0 and deviation 1, in the type of the weights.

        Images get the memory format of the network.
        """
        standard = standardized(inputs, self.mean, self.std)
        if standard is inputs or inputs.ndim != 4:
            return standard
        return standard.contiguous(memory_format=self.memory_format)

    def outputs_of(self, batch: Any) -> Tensor:
        """Outputs of the network (batch, ...) for a batch with or without targets."""
        return self(self.inputs(batch))

    def outputs_and_targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Outputs and targets of a batch, (batch, ...) each.

        Outputs (batch, 1) become (batch,) if the targets are (batch,): the two would broadcast to
        (batch, batch).
        """
        outputs = self.outputs_of(batch)
        targets = self.targets(batch)
        if outputs.shape == (*targets.shape, 1):
            outputs = outputs.squeeze(-1)
        if targets.is_floating_point() and outputs.shape != targets.shape:
            option = f"--model.network {type(self.network).__name__}"
            shapes = f"{tuple(targets.shape)}, got {tuple(outputs.shape)}"
            raise UserError(f"{option} must give the targets' shape {shapes}.")
        if not self.sums.are_tried:
            self.try_metrics(outputs.detach(), targets)
        return outputs, targets

    def try_metrics(self, outputs: Tensor, targets: Tensor) -> None:
        """Try the configured metrics on the first batch: what cannot be logged is an error now."""
        self.sums.are_tried = True
        predictions, wanted = self.sums.as_metrics_take_them(outputs, targets)
        (metrics,) = self.metrics_to_try
        check_metrics(metrics.to(outputs.device), predictions, wanted)

    def losses_to_log(self, losses: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """The values whose mean is ``train/loss``: those that were trained, or others without
        weights and smoothing.
        """
        if self.measures_apart:
            return evaluate_loss(self.measured_loss, outputs, targets)
        return losses

    def counted_targets(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Which targets the logged loss counts, bool in their shape; None: all of them.

        A loss of the subclass's own counts all of them.
        """
        if self.has_own_loss:
            return None
        return counted_targets(self.measured_loss, outputs, targets)

    def make_optimizer(self) -> Optimizer:
        """The optimizer, fused where that can be; biases and norms, of less than two dimensions, do
        not decay.
        """
        if len(self.decays) != len(list(self.parameters())):
            # There was no setup(), or there are new parameters since.
            self.decays = which_decay(self.parameters())
        return make_optimizer(
            self,
            self.optimizer_name,
            self.lr,
            self.weight_decay,
            self.decays,
            self.optimizer_args,
        )


def check_arguments(
    loss_args: dict[str, Any], schedule: str, schedule_args: dict[str, Any]
) -> None:
    """A UserError for arguments that a loss or a schedule cannot have."""
    if schedule in SHAPES:
        must = f"be empty: {schedule} has none"
        require(not schedule_args, "--model.schedule_args", must, schedule_args)
    must = "be without reduction: the mean is trained"
    require("reduction" not in loss_args, "--model.loss_args", must, loss_args)


def prepare_network(
    network: nn.Module, channels_last: bool, activation_checkpointing: bool, compile: bool
) -> None:
    """Change a network in place, as the flags of these names say.

    The keys of its state dict stay the same.
    """
    if channels_last and not has_no_size(network):
        network.to(memory_format=torch.channels_last)
    if activation_checkpointing:
        recompute_activations(network)
    if compile:
        # Not torch.compile(network): that would prefix every key with `_orig_mod.`.
        network.compile()
