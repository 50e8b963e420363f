"""What of a run's loaders cannot be resumed exactly: what their kind tells, and what trials before
training show.
"""

from collections.abc import Iterable
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset
from unbroken import contract
from unbroken.holding.walk import Place, children_of, walk
from unbroken.loading.exact_loader import ExactLoader
from unbroken.loading.order_of_sampler import draws_as_torch_does
from unbroken.loading.proof import OTHER_SAMPLES, Proof, fault_of_next_epoch, proved
from unbroken.loading.repeating import gives_others_when_asked_again
from unbroken.loading.samplers import (
    has_state,
    is_plain,
    name_of,
    source_of,
)
from unbroken.stopping.ranks import gather_from_ranks


class Faults:
    """Finds the faults of a run's loaders, and says them.

    Args:
        lines: Where to add what is to be said. Several loaders may say the same.
    """

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        # What trials have shown, by the loader's number in an epoch and the name of what was tried.
        self._proofs: dict[tuple[int, str], Proof] = {}
        # The data sets that were fetched from twice: for training or not, and their classes.
        self._fetched_twice: set[tuple[bool, str, frozenset[str]]] = set()
        # The names of what validations read and was tried.
        self._tried_validations: set[str] = set()

    def look_at(self, loader: DataLoader[Any], found: ExactLoader, trainer: Trainer) -> bool:
        """Say what is not exact in an exact loader. Every rank must call it.

        Args:
            loader: As the user gave it.
            found: Its exact form.
            trainer: Says what it is for.

        Returns:
            Whether a training can start with it inside an epoch.
        """
        source = source_of(loader)
        if trainer.training and not _has_known_order(source):
            self._lines.append(
                f"{type(source).__name__} has neither set_epoch nor state_dict: if it keeps another"
                " state than random generators in its attributes, or is changed elsewhere than in"
                " on_train_epoch_start, a resumed run sees another order."
            )
        if loader.num_workers > 1 and not loader.in_order:
            # Batches come as workers have them ready, in an order that nobody knows.
            self._lines.append(
                f"a resume is not exact: {name_of(loader)} is read with in_order=False, and gives"
                " the batch that is ready first."
            )
        return not self._keeps_a_state(found, trainer)

    def _keeps_a_state(self, loader: ExactLoader, trainer: Trainer) -> bool:
        """Whether a training's samples depend on what was fetched before; that is said."""
        name = type(loader.dataset).__name__
        if trainer.state.fn != "fit":
            return False
        # One for training often draws or keeps what one of the same class for validation does not.
        tried = (bool(trainer.training), name, names_of_data_sets_in(loader.dataset))
        is_new = tried not in self._fetched_twice
        self._fetched_twice.add(tried)
        mine = is_new and trainer.global_rank == 0 and gives_others_when_asked_again(loader)
        # Ranks may read sets of different classes.
        if not any(gather_from_ranks(mine)):
            return False
        fault = "which gives other samples when the same are fetched again"
        advice = "Let a sample be a function of its key and the epoch alone."
        if not trainer.training:
            self._lines.append(
                f"a resume is not exact: validations read {name}, {fault}, because it keeps a state"
                f" (such as a queue, a cache or a count). {advice}"
            )
            return False
        self._lines.append(
            f"the training data come from {name}, {fault}: a resumed run goes on from the last"
            " epoch's end, and is exact only if what it keeps (such as a queue, a cache or a count)"
            f" begins anew with each epoch. {advice}"
        )
        return True

    def try_training(self, loader: Any, number: int, seed: int, trainer: Trainer) -> Proof:
        """How a run can be resumed with a loader that is read as it is. Every rank must call it.

        Args:
            loader: As the user gave it.
            number: Its number in an epoch.
            seed: As training uses it.
            trainer: Limits its batches.

        Returns:
            Its ``fault`` is that of any rank: ranks save together, and one that cannot start inside
            an epoch decides for all.
        """
        stateful, fault = _which_claims_a_state(loader)
        name = name_of(loader) if stateful is None else type(stateful).__name__
        place = (number, name)
        if place not in self._proofs:
            batches = _batches_of_epoch(trainer.limit_train_batches, loader)
            proof = proved(loader, stateful, fault, seed, batches)
            faults = [each for each in gather_from_ranks(proof.fault) if each is not None]
            self._proofs[place] = proof._replace(fault=next(iter(faults), None))
            self._say(name, self._proofs[place])
        self._look_for_workers_that_live_on(loader)
        proof = self._proofs[place]
        # It may be one of an earlier epoch, because each trial takes a moment.
        return proof if proof.stateful is None else proof._replace(stateful=stateful)

    def _say(self, name: str, proof: Proof) -> None:
        if proof.fault is not None:
            self._lines.append(
                f"the training data come from {name}, {proof.fault}: a resumed run goes on from the"
                " last epoch's end."
            )
        if proof.next_fault == OTHER_SAMPLES:
            self._lines.append(
                f"a resume is not exact: {name} {OTHER_SAMPLES} (it may draw from a random "
                "generator of its own, or count its epochs itself)."
            )
        elif proof.next_fault is not None:
            self._lines.append(f"a resume may not be exact: {name} {proof.next_fault}.")

    def _look_for_workers_that_live_on(self, loader: Any) -> None:
        is_own_loader = isinstance(loader, DataLoader) and not is_plain(loader)
        if is_own_loader and loader.persistent_workers:
            self._lines.append(
                f"the workers of {name_of(loader)} outlive an epoch: if they draw random numbers, "
                "a resumed run sees others."
            )

    def try_validation(self, loader: Any, seed: int, trainer: Trainer) -> None:
        """Say it where a validation's samples depend on the validations before: no state of them
        is kept.
        """
        name = name_of(loader)
        if name in self._tried_validations:
            return
        self._tried_validations.add(name)
        batches = _batches_of_epoch(trainer.limit_val_batches, loader)
        fault = fault_of_next_epoch(loader, None, seed, batches)
        if fault == OTHER_SAMPLES:
            self._lines.append(
                f"the validations of a resumed run are not exact: {name} {OTHER_SAMPLES} (it may go"
                " on from one validation to the next, or draw from a random generator of its own)."
            )


