"""What a module has beside its weights: gradients, modes, and buffers that its state dict leaves
out.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from unbroken import lightning_internals
from unbroken.lightning_internals import version_of
from unbroken.parts.held import Held
from unbroken.parts.part import Part
from unbroken.parts.plain_values import can_be_kept
from unbroken.parts.undeclared.modules import tensors_in
from unbroken.parts.users_objects import UsersObjects
from unbroken.tensors.same_values import is_same
from unbroken.tensors.written_into import is_written_into

# A buffer that the user's code leaves out of checkpoints is kept, if it is no larger: to look
# whether a layer has changed its statistics would cost as much.
ALWAYS_KEPT_BYTES = 2**20


class Gradients(Part):
    """Gradients that the next step still uses: between the batches of one step, in manual
    optimization, where the module's or an optimizer's own ``zero_grad`` may leave them, and of
    weights that no optimizer of the Trainer's has. Adam passes a weight by that has none, and moves
    on one whose gradient is 0.

    Args:
        objects: Who finds the weights that no module of the training has.
    """

    name = "gradients"
    changes_in_validation = False

    def __init__(self, objects: UsersObjects) -> None:
        self._objects = objects

    def take(self, trainer: Trainer) -> dict[str, Tensor]:
        module = trainer.lightning_module
        are_zeroed = module.automatic_optimization and not is_overridden(
            "optimizer_zero_grad", module
        )
        removed: set[int] = set()
        # Nobody knows where the steps of manual optimization end, or what the module zeroes.
        if are_zeroed and not is_inside_step(trainer):
            optimizers = filter(removes_gradients, trainer.optimizers)
            groups = [group for each in optimizers for group in each.param_groups]
            removed = {id(parameter) for group in groups for parameter in group["params"]}
        return {
            name: parameter.grad.cpu()
            for name, parameter in weights_by_name(trainer, self._objects.held).items()
            if parameter.grad is not None and id(parameter) not in removed
        }

    def give_back(self, trainer: Trainer, value: dict[str, Tensor]) -> None:
        weights = weights_by_name(trainer, self._objects.held)
        for name, gradient in value.items():
            if name in weights:
                weights[name].grad = gradient.to(weights[name].device)


def weights_by_name(trainer: Trainer, held: Held) -> dict[str, Tensor]:
    """Whatever may have a gradient: the parameters of the module; the weights that an optimizer
    alone has, by its number; and those that the user's objects hold beside the module.
    """
    module = trainer.lightning_module
    weights: dict[str, Tensor] = dict(module.named_parameters())
    known = set(map(id, weights.values()))
    further: dict[str, Tensor] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        there = [weight for group in optimizer.param_groups for weight in group["params"]]
        further |= {f"optimizers.{number}.{place}": each for place, each in enumerate(there)}
    for name, value in [*held.attributes.items(), *tensors_in(held, module)]:
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            further[f"objects.{name}"] = value
    for name, weight in further.items():
        if id(weight) not in known:
            known.add(id(weight))
            weights[name] = weight
    return weights


def removes_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``zero_grad`` leaves no gradient. One of its own may set it to 0."""
    is_own = "zero_grad" in vars(optimizer)
    return not is_own and type(optimizer).zero_grad is Optimizer.zero_grad


