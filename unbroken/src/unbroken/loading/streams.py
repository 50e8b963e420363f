"""A plain loader over a stream (an IterableDataset), with workers that draw the same numbers after
a resume.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import DataLoader
from unbroken.loading.exact_loader import KEPT
from unbroken.loading.own_generators import generators_in, generators_of_modules, seed_them
from unbroken.loading.samplers import cut_of, is_plain, is_stream
from unbroken.loading.seeding import seed_generators
from unbroken.loading.workers import end_workers_at_exit, prepare_worker


class SeededStream(data.IterableDataset[Any]):
    """A stream that seeds its worker's generators at the start of every pass, from (seed, epoch,
    pass, worker).

    PyTorch seeds a worker when it starts. A worker that outlives an epoch (``persistent_workers``)
    would go on drawing, and a resumed run, whose workers are new, would see other numbers.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        # The epoch, and the number of the batch at which its pass begins. In memory that the
        # workers share, for a worker that lives already has its own copy of all else.
        self.place = torch.zeros(2, dtype=torch.int64).share_memory_()

    def begin_pass(self, epoch: int, first: int) -> None:
        """Called in the main process before the next pass."""
        self.place[0] = epoch
        self.place[1] = first

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        if info is not None:
            epoch, first = self.place.tolist()
            # All workers alike, for a stream may draw one order and let each read a part of it.
            own = generators_of_modules() | generators_in(self.dataset)
            seed_them(own, hash((self.seed, epoch, first)))
            seed_generators(hash((self.seed, epoch, first, info.id)))
        return iter(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)


def can_be_seeded(loader: Any) -> bool:
    """Whether a loader's workers read a stream that may be put into a :class:`SeededStream`.

    Not by keys from a sampler without a length, which would be left out; and not a pipe of torch's,
    which torch knows by its class, and shares among the workers.
    """
    if not is_plain(loader) or not loader.num_workers:
        return False
    return is_stream(loader.dataset) and not isinstance(loader.dataset, data.IterDataPipe)


def seeded(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """The same loader over a stream that seeds its workers. The main process' generators are not
    touched here.
    """
    end_workers_at_exit()
    cut = cut_of(loader)
    return DataLoader(
        SeededStream(loader.dataset, seed),
        batch_size=cut.batch_size,
        drop_last=cut.drop_last,
        collate_fn=loader.collate_fn,
        worker_init_fn=partial(prepare_worker, further=loader.worker_init_fn),
        generator=loader.generator,
        **{name: getattr(loader, name) for name in KEPT},
    )