def names_of_data_sets_in(dataset: Any) -> frozenset[str]:
    """The classes of all data sets that one holds, such as a ``Subset`` does."""
    found: set[str] = set()

    def opened(place: Place) -> Iterable[Place]:
        if isinstance(place.value, Dataset):
            found.add(type(place.value).__qualname__)
        return children_of(place)

    walk([Place("", dataset)], opened)
    return frozenset(found)


def _has_known_order(source: Any) -> bool:
    """Whether the order of a sampler is a function of seed and epoch, or its state is kept."""
    is_by_epoch = isinstance(source, contract.OrdersByEpoch)
    return draws_as_torch_does(source) or is_by_epoch or has_state(source)


def _which_claims_a_state(loader: Any) -> tuple[Any, str | None]:
    """What says that it has a state, or None and why nothing does."""
    if has_state(loader):
        return loader, None
    dataset = getattr(loader, "dataset", None)
    if not has_state(dataset):
        return None, "which has no state_dict"
    if getattr(loader, "num_workers", 0):
        # With workers the datasets that count are theirs.
        return None, "whose state is in its worker processes and cannot be had"
    return dataset, None


def _batches_of_epoch(limit: Any, loader: Any) -> int | None:
    """How many batches of a loader an epoch reads; None: all, or it is not known.

    ``limit`` is the Trainer's ``limit_train_batches`` or ``limit_val_batches``.
    """
    if isinstance(limit, int):
        return limit
    length = sized_len(loader)
    if limit is None or limit == 1.0 or length is None:
        return None
    return int(length * limit)