def is_inside_step(trainer: Trainer) -> bool:
    """Whether the batches that are done so far are a part of an accumulated step."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    is_partial = done % trainer.accumulate_grad_batches != 0
    return is_partial and done < trainer.num_training_batches


class Switches(Part):
    """What is on or off for each parameter or layer, where that has changed since the start.

    The start is the module as it was made, before the user's start-up hooks. What has not
    changed since is left out: what the user sets in a constructor wins. A hook or callback may
    have changed others in an earlier epoch.
    """

    of_each_rank = False

    def __init__(self) -> None:
        self.fresh: dict[str, bool] = {}

    def read(self, trainer: Trainer) -> dict[str, bool]:
        """Every switch as it is now, by name."""
        raise NotImplementedError

    def set_one(self, trainer: Trainer, name: str, is_on: bool) -> None:
        """Set a switch that :meth:`read` has found."""
        raise NotImplementedError

    def begin(self, trainer: Trainer) -> None:
        """Note the switches as the module has made them."""
        self.fresh = self.read(trainer)

    def take(self, trainer: Trainer) -> dict[str, bool]:
        now = self.read(trainer)
        return {name: is_on for name, is_on in now.items() if is_on != self.fresh.get(name)}

    def give_back(self, trainer: Trainer, value: dict[str, bool]) -> None:
        # The start-up hooks may have changed what had not changed when the state was taken.
        wanted = {**self.fresh, **value}
        for name, is_on in self.read(trainer).items():
            if wanted.get(name, is_on) != is_on:
                self.set_one(trainer, name, wanted[name])


class FrozenParameters(Switches):
    """Whether each parameter is trained."""

    name = "frozen"

    def read(self, trainer: Trainer) -> dict[str, bool]:
        parameters = trainer.lightning_module.named_parameters()
        return {name: parameter.requires_grad for name, parameter in parameters}

    def set_one(self, trainer: Trainer, name: str, is_on: bool) -> None:
        trainer.lightning_module.get_parameter(name).requires_grad = is_on


class Toggled(Part):
    """Which parameters are trained again when the optimizer is untoggled: those of the others have
    no gradient until then.
    """

    name = "toggled"
    of_each_rank = False

    def take(self, trainer: Trainer) -> dict[str, bool]:
        module = trainer.lightning_module
        states = lightning_internals.before_toggle(module)
        return {name: states[each] for name, each in module.named_parameters() if each in states}

    def give_back(self, trainer: Trainer, value: dict[str, bool]) -> None:
        module = trainer.lightning_module
        states = {module.get_parameter(name): is_on for name, is_on in value.items()}
        lightning_internals.toggle_again(module, states)


class EvalModes(Switches):
    """Whether each part of a module is in training mode. A frozen backbone with batch norms is
    trained in eval mode.
    """

    name = "eval"
    changes_in_validation = False

    def read(self, trainer: Trainer) -> dict[str, bool]:
        modes = None
        if trainer.validating:
            modes = lightning_internals.modes_before_validation(trainer)
        if not modes:
            modes = {n: part.training for n, part in trainer.lightning_module.named_modules()}
        return dict(modes)

    def set_one(self, trainer: Trainer, name: str, is_on: bool) -> None:
        trainer.lightning_module.get_submodule(name).training = is_on


class UntrackedStatistics(Switches):
    """Whether each normalisation layer tracks running statistics. ``BaseFinetuning`` switches that
    off.
    """

    name = "untracked"

    def read(self, trainer: Trainer) -> dict[str, bool]:
        return {name: bool(part.track_running_stats) for name, part in tracking(trainer)}

    def set_one(self, trainer: Trainer, name: str, is_on: bool) -> None:
        part: Any = trainer.lightning_module.get_submodule(name)
        part.track_running_stats = is_on


def tracking(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The layers that may track running statistics, by name."""
    for name, part in trainer.lightning_module.named_modules():
        if hasattr(part, "track_running_stats"):
            yield name, part


