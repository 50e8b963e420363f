"""The test of the best checkpoint once, at a run's end, in float32 so that its result is the same
on any device.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from unbroken.cli.cli import Configuration
from unbroken.cli.refusals import RESTORING, is_of_the_ranks, modules_of
from unbroken.cli.trainer_flags import reading_only
from unbroken.errors import UserError
from unbroken.loggers.metrics_csv import FIRST
from unbroken.results.run_result import split_of
from unbroken.seams import Seams
from unbroken.stopping.ranks import say
from unbroken.storage.checkpoint_files import read
from unbroken.storage.seals import fingerprint, is_own
from unbroken.trust import keys

MOST_CHARACTERS = 300  # of an error of torch's, in a line


class NotTested(Exception):
    """The test at the end of a run could not be done, and why. The run is done."""


def final_test(trainer: Trainer, config: Configuration, best_path: Path | None) -> dict[str, float]:
    """Metrics of the best weights on the test set; empty where nothing can be tested. One whose
    name the training has logged, too, or that is a validation's, is called ``test/NAME``, here and
    in all loggers.

    Args:
        trainer: The Trainer that has trained.
        config: What the command line means.
        best_path: The best checkpoint. None: the weights are tested as they are.

    Raises:
        NotTested: The test set or the best checkpoint allows no test.
    """
    module = config.module
    named_as_test = partial(as_test, logged_before=set(trainer.callback_metrics))
    if lacks_for_test(module, config.datamodule):
        return {}
    if isinstance(trainer.strategy, FSDPStrategy):
        from unbroken.checkpoint.sharding import for_float32_test

        with isolate_rng():
            module = for_float32_test(trainer.strategy, config.fresh_module())
    # A precision of float64 stays: the data may need it.
    if isinstance(trainer.precision_plugin, MixedPrecision | HalfPrecision):
        trainer.strategy.precision_plugin = Precision()
        module.float()
    try:
        # Eagerly: for one pass a compiled network would be compiled once more.
        with (
            float32_products(),
            torch.compiler.set_stance("force_eager"),
            named_in_loggers(trainer, named_as_test),
        ):
            found = trainer.test(
                module,
                datamodule=config.datamodule,
                ckpt_path=best_path,
                weights_only=True,
                verbose=False,
            )
    except MisconfigurationException as error:
        # A share of the test set may be less than a batch, which is known only here.
        if "limit_test_batches" not in str(error):
            raise
        raise NotTested(" ".join(str(error).split())) from None
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Training may have made other layers, or other sizes, since the best was saved.
        if best_path is None or RESTORING not in modules_of(error) or is_of_the_ranks(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_CHARACTERS]}"
        raise NotTested(
            f"{best_path.name} does not fit the module as training has left it ({reason})."
        ) from None
    results = {name: float(value) for metrics in found for name, value in metrics.items()}
    return {named_as_test(name): value for name, value in results.items()}


def as_test(name: str, logged_before: Collection[str] = ()) -> str:
    """The name of a result of the test. Where it is that of a validation, or was logged in
    training, as a method that is both does, the result is no other one's: ``test/NAME``.
    """
    is_of_another = name in logged_before or split_of(name)[0] == "val"
    return f"test/{name}" if is_of_another and name not in FIRST else name


@contextmanager
def named_in_loggers(trainer: Trainer, name_of: Callable[[str], str]) -> Iterator[None]:
    """Inside, the loggers of a Trainer get each metric under the name that ``name_of`` gives."""
    seams = Seams(trainer)
    try:
        seams.name_in_loggers(name_of)
        yield
    finally:
        seams.put_back()


@contextmanager
def reading_best(trainer: Trainer, path: Path | None, is_trusted: bool) -> Iterator[None]:
    """Inside, a Trainer reads the best checkpoint of its run as rank zero has judged it.

    The run has written it some time ago. Of a file that no run of this user has written, the
    weights alone are used. Where nothing can be sealed, a run's own file is no other than another.
    """
    judged: tuple[bool, str | None] = (True, None)
    if path is not None and trainer.is_global_zero:
        # What is wrong with the file is told by who uses it.
        with suppress(UserError):
            contents = read(path)
            takes_states = is_trusted or is_own(contents) or keys.seal(()) is None
            judged = (takes_states, fingerprint(contents))
            if not takes_states:
                say(f"{path} has no seal of yours: its weights alone are tested.")
    with_states, expected = trainer.strategy.broadcast(judged)
    with reading_only(trainer, expected, with_states):
        yield


def lacks_for_test(module: LightningModule, data: LightningDataModule | None) -> str | None:
    """What a test lacks: a ``test_step``, or data for it. None if nothing is missing."""
    if not is_overridden("test_step", module):
        return f"{type(module).__name__} has no test_step"
    if is_overridden("test_dataloader", module) or is_overridden("test_dataloader", data):
        return None
    return f"neither {type(module).__name__} nor its data module has a test_dataloader"


class float32_products:  # noqa: N801 - a context manager, used like a function
    """Inside, TF32 is off.

    GPUs use it for convolutions, and for matrix products with ``--matmul_precision high``. PyTorch
    has older and newer switches for it. To read an older one is an error where a newer one was
    changed.
    """

    def __enter__(self) -> None:
        backends: Any = torch.backends
        self._newer = [
            backends.cuda.matmul,
            backends.cudnn.conv,
            backends.cudnn.rnn,
            backends.mkldnn.matmul,
        ]
        self._save()
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = False
        for switch in self._newer:
            switch.fp32_precision = "ieee"

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._products)
        torch.backends.cudnn.allow_tf32 = self._convolutions
        for switch, value in zip(self._newer, self._values, strict=True):
            switch.fp32_precision = value

    def _save(self) -> None:
        self._values = [switch.fp32_precision for switch in self._newer]
        self._products = "highest"
        with suppress(RuntimeError):
            self._products = torch.get_float32_matmul_precision()
        self._convolutions = True
        with suppress(RuntimeError):
            self._convolutions = torch.backends.cudnn.allow_tf32
