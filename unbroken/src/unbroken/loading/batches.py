"""Which samples are in which batch of which rank: a function of seed, epoch, pass, what the sampler
held as the pass began, and how the order is cut.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, islice, pairwise
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils import data
from unbroken import contract
from unbroken.errors import UserError
from unbroken.loading.order_of_sampler import (
    digests_of,
    give_order,
    is_long,
    is_same_order,
    order_of,
)
from unbroken.loading.position import DataStart, LoaderPosition
from unbroken.loading.samplers import (
    Cut,
    cut_of,
    exact_source,
    gathers,
    generators_of_order,
    has_state,
    samplers_within,
)
from unbroken.loading.seeding import seed_generators
from unbroken.tensors.same_values import is_same

# A batch's epoch, its number in the epoch (which goes on counting over several passes), and the
# keys of its samples.
Request = tuple[int, int, Any]


class ExactBatches(LoaderPosition, data.Sampler[Request]):
    """What one rank's loader asks its dataset for.

    Training: global batch ``k`` is ``order[k·B·W : (k+1)·B·W]`` and rank ``r`` takes its ``r``-th
    part, so W ranks with batch B train on what one rank with batch B·W trains on. The rest is a
    last, smaller batch, or left out with ``drop_last``. The ranks have equally many samples of it,
    because a step may gather them: where the rest cannot be shared evenly, the first samples of the
    order come once more, W - 1 at most, as PyTorch's DistributedSampler has it.

    Evaluation: every sample comes once (with ``drop_last``, those of one rank's smaller last batch
    do not come). One rank has the batches of the loader that was given. On
    several ranks global batches differ by at most one sample: all ranks have equally many, so that
    none waits for one that has finished.

    The sampler, the batch size and ``drop_last`` are those that the loader has as a pass begins.

    Args:
        loader: As the user gave it.
        training: Whether it is trained on, or evaluated.
        seed: For the order, and for what is drawn as a batch is fetched.
        rank: This process, 0 to ``world_size - 1``.
        world_size: Processes that train together.
        own_share: The user has cut this rank's share himself: its batches are those of one rank.

    Raises:
        UserError: An evaluation cannot be shared by so many ranks.
    """

    def __init__(
        self,
        loader: data.DataLoader[Any],
        training: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        own_share: bool = False,
    ) -> None:
        super().__init__(loader, seed)
        self.training = training
        self.rank = rank
        self.world_size = world_size
        self.own_share = own_share
        dataset: Any = loader.dataset
        # The dataset gives whole batches (see GathersBatches), also of no samples.
        self.in_memory = gathers(dataset)
        is_on_device = self.in_memory and isinstance(dataset, contract.LivesOnDevice)
        # Where the dataset is asked.
        self.device: torch.device | None = dataset.device if is_on_device else None
        # Whether all ranks have equally many batches, so that they can exchange something at each.
        self.ranks_agree = True
        # Of a pass that is begun again: the sampler's state as it began, and at the save. None: the
        # next pass is a new one.
        self._state_at_begin: Any = None
        self._state_at_save: Any = None
        # The batches of a batch sampler of the user's own that several ranks evaluate; else None.
        self._dealt: list[list[Any]] | None = None
        is_shared = not training and self.parts > 1
        if is_shared and self.source is loader.batch_sampler:
            batches: Any = self.source
            self._dealt = equally_many(self._drawn(batches, None, self._epoch_seed()), world_size)
        # By what the sampler of a training gives its order, as the user has made it.
        self._as_made = order_of(self.source) if training else {}
        self._digests_as_made = digests_of(self._as_made)
        # The epoch of the pass whose begin is noted.
        self._epoch_of_states: int | None = None
        # The order of the pass that a run resumes in, until it is read.
        self._order_to_resume: Any = None
        # Of the pass that was begun last, or is begun again. None: there was none.
        self._samples_of_pass: int | None = None
        if not training:
            self._check_that_it_can_be_shared()

    @property
    def source(self) -> Any:
        """The sampler whose order is cut into batches, or a batch sampler."""
        if self._dealt is not None:
            return self._dealt
        return exact_source(self.loader, self.training, self.own_share)

    @property
    def stateful(self) -> Any:
        """The sampler, if it has a state."""
        source = self.source
        return source if has_state(source) else None

    def state(self) -> Any:
        """The sampler's state; of one without, by what it gives its order."""
        return order_of(self.source) if self.stateful is None else super().state()

    def state_to_start_after(self, batches: int, epoch_ends: bool) -> tuple[int, Any]:
        """See the base class. The state has the sampler's as the pass began (``begun``), by which
        its order is drawn again, and that of now, because training may have changed it since;
        the ``samples`` of the pass; and digests of what the user's code has made (``made``).

        What a sampler holds is left out where it is long, and training has not changed it.
        """
        place, begun = super().state_to_start_after(batches, epoch_ends)
        now = self.state()
        state: dict[str, Any] = {"now": now, "made": self._digests_as_made}
        if not epoch_ends:
            state["samples"] = self._samples_of_pass
        if not epoch_ends and begun is not None and not self._is_same(begun, now):
            state["begun"] = begun
        elif self.stateful is None and is_long(now) and self._is_same(self._as_made, now):
            del state["now"]
        return place, state

    def _is_same(self, one: Any, other: Any) -> bool:
        return is_same_order(one, other) if self.stateful is None else is_same(one, other)

    def load(self, state: Any) -> None:
        self._samples_of_pass = state.get("samples")
        self._state_at_begin = state.get("begun")
        self._state_at_save = state.get("now")
        self._load(self._state_at_save if self._state_at_begin is None else self._state_at_begin)

    def _load(self, state: Any) -> None:
        if self.stateful is None:
            give_order(self.source, state or {})
        elif state is not None:
            super().load(state)

    @property
    def takes_state(self) -> bool:
        return True

    def what_is_made_otherwise(self, state: Any, is_made_for_each_epoch: bool) -> str | None:
        """See the base class. A split that is drawn at each start has other indices, and a
        validation then reads what was trained on.
        """
        name = type(self.source).__name__
        for place, digest in state.get("made", {}).items():
            if self._digests_as_made.get(place, digest) == digest:
                continue
            if "now" not in state:
                return f"{name} has other {place.rpartition('.')[2]} than at the save"
            if place.endswith(".indices") and not is_made_for_each_epoch:
                return (
                    f"{name} was made with other indices than before the save (it has those of the"
                    " save again, but a validation with the others reads what was trained on: give"
                    " the split a seed)"
                )
        return None

    @property
    def cut(self) -> Cut:
        """How the next pass is cut into batches."""
        cut = self.cut_of_rest or cut_of(self.loader)
        if cut.batch_size is not None and self.training and cut.drop_last:
            # A set that is smaller than a batch is one batch: drop_last would leave nothing.
            largest = max(1, self.num_samples // self.parts)
            return Cut(min(cut.batch_size, largest), cut.drop_last)
        return cut

    @property
    def num_samples(self) -> int:
        """Samples (or batches) of a whole pass. A dataset may change its length between passes."""
        return len(self.source)

    @property
    def parts(self) -> int:
        """Into how many parts a batch of the source is cut."""
        return 1 if self.own_share else self.world_size

    @property
    def part(self) -> int:
        """Which of these parts is this rank's."""
        return 0 if self.own_share else self.rank

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together see per batch of the next pass; with a batch sampler,
        batches.
        """
        return self._global_batch_size(self.cut)

    @property
    def global_batch_size_of_pass(self) -> int:
        """The same of the pass that is read."""
        return self._global_batch_size(self.cut_of_pass or self.cut)

    def _global_batch_size(self, cut: Cut) -> int:
        return (cut.batch_size or 1) * self.world_size

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._cuts(0, self._samples_to_read)) - 1

    @property
    def start_sample(self) -> int:
        """Samples of the source before the next pass's first one."""
        return self._start_sample(self._samples_to_read)

    @property
    def start_batch(self) -> int:
        """The number in the epoch of the next pass's first batch."""
        return self._first_batch(self.start_sample, self._samples_to_read)

    @property
    def _samples_to_read(self) -> int:
        """The samples of the next pass."""
        return self.num_samples if self._order_to_resume is None else len(self._order_to_resume)

    def _start_sample(self, samples: int) -> int:
        """See :attr:`start_sample`: of a pass of so many samples."""
        batches_of_this_pass = max(0, self.start.batches - self.batches_before)
        # The batches in which they were seen may have had another size.
        samples_per_batch = self.start.samples_per_batch or self.global_batch_size
        done = batches_of_this_pass * samples_per_batch
        if self.own_share:
            done //= self.world_size
        return min(done, samples)

    def _first_batch(self, first_sample: int, samples: int) -> int:
        """See :attr:`start_batch`: of a pass of so many samples."""
        left_out = len(self._cuts(0, samples)) - len(self._cuts(first_sample, samples))
        return self.batches_before + left_out

    def __iter__(self) -> Iterator[Request]:
        self.take_epoch()
        if self.start.epoch_is_trained:
            # Worker processes request batches in advance. Return now, so that the source's next
            # order is not drawn before the next epoch.
            return
        order = self._order()
        if self.device is not None and isinstance(order, Tensor):
            order = order.to(self.device)
        epoch = self.start.epoch
        # A sampler may give fewer than it says, and training may have changed how many it says.
        first_sample = self._start_sample(len(order))
        cuts = self._cuts(first_sample, len(order))
        first_batch = self._first_batch(first_sample, len(order))
        if cuts[-1] > len(order):
            order = repeated(order, cuts[-1])
        gives_batches = self.cut.batch_size is None
        self.cut_of_pass = self.cut
        # The next iteration starts at the first batch.
        self.start = DataStart(epoch)
        self.cut_of_rest = None
        for number, (begin, end) in enumerate(pairwise(cuts), start=first_batch):
            mine = begin + (end - begin) * self.part // self.parts
            others = begin + (end - begin) * (self.part + 1) // self.parts
            yield epoch, number, order[mine] if gives_batches else order[mine:others]
        self.batches_before = first_batch + len(cuts) - 1 if self.cycles else 0

    def _check_that_it_can_be_shared(self) -> None:
        if self.cut.batch_size is None:
            what = "ready batches"
            is_possible = self.num_samples % self.parts == 0
        else:
            what = "samples"
            is_possible = self.num_samples >= self.parts or self.in_memory
        if not is_possible:
            raise UserError(
                f"--devices {self.world_size}: an evaluation of {self.num_samples} {what} "
                "cannot be shared. Use fewer."
            )

    def draw_again(self) -> str | None:
        """See the base class. A validation may come before the next batch, and change the
        sampler: it is by now what it was at the save.
        """
        if self.start.epoch_is_trained:
            return None
        before = self._samples_of_pass
        self._order_to_resume = self._order()
        now = len(self._order_to_resume)
        if before in (None, now):
            return None
        return f"this epoch began with {before:,} samples, and is drawn again from {now:,}"

    def _order(self) -> Any:
        """The samples (or batches) of a whole pass in order, the same on every rank."""
        if self._order_to_resume is not None:
            order, self._order_to_resume = self._order_to_resume, None
            return order
        begun, self._state_at_begin = self._state_at_begin, None
        if begun is not None:
            # A data module that holds the sampler has got the state of the save back since.
            self._load(begun)
        is_trainings = begun is not None or self._is_trainings_pass()
        state = self.state()
        order = self._order_of_pass()
        if is_trainings:
            earlier_passes = self.states if self.batches_before else {}
            self.states = {**earlier_passes, self.batches_before: state}
            self._samples_of_pass = len(order)
            self._epoch_of_states = self.start.epoch
        if begun is not None:
            self.return_to_save()
        return order

    def return_to_save(self) -> None:
        # Some states are a place in a pass: to load one lets the next pass begin there.
        if self._state_at_save is not None and not self._is_same(self.state(), self._state_at_save):
            self._load(self._state_at_save)

    def _is_trainings_pass(self) -> bool:
        """Whether the pass that begins is the Trainer's, and not one by which the user's code looks
        at some batches inside an epoch. Where no Trainer counts batches, and where a loader begins
        again beside a longer one, each pass is.
        """
        if self.batches_now is None or self.cycles or self._epoch_of_states != self.start.epoch:
            return True
        return self.batches_now() == 0

    def _order_of_pass(self) -> Any:
        epoch_seed = self._epoch_seed()
        source = self.source
        samples = self.num_samples
        if type(source) is data.SequentialSampler:
            return torch.arange(samples)
        permutes = type(source) is data.RandomSampler and not source.replacement
        if permutes and samples == len(source.data_source):
            generator = torch.Generator().manual_seed(epoch_seed)
            return torch.randperm(samples, generator=generator)
        order = self._drawn(source, samples, epoch_seed)
        if not order and samples and self.stateful is not None:
            # The state was that of an ended pass, which gives nothing more (torchdata's samplers).
            # The next pass begins at the start, in a resumed run as in one that was not stopped.
            order = self._drawn(source, samples, epoch_seed)
        return packed(order)

    def _drawn(self, source: Any, most: int | None, epoch_seed: int) -> list[Any]:
        """What a sampler gives, at most so many, the same on every rank. There are samplers that
        never end.
        """
        # Only the CPU's generators are seeded.
        with isolate_rng(include_cuda=False):
            seed_generators(epoch_seed)
            for sampler in samplers_within(source):
                if isinstance(sampler, contract.OrdersByEpoch):
                    sampler.set_epoch(self.start.epoch)
            generators = generators_of_order(source)
            # They may be for more than the order, and stay where they were.
            states = [generator.get_state() for generator in generators]
            for generator in generators:
                generator.manual_seed(epoch_seed)
            order = list(map(value_of, islice(source, most)))
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        return order

    def _epoch_seed(self) -> int:
        # The epochs of two seeds lie far apart. To change these numbers would change the order of
        # runs that are resumed. ``hash`` of whole numbers is the same in every Python.
        seed = self.seeds.order * 1_000_003 + self.start.epoch
        if self.batches_before:
            # A further pass of the same epoch has another order.
            return hash((seed, self.batches_before)) % 2**63
        return seed % 2**63

    def _cuts(self, first: int = 0, samples: int | None = None) -> list[int]:
        """Where the global batches of an epoch's samples from ``first`` on begin, and the last one
        ends. In training it may end after the last of the ``samples`` (default: all).
        """
        if samples is None:
            samples = self.num_samples
        if self.training or self.parts == 1 or self.cut.batch_size is None:
            return self._cuts_of_one_size(first, samples)
        return self._equal_cuts(samples)

    def _cuts_of_one_size(self, first: int, samples: int) -> list[int]:
        cut = self.cut
        samples_per_batch = (cut.batch_size or 1) * self.parts
        cuts = list(range(first, samples + 1, samples_per_batch))
        rest = samples - cuts[-1]
        if rest and not cut.drop_last:
            share = math.ceil(rest / self.parts)
            cuts.append(cuts[-1] + share * self.parts)
        return cuts

    def _equal_cuts(self, samples: int) -> list[int]:
        """The cuts of an evaluation on several ranks: batches differ by one sample at most."""
        batch_size, drop_last = self.cut
        assert batch_size is not None
        if drop_last and samples > batch_size:
            # Leave out what one rank leaves out.
            samples -= samples % batch_size
        largest_share = math.ceil(samples / self.parts)
        batches = math.ceil(largest_share / batch_size)
        if not self.in_memory:
            # No rank has a batch of no samples.
            batches = min(batches, samples // self.parts)
        batches = max(1, batches)
        return [samples * number // batches for number in range(batches + 1)]


def value_of(entry: Any) -> Any:
    """An entry of an order. One of a tensor of indices would change with that tensor."""
    return entry.clone() if isinstance(entry, Tensor) else entry


def packed(order: list[Any]) -> Any:
    """An order of whole numbers as one tensor, which takes less memory; others as they are."""
    if not order or not all(type(key) is int for key in order):
        return order
    try:
        return torch.tensor(order)
    except (ValueError, RuntimeError):
        # A key may be too large for 64 bits, as a hash is.
        return order


def repeated(order: Any, length: int) -> Any:
    """An order that goes on with its first entries until it has the length."""
    if isinstance(order, Tensor):
        return order[torch.arange(length, device=order.device) % len(order)]
    return list(islice(cycle(order), length))


def equally_many(batches: Sequence[Sequence[Any]], ranks: int) -> list[list[Any]]:
    """The batches of an evaluation, the largest halved until each rank can have equally many.

    They are sorted by size, so that the ranks' batches of one step are alike.
    """
    found = sorted(map(list, batches), key=len)
    while len(found) % ranks and len(found[-1]) > 1:
        largest = found.pop()
        middle = len(largest) // 2
        found += [largest[:middle], largest[middle:]]
        found.sort(key=len)
    return found
