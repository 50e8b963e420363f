"""Fetches a batch's samples, with generators that are seeded for it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from unbroken import contract
from unbroken.loading.batches import Request
from unbroken.loading.own_generators import (
    generator_of_the_gpu,
    generators_in,
    generators_of_modules,
    put_back,
    seed_them,
    state_of,
)
from unbroken.loading.samplers import gathers
from unbroken.loading.seeding import (
    generator_states,
    number_of,
    seed_generators,
    states_without_torch,
    torch_seeded,
)
from unbroken.tensors.same_values import is_same


@dataclass
class Fetch:
    """Fetches batches of a map-style dataset, and collates them (but those of a ``gather``).

    All generators are seeded first: in training from (seed, rank, epoch, batch), so that any number
    of workers, and a resumed run, get the same batch; in an evaluation from (seed, sample), however
    the set is cut into batches (but what the collate function draws depends on the batch).

    The dataset's ``gather(indices: int64 tensor)``, ``__getitems__(list)`` or ``__getitem__`` is
    used, the first that it has; for a single key ``__getitem__``. Torch's CPU generator is seeded
    for each batch of a ``gather``, also in an evaluation. To seed the others takes longer than such
    a batch: they are seeded for an epoch's first batch in a process, and for the further ones once
    such a batch has drawn from any of them, or where the dataset or the collate function holds one.

    Generators that the dataset or the collate function holds, and those in global variables of the
    user's modules, are seeded in the same way. Each process looks for them at an epoch's first
    batch: a ``worker_init_fn`` or a ``set_epoch`` may have made them. It looks once more after
    that batch, for ``__getitem__`` may make one when it is called first. Then the batch is fetched
    again, with that one seeded. Those in global variables, and that of the GPU, are put back after
    each batch: the training may draw from them, too.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    seed: int
    # None in an evaluation.
    rank: int | None
    # Whether a request holds a batch's keys; else it holds one key.
    batched: bool
    # Whether the dataset was seen to draw random numbers as it gave several samples at once (of a
    # ``gather``: from other generators than torch's of the CPU), or holds a generator. False:
    # this epoch's first batch has drawn none; None: not known.
    draws: bool | None = field(default=None, init=False)
    own_generators: dict[str, Any] = field(default_factory=dict, init=False)
    global_generators: dict[str, Any] = field(default_factory=dict, init=False)
    # The epoch in which this process has fetched last.
    epoch: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.gathers = gathers(self.dataset)

    def __getitem__(self, request: Request) -> Any:
        epoch = request[0]
        if epoch == self.epoch:
            return self._fetched(request)
        self.epoch = epoch
        self._look_for_generators()
        if not self.draws:
            # An augmentation may begin with a later epoch.
            self.draws = None
        batch = self._fetched(request)
        known = self.global_generators | self.own_generators
        self._look_for_generators()
        for path, generator in (self.global_generators | self.own_generators).items():
            if generator is not known.get(path):
                if not self.draws:
                    # Whether it draws was asked of those alone that were known.
                    self.draws = None
                return self._fetched(request)
        return batch

    def _look_for_generators(self) -> None:
        self.global_generators = generators_of_modules() | generator_of_the_gpu()
        self.own_generators = generators_in((self.dataset, self.collate))
        if self.own_generators:
            self.draws = True

    def _fetched(self, request: Request) -> Any:
        epoch, number, part = request
        if self.gathers:
            # A batch sampler of the user's own gives a list.
            return self._gathered(epoch, number, torch.as_tensor(part))
        keys = part.tolist() if isinstance(part, Tensor) else part
        with self._isolated():
            self._seed_for_batch(epoch, number)
            if not self.batched:
                return self.collate(self._single(keys))
            if self.rank is None:
                return self.collate(self._evaluated(keys))
            return self.collate(self._trained(keys))

    def _seed_for_batch(self, epoch: int, number: int) -> None:
        self._seed(self._seed_of_batch(epoch, number))

    def _seed_of_batch(self, epoch: int, number: int) -> int:
        return hash((self.seed, self.rank or 0, epoch, number))

    def _seed_for_sample(self, key: Any) -> None:
        self._seed(hash((self.seed, number_of(key))))

    def _seed(self, seed: int) -> None:
        seed_them(self.global_generators | self.own_generators, seed)
        seed_generators(seed)

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Fetching may happen in the main process, where the training's generators must not
        change.
        """
        with isolate_rng(include_cuda=False), put_back(self.global_generators.values()):
            yield

    def _states_of_globals(self) -> list[Any]:
        return [state_of(generator) for generator in self.global_generators.values()]

    def _gathered(self, epoch: int, number: int, indices: Tensor) -> Any:
        if self.draws is False:
            with torch_seeded(self._seed_of_batch(epoch, number)):
                return self.dataset.gather(indices)
        with self._isolated():
            self._seed_for_batch(epoch, number)
            if self.draws:
                return self.dataset.gather(indices)
            before = [states_without_torch(), self._states_of_globals()]
            batch = self.dataset.gather(indices)
            self.draws = not is_same([states_without_torch(), self._states_of_globals()], before)
            return batch

    def _single(self, key: Any) -> Any:
        if self.rank is None:
            self._seed_for_sample(key)
        return self.dataset[key]

    def _trained(self, keys: list[Any]) -> Any:
        if isinstance(self.dataset, contract.FetchesSeveral):
            return self.dataset.__getitems__(keys)
        return [self.dataset[key] for key in keys]

    def _evaluated(self, keys: list[Any]) -> Any:
        """Samples whose random numbers do not depend on which others are asked for together with
        them.
        """
        if isinstance(self.dataset, contract.FetchesSeveral):
            return self._evaluated_together(self.dataset, keys)
        samples = []
        for key in keys:
            self._seed_for_sample(key)
            samples.append(self.dataset[key])
        return samples

    def _evaluated_together(self, dataset: contract.FetchesSeveral, keys: list[Any]) -> Any:
        """One call is faster (a database reads once), and as good, unless it draws random
        numbers.
        """
        if not self.draws:
            before = [generator_states(), self._states_of_globals()]
            samples = dataset.__getitems__(keys)
            if is_same([generator_states(), self._states_of_globals()], before):
                return samples
            self.draws = True
        samples = []
        for key in keys:
            self._seed_for_sample(key)
            found = dataset.__getitems__([key])
            if not isinstance(found, (list, tuple)) or len(found) != 1:
                return self._evaluated_as_one(dataset, keys)
            samples += found
        return samples

    def _evaluated_as_one(self, dataset: contract.FetchesSeveral, keys: list[Any]) -> Any:
        warnings.warn(
            f"{type(dataset).__name__} draws random numbers for a whole batch at once: its values "
            "depend on the batch size. Let __getitems__ return a list of samples.",
            stacklevel=2,
        )
        self._seed_for_sample(tuple(keys))
        return dataset.__getitems__(keys)