class PlainBuffers(Part):
    """Buffers that are not persistent and have changed since the start, such as a queue or a
    running mean; and buffers of any kind that training has made.

    A state dict leaves those that are not persistent out. One that has not changed is left out
    here, too: it may be a large constant table, and the module makes it again. A buffer that
    training has made is in the state dict where it is persistent. Its name here says that it is a
    buffer.
    """

    name = "buffers"
    is_read_after_training = True

    def __init__(self) -> None:
        self.fresh: dict[str, Tensor | None] = {}
        # Of each buffer as training began: its layer, its attribute and its tensor.
        self._places: dict[str, tuple[nn.Module, str, Tensor | None]] = {}
        # The names of those that training had filled, and not replaced, at the save.
        self.filled: set[str] = set()
        self._persistent: set[str] = set()
        self._versions: dict[str, tuple[int, int]] = {}
        self._told: set[str] = set()

    def begin(self, module: LightningModule) -> None:
        """Note the buffers as the module has made them."""
        left_out = plain_buffers(module)
        self._places = {}
        parts = dict(module.named_modules())
        for name, buffer in left_out.items():
            path, _, attribute = name.rpartition(".")
            self._places[name] = (parts[path], attribute, buffer)
        self.fresh = {
            name: None if buffer is None else buffer.detach().cpu().clone()
            for name, buffer in left_out.items()
        }
        self._persistent = {name for name, _ in module.named_buffers() if name not in left_out}
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self._versions = {name: version_of(each) for name, each in tensors if is_dense(each)}

    def take(self, trainer: Trainer) -> dict[str, Tensor | None]:
        module = trainer.lightning_module
        changed: dict[str, Tensor | None] = {}
        left_out = plain_buffers(module)
        for name, buffer in left_out.items():
            value = None if buffer is None else buffer.detach().cpu()
            if name not in self.fresh or not is_same(value, self.fresh[name]):
                changed[name] = value
        for name, buffer in module.named_buffers():
            if name not in left_out and name not in self._persistent:
                changed[name] = buffer.detach().cpu()
        return changed

    def still_those_of_the_start(self) -> list[str]:
        """The names of buffers that training has not put another tensor in the place of."""
        return [
            name
            for name, (part, attribute, buffer) in self._places.items()
            if getattr(part, attribute, None) is buffer
        ]

    def left_out_by_users(
        self, module: LightningModule, weights: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], list[str]]:
        """What the module's own ``state_dict`` or ``on_save_checkpoint`` leaves out, such as a
        frozen network.

        Args:
            module: No strategy has cut it.
            weights: Those that are saved.

        Returns:
            The buffers, such as the statistics of batch norms: they change in a frozen network,
            too. A large one is among them if it has changed. And a line for parameters that have
            changed: to keep them would be against the user's wish.
        """
        own = nn.Module.state_dict(module)
        names = [name for name, each in own.items() if name not in weights and is_dense(each)]
        parameters = dict(module.named_parameters())
        changed = {name for name in names if self._versions.get(name) != version_of(own[name])}
        buffers = {
            name: own[name].detach().cpu().clone()
            for name in names
            if name not in parameters
            if name in changed or own[name].nbytes <= ALWAYS_KEPT_BYTES
        }
        to_tell = sorted((changed & parameters.keys()) - self._told)
        self._told |= set(to_tell)
        if not to_tell:
            return buffers, []
        more = f" and {len(to_tell) - 1} more" if len(to_tell) > 1 else ""
        line = (
            f"a resume may not be exact: training changes {to_tell[0]}{more}, and the module's"
            " state_dict or on_save_checkpoint leaves that out of checkpoints."
        )
        return buffers, [line]

    def give_back(self, trainer: Trainer, value: dict[str, Tensor | None]) -> None:
        # The module has got these from the checkpoint alone, before it was begun with.
        self._persistent -= value.keys()
        give_plain_buffers(trainer.lightning_module, value, self.filled)


class FilledBuffers(Part):
    """Which of the buffers that are not persistent are still the tensors of the start. These are
    filled at a resume, because others may share their memory; those that training has replaced are
    replaced.

    Args:
        buffers: The buffers, which are given back after this part.
    """

    name = "filled_buffers"
    is_read_after_training = True

    def __init__(self, buffers: PlainBuffers) -> None:
        self._buffers = buffers

    def take(self, trainer: Trainer) -> list[str]:
        return self._buffers.still_those_of_the_start()

    def give_back(self, trainer: Trainer, value: list[str]) -> None:
        self._buffers.filled = set(value)


def saves_its_own_way(module: LightningModule) -> bool:
    """Whether a module says itself which weights are saved."""
    hooks = ("state_dict", "on_save_checkpoint")
    return any(is_overridden(hook, module) for hook in hooks)


def is_dense(value: Any) -> bool:
    """Whether a value of a state dict is a dense tensor that has its size."""
    return isinstance(value, Tensor) and not is_lazy(value) and value.layout == torch.strided


def plain_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module that its state dict leaves out, by name. One may be None."""
    buffers: dict[str, Tensor | None] = {}
    for path, part in module.named_modules():
        for name in lightning_internals.buffers_left_out(part):
            # One that was deleted is still on that list.
            if not hasattr(part, name):
                continue
            buffer = getattr(part, name)
            if buffer is None or can_be_kept(buffer):
                buffers[f"{path}.{name}" if path else name] = buffer
    return buffers


def give_plain_buffers(
    module: nn.Module, values: Mapping[str, Tensor | None], filled: Collection[str] = ()
) -> None:
    """Put buffers back into a module that has them, or whose training makes or fills them. Those
    that are ``filled`` stay the tensors that they are.
    """
    parts = dict(module.named_modules())
    there = dict(module.named_buffers(remove_duplicate=False))
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        if path not in parts:
            continue
        if name in there:
            is_filled = name in filled and value is not None and is_written_into(there[name], value)
            if not is_filled:
                copy = None if value is None else value.to(there[name].device, copy=True)
                setattr(parts[path], attribute, copy)
        elif value is not None:
            copy = value.to(device_of(module), copy=True)
            make_buffer(parts[path], attribute, copy, persistent=False)


def make_buffer(part: nn.Module, name: str, value: Tensor, persistent: bool) -> None:
    """Give a layer a buffer that it does not have, or that is None."""
    # The layer may have something else of this name. Then it stays.
    with suppress(KeyError):
        part.register_buffer(name, value, persistent)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights are."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
