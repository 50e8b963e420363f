"""The exact form of a plain loader over a map-style dataset."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import DataLoader
from unbroken import contract
from unbroken.lightning_internals import iterator_of
from unbroken.loading.batches import ExactBatches, Request, equally_many
from unbroken.loading.fetch import Fetch
from unbroken.loading.samplers import cuts_as_torch_does, exact_source, gathers
from unbroken.loading.workers import end_workers_at_exit, iterate, prepare_worker

# What an exact loader takes over from the loader that was given.
KEPT = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "pin_memory",
    "timeout",
    "in_order",
)


class PlainRequests(data.Sampler[Request]):
    """The same requests without tensors, for worker processes.

    A tensor would be sent through shared memory. Where that is full, the request would be lost, and
    worker and training would wait for each other.
    """

    def __init__(self, batches: ExactBatches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Request]:
        for epoch, number, part in self.batches:
            yield epoch, number, part.tolist() if isinstance(part, torch.Tensor) else part


class ExactLoader(DataLoader[Any]):
    """The exact form of a plain loader: to the user's code the same loader, sampler apart.

    Args:
        loader: The plain loader (see :func:`unbroken.loading.samplers.is_plain`) over a
            map-style dataset.
        training: Whether it is trained on, or evaluated.
        seed: The order and all random numbers of the data come from it, unless the sampler gets
            other ``seeds``.
        rank: This process, 0 to ``world_size - 1``.
        world_size: Processes that train together.
        own_share: The loader gives this rank's share of the data already: its batches are not cut
            for the ranks.

    Raises:
        UserError: An evaluation cannot be shared by so many ranks.
    """

    sampler: ExactBatches
    # Whether all ranks have equally many batches, so that they can exchange something at each one.
    ranks_agree = True
    _iterator = iterator_of("fetching")

    def __init__(
        self,
        loader: DataLoader[Any],
        training: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        own_share: bool = False,
    ) -> None:
        dataset: Any = loader.dataset
        batch_sampler: Any = loader.batch_sampler
        source = exact_source(loader, training, own_share)
        # With batch_size=None the dataset returns whole batches; with a batch sampler of his own
        # the user cuts them.
        batch_size = None
        drop_last = False
        if cuts_as_torch_does(batch_sampler):
            batch_size = batch_sampler.batch_size
            drop_last = batch_sampler.drop_last
        elif source is batch_sampler and not training and world_size > 1 and not own_share:
            source = equally_many(list(source), world_size)
        in_memory = gathers(dataset)
        is_on_device = in_memory and isinstance(dataset, contract.LivesOnDevice)
        batches = ExactBatches(
            source,
            batch_size,
            drop_last=drop_last,
            training=training,
            in_memory=in_memory,
            seed=seed,
            rank=rank,
            world_size=world_size,
            device=dataset.device if is_on_device else None,
            own_share=own_share,
        )
        # DataLoader.__init__ would take other arguments, and a subclass may have others still.
        vars(self).update(vars(loader))
        vars(self)["sampler"] = batches
        fetch: Any = Fetch(
            dataset,
            loader.collate_fn,
            seed,
            rank=rank if training else None,
            batched=batch_sampler is not None,
        )
        self.fetching: DataLoader[Any] = DataLoader(
            fetch,
            sampler=PlainRequests(batches) if loader.num_workers else batches,
            # A request is a whole batch: PyTorch neither collates nor copies it.
            batch_size=None,
            # PyTorch's own would search every batch for arrays.
            collate_fn=torch.nn.Identity(),
            worker_init_fn=partial(prepare_worker, further=loader.worker_init_fn),
            # PyTorch draws a seed for the workers. It should not come from the training's
            # generator.
            generator=torch.Generator().manual_seed(seed),
            **{name: getattr(loader, name) for name in KEPT},
        )
        if self.num_workers:
            end_workers_at_exit()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches. A generator: workers start when the first batch is asked for, at an epoch's
        start.
        """
        fetch: Any = self.fetching.dataset
        fetch.seed = self.sampler.seeds.draws
        if self.sampler.in_memory and not self.num_workers and not self.pin_memory:
            # PyTorch's loader would take longer than the batch.
            for request in self.sampler:
                yield fetch[request]
        else:
            yield from iterate(self.fetching)
