"""What a resumed run still has to get back, and the one place that gives it back.

A part is one thing that a checkpoint keeps beside Lightning's own entries (parts/part.py), a seam
a place where a method of Lightning's is replaced (seams.py), a pass one way through a loader. In
the order in which it happens:

a. Lightning has given module and data module their states, and calls :meth:`Restoring.read`. It
   notes where training starts in its loaders (``DataStart``). They are made after this, and ask for
   it. Lightning then gives the callbacks their states.
b. The user's start-up hooks act, as in a new run: ``on_fit_start``, then, when Lightning has given
   optimizers, schedules and loops their states, ``train_dataloader`` and ``on_train_start``. Our
   callback is in front of all others: before the first of them acts, it notes what they may change
   (:meth:`Restoring.fit_starts`, :meth:`Restoring.training_starts`).
c. The last of these hooks is done (a seam after ``on_train_start``, in seams.py). If the run
   resumes inside an epoch, :meth:`Restoring.restore` calls ``on_train_epoch_start``, which
   Lightning leaves out there. It then puts the loaders where training starts, undoes what the
   hooks have changed, and gives every part back.
d. The checkpoint was saved after Lightning had called the samplers' ``set_epoch``, in which a
   sampler may draw. Lightning calls it again when step c is done. So generators and samplers are
   given back a second time (:meth:`Restoring.give_generators_again`): if the run resumes inside an
   epoch, when that epoch's loop begins, before a batch is asked for; if it resumes between epochs,
   in front of the user's ``on_train_epoch_start``. After the first batch
   (:meth:`Restoring.batch_ends`) only the number of validated batches is left to give back
   (:meth:`Restoring.validation_starts`).

A run that was saved, is killed inside an epoch and resumed ends with the same bits as one that is
not. In short: a save lies between two batches; the batches after it are read again, and are the
same; and all that the batches before it have changed is given back. The conditions stand at the
end.

Step by step, where batches 0 to k - 1 of the epoch were done at the save:

1. The run resumes from its last save, and not from where it was killed. The steps between them are
   computed again.
2. A save comes between two batches: when Lightning hands batch k to the step, and before any hook
   of it, ``on_before_batch_transfer`` included (``Hooks._before_batch``; saving.py, item 2). The
   batch before is done with its logging and its validation. Batch k is fetched already; step 5
   shows that fetching it again is harmless. All ranks save before the same batch
   (stopping/agreement.py). All parts and Lightning's own entries are taken there, as copies or
   written at once; no step and no hook of a batch runs between the first part and the last. (At a
   stop inside a validation, the parts that a validation may change are those of its start.)
   Gradients that the next step still uses are a part (``Gradients``): those of a step that is not
   complete, of weights that no optimizer of the Trainer's has, and those that a ``zero_grad`` of
   one's own sets to 0. Random numbers that are drawn at a save are put back, and no loader begins
   (``KeptParts.without_a_trace``); what the user's own hooks of a save change, such as a count of
   saves, is up to him. The file is whole, or is the one before (``written_atomically`` in
   storage/files.py).
3. The loops begin with batch k. A checkpoint's counters never show a batch as half done, nor batch
   k as fetched or as the last; their number of completed batches is k (``clean_counters`` in
   parts/loops.py; ``Resume.of`` reads it). Two cases are special:

   - A validation has followed batch k - 1. A loop of Lightning's that resumes there ends that batch
     a second time, and counts its step again. Ours does not (``clean_counters`` tells how).
   - The run was stopped inside a validation. The state at the validation's start was saved
     (validation.py), and the resumed run begins with that validation, from its first batch. After
     the last step of ``max_steps`` Lightning would enter no epoch for it: so ``max_steps`` is one
     step more until that validation is over (:meth:`TrainerSettings.add_step`). If the resumed run
     has no validation there, ``Hooks._before_batch`` ends the epoch instead.
4. The order of samples is drawn again (``ExactBatches._order`` in loading/batches.py), from the
   checkpoint's seed and the epoch and from what the sampler held as the pass began. The global
   generators, and a torch generator in its attribute ``generator``, are seeded from (seed, epoch)
   for that and then put back; of the rest what it held counts: its weights, generators of other
   names and kinds, its ``state_dict``. (Where the user has changed settings and given another seed,
   that one counts; if it changes the rest of an epoch, a line says so. A pass is one way through a
   loader; of several loaders side by side a short one has many in an epoch, each with an order of
   its own, and k counts in its own: ``LoaderPosition.state_to_start_after``.) The whole order is
   drawn as the pass begins; what changes in a sampler later counts from the next pass. The first k
   batches of the order are left out.
5. What is drawn while batch k is loaded is the same: for that, all generators, those that the data
   set and the collate function hold among them, are seeded by (seed, rank, epoch, k). If a
   process's first batch of an epoch has made a generator, that batch is fetched a second time, with
   it seeded: ``__getitem__`` is called twice for its samples. Afterwards the global ones, and those
   in global variables, are what they were before, for the training may draw from them, too. Those
   that the data set or the collate function holds stay where the batch left them, and the next
   batch seeds them anew (loading/fetch.py). That a sample depends on nothing
   else is tried with a few samples before training, on Linux (loading/repeating.py). Streams and
   loaders of one's own that have a ``state_dict`` begin with the state that they had after batch
   k - 1; those without one resume between epochs alone (loading/__init__.py, item 3).
6. What else steps and hooks have changed since the start comes back, if the walk over the user's
   objects (parts/held.py) reaches it and a checkpoint can hold it: it is in Lightning's own
   entries, or in a part (kept.py has the list, docs/how_it_works.md of the repository what each is
   for). It has changed if it differs, bit by bit or in its order, from what it was as training
   began (``is_same`` in tensors/same_values.py). What has not changed is in no part: the script
   that is started again makes it once more. The generators come last of the parts in memory, since
   giving back any other part may draw. Who keeps what, and who tells what is not kept:

   | held in | what | a change is |
   | --- | --- | --- |
   | module, data module, objects of the user's in them | what a file can hold | kept |
   | callbacks | modules, generators, states | kept |
   | callbacks without a ``state_dict`` | other attributes | told |
   | callbacks with one | other attributes that it leaves out | neither |
   | hooks, functions, classes, global variables | modules, generators, states | kept |
   | the same | numbers, texts, lists, entries of dictionaries, other objects | told |
   | the same | new entries of dictionaries, as of a cache | neither |
   | all but callbacks with one | what no file can hold, such as an iterator | told |
   | all but global variables and classes | another object or function in the place of one | told |
   | layers of a package | tensors that are neither weights nor buffers | neither |
   | data sets | states, not of streams | kept |
   | data sets | numbers and lengths; at an epoch's end all entries | told |
   | data sets | entries inside an epoch, and all that a loader's workers hold | neither |
   | samplers of the training | what a ``set_epoch`` or ``state_dict`` leaves out | neither |
   | samplers of a validation | generators | kept |
   | samplers of a validation | other attributes, unless they have a ``set_epoch`` | told |

   (A state is an object with a ``state_dict``. holding/beside_objects.py finds what hooks,
   functions, classes and global variables hold. Told by parts/undeclared/not_kept.py,
   parts/replaced.py and ``DataSets`` in parts/loaders.py. What training has made to share memory
   comes back as separate copies.)

7. Hooks that the resumed process calls again change no saved value in the end. ``setup`` and
   ``configure_model`` run before the checkpoint is loaded, so it wins. ``configure_optimizers`` (it
   must change no weights) and ``on_fit_start`` run after the weights are loaded (FSDP, DeepSpeed:
   before) and before the optimizers' states are; ``on_train_start`` and ``on_train_epoch_start``
   run after everything. What these two and ``on_fit_start`` change of saved values is undone
   (before_hooks.py; attributes by parts/undeclared/attributes.py), and what nobody saves stays as
   they set it. Where ``on_fit_start`` and ``on_train_start`` look at batches, these are of epoch 0,
   as in the first start (``RunLoaders.resume_at``). ``train_dataloader`` finds what it found before
   the save, in the objects of which it makes loaders and in all generators, and
   ``on_train_epoch_start`` finds the generators (parts/before_hooks_of_epoch.py). The sanity check,
   and hooks of batches and validations that are done, are not called.

The conditions:

- The operations give the same bits when they are computed again, also as the first ones of a
  process (where ``torch.compile`` may choose others for shapes that change). On a GPU that needs
  ``--deterministic true``.
- The machine, the versions of Python and of packages, the number of threads and of ranks are the
  same, and a process uses one device.
- The script that is started again makes the same objects, but for what a checkpoint holds: what is
  drawn for them is seeded.
- Samples and batches are functions of their keys, the epoch, and the random numbers drawn for them,
  and the same functions in every process. They make their generators by the first batch that a
  process fetches in an epoch, and call no ``spawn`` of one that they keep, which counts its
  children. A data set that gathers whole batches draws from other generators than torch's of the
  CPU for each batch or for none.
- The order of a sampler of one's own follows from torch's, NumPy's or Python's global generators,
  from generators in its attributes, from ``set_epoch`` or from its ``state_dict``.
- Whatever a result depends on, and training changes, is "kept" by the table in step 6, and in the
  walk's reach: not in a list or dictionary of more than 256 objects, nor deeper than eight
  attributes and entries (holding/bounds.py). No two tensors or generators that are kept become one,
  or share memory, in training.
- Training changes no setting of the process (torch's defaults, environment variables).
- It changes no attribute of the Trainer but those in parts/trainer_settings.py.
- It does not change how weights lie in memory (their strides).
- No result depends on the order in which a set gives its members.
- ``configure_optimizers`` changes no weights.
- Nothing reads the gradients of a step after its end.
- Nothing is used that checkpoint/not_exact.py or docs/how_it_works.md names, such as DDP on three
  or more ranks, which adds gradients up in another order in its first step.

Some of this can be seen from outside, and a line tells it: at the start whether samples, orders and
streams come again, at a save what the walk finds and cannot keep, at the resume another number of
CPU threads, another version of this library, other data. The command ``verify`` finds the rest in a
run of the user's own.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau
from unbroken import lightning_internals
from unbroken.checkpoint.before_hooks import (
    BeforeHooks,
    CallbackStates,
    DataState,
    ExtraStates,
    OptimizerStates,
    OwnEntries,
    Schedules,
    WeightValues,
    give_back_all,
)
from unbroken.checkpoint.following import Best
from unbroken.checkpoint.kept import KeptParts
from unbroken.checkpoint.not_exact import (
    is_after_epoch_for_batch_norms,
    mend_states_of_lightnings_callbacks,
    why_loaders_need_whole_epochs,
)
from unbroken.checkpoint.other_version import note_of_version
from unbroken.checkpoint.own_folder import OwnFolder
from unbroken.checkpoint.refusals import refuse_other_optimizers
from unbroken.checkpoint.resume import (
    Resume,
    call_epoch_start_again,
    start_of_anothers,
    uses_hooks,
)
from unbroken.loading import RunLoaders
from unbroken.loading.seeding import Seeds
from unbroken.parts.before_hooks_of_epoch import NEXT_LOADERS
from unbroken.parts.hyperparameters import apply_changes
from unbroken.parts.loops import BETWEEN_EPOCHS
from unbroken.parts.module import give_plain_buffers
from unbroken.parts.state_types import StateTypes
from unbroken.stopping.ranks import gather_from_ranks, say
from unbroken.storage.contents import CHOSEN, record_in
from unbroken.storage.usable import can_resume_from, replace_damaged_last, usable_best
from unbroken.storage.weights import buffers_left_out

# Whose bits in memory are compared with the saved ones, as a line calls them
NAMES_OF_BITS = {"weights": "the weights", "optimizer": "the state of the optimizer"}


class Restoring:
    """Gives a resumed run its state.

    Args:
        own_folder: The folder of the run.
        kept: The parts of a checkpoint.
        best: The best so far.
        loading: Where training starts in its loaders.
        seed: That of this start, if the user has given one.
        changed: Whether the user has changed settings since the checkpoint.
        best_key: Under which name a checkpoint holds the state of the best.
        lines: What is said as training starts.

    Attributes:
        loaded_step: The optimizer step of the checkpoint. None: the run is a new one.
        was_over: Whether nothing was left to train.
    """

    def __init__(
        self,
        own_folder: OwnFolder,
        kept: KeptParts,
        best: Best,
        loading: RunLoaders,
        seed: int | None,
        changed: bool,
        best_key: str,
        lines: list[str],
    ) -> None:
        self.loaded_step: int | None = None
        self.was_over = False
        self._own_folder = own_folder
        self._kept = kept
        self._best = best
        self._loading = loading
        self._seed = seed
        self._changed = changed
        self._best_key = best_key
        self._lines = lines
        # Whether it is settled what this run starts from: its checkpoint was read, or it has none.
        self._start_is_settled = False
        # The checkpoint's state, until the resumed run has done its first batch. None: nothing is
        # left to give back but the number of validated batches; or the run is a new one, or the
        # checkpoint is another library's.
        self._resume: Resume | None = None
        self._before_hooks: list[BeforeHooks] = []
        # That of the data module at the save. It has an earlier one as it makes loaders.
        self._state_of_data: DataState | None = None
        # Whether the resumed run makes loaders that the run before had not made.
        self._loaders_come_after_save = False
        self._state_types: StateTypes | None = None
        self._batches_validated_before: dict[int, int] = {}
        # The Trainer's own number, while it is 0 so that a resumed run makes no sanity check.
        self._sanity_steps: float | None = None

    @property
    def is_resumed_without_a_batch(self) -> bool:
        """Whether this run is resumed, from a checkpoint that this library has saved, and has done
        no batch yet.
        """
        return self._resume is not None

    # a. The checkpoint is read

    def read(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read what Lightning does not restore, and set where training goes on in its loaders."""
        if trainer.state.fn != "fit":
            self._give_buffers(trainer, module, checkpoint)
            return
        if self._start_is_settled:
            # Lightning's finder of a rate or batch size has trained a few steps, and puts back what
            # was before.
            mend_states_of_lightnings_callbacks(trainer, checkpoint["callbacks"])
            return
        self._start_is_settled = True
        self.loaded_step = checkpoint["global_step"]
        lightning_internals.average_what_setup_has_made(trainer, is_loaded=True)
        mend_states_of_lightnings_callbacks(trainer, checkpoint["callbacks"])
        saved = record_in(checkpoint)
        if saved.get("state") is None:
            self._loading.resume_at(start_of_anothers(checkpoint))
            self._lines.append(
                "that checkpoint was not saved between two steps: the resume is not exact."
            )
            return
        of_version = note_of_version(saved)
        if of_version is not None:
            self._lines.append(of_version)
        if not can_resume_from(checkpoint):
            self._lines.append(
                "that checkpoint is inside an epoch, and its data cannot be started there: the"
                " resume is not exact."
            )
        # Lightning finds no ``state_dict`` of the loader, and advises what is not needed here.
        advice = "You're resuming from a checkpoint that ended before the epoch ended"
        warnings.filterwarnings("ignore", advice)
        resume = Resume.of(checkpoint, trainer, self._changed)
        self._resume = resume
        # A strategy that loads weights in parts has taken them out.
        self._state_types = StateTypes(checkpoint.get("state_dict", {}))
        if len(resume.ranks) == trainer.world_size:
            self._note_other_threads(trainer, saved.get(CHOSEN, {}).get("threads"))
        # Lightning's sanity check calls the hooks of a validation. The run that was killed has had
        # its check, and what those hooks did then is in the checkpoint.
        self._sanity_steps = trainer.num_sanity_val_steps
        trainer.num_sanity_val_steps = 0
        self._own_folder.training_is_resumed(resume.run_id)
        self._kept.chain.resumed_at = [*saved.get("resumed_at", []), self.loaded_step]
        self._loading.resume_at(resume.data_start)
        self._state_of_data = DataState(trainer)
        self._take_seeds_of(resume)
        # A run that had stopped early stays so, unless a setting was changed. But a validation that
        # it was stopped in comes first.
        trainer.should_stop = resume.should_stop and resume.place != "validation"
        if trainer.strategy.restore_checkpoint_after_setup:
            # on_fit_start was called before.
            self._before_optimizers_load(trainer, resume)

    def _give_buffers(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give a module that is only evaluated the buffers that its state dict lacks.

        A buffer that training has first changed after this checkpoint is again as it was made.
        """
        lightning_internals.forget_averages(trainer)
        buffers: dict[str, torch.Tensor | None] = {}
        for name, value in self._kept.buffers.fresh.items():
            buffers[name] = None if value is None else value.clone()
        buffers |= buffers_left_out(checkpoint, trainer.global_rank)
        give_plain_buffers(module, buffers)

    def _take_seeds_of(self, resume: Resume) -> None:
        """Let the order of samples stay that of the checkpoint, whatever this start would draw;
        but where the user has changed settings and given another seed, that one counts.

        With another order, the epoch that goes on would read some samples twice and others never.
        """
        seed = resume.shared.get("seed")
        is_another = self._seed is not None and self._seed != seed
        if seed is None:
            return
        if is_another and self._changed:
            if resume.place != BETWEEN_EPOCHS:
                self._lines.append(
                    f"the order of samples is that of seed {self._seed} from here: the rest of this"
                    " epoch reads some samples twice and others never."
                )
            return
        self._loading.seed = seed
        self._loading.seeds = [Seeds(*each) for each in resume.shared.get("seeds", [])]
        if is_another:
            self._lines.append(
                f"the order of samples stays that of the checkpoint's seed, {seed}: this start has"
                " another one."
            )

    def _note_other_threads(self, trainer: Trainer, before: int | None) -> None:
        """Say so if the number of CPU threads differs: sums are then added up in another order."""
        now = torch.get_num_threads()
        if before in (None, now) or trainer.strategy.root_device.type != "cpu":
            return
        self._lines.append(
            f"{now} CPU threads compute, and this run had {before}: they round sums differently,"
            f" so the resume is not exact. OMP_NUM_THREADS={before} makes it exact."
        )

    # b. The user's start-up hooks come

    def fit_starts(self, trainer: Trainer) -> None:
        """Note what ``on_fit_start`` may change. Lightning has restored the module, the data module
        and the callbacks (but FSDP and DeepSpeed load after this hook).
        """
        # Not trainer.ckpt_path: FSDP and DeepSpeed set it as they load, after this hook.
        if lightning_internals.found_checkpoint(trainer) is None:
            self._start_is_settled = True
            lightning_internals.average_what_setup_has_made(trainer, is_loaded=False)
        if self._resume is None:
            return
        self._before_optimizers_load(trainer, self._resume)
        if uses_hooks(trainer):
            self._note_loaded(trainer)

    def _before_optimizers_load(self, trainer: Trainer, resume: Resume) -> None:
        """Let optimizers load their states as they were saved, and the training be as long as it
        was. A UserError for an optimizer that cannot load its state.
        """
        made_before = resume.shared.get(self._kept.hyperparameters.name, {})
        if lightning_internals.brings_optimizers(trainer):
            refuse_other_optimizers(trainer, made_before.get("optimizers", []))
        if self._state_types is not None:
            self._state_types.begin(trainer)
        settings = self._kept.settings
        settings.give_back_early(trainer, resume.shared.get(settings.name, {}))
        if resume.was_cut_after_last_step:
            settings.add_step(trainer)

    def training_starts(self, trainer: Trainer) -> None:
        """Let hyperparameters that the user has changed win, and note what ``on_train_start`` may
        change. Lightning has restored optimizers and schedules, and has skipped its sanity check.
        """
        self._give_sanity_steps_again(trainer)
        if self._resume is None:
            return
        if self._loaders_come_after_save:
            self._keep_what_loaders_have_changed(trainer, self._resume)
        hyperparameters = self._kept.hyperparameters
        before = self._resume.shared.get(hyperparameters.name)
        apply_changes(trainer, hyperparameters.now, before, self._changed)
        if not uses_hooks(trainer):
            return
        if trainer.strategy.restore_checkpoint_after_setup:
            # Such a strategy loads after on_fit_start, and so over what it has changed.
            self._note_loaded(trainer)
        self._before_hooks = [
            OptimizerStates(trainer),
            Schedules(trainer),
            *self._before_hooks,
        ]

    def _keep_what_loaders_have_changed(self, trainer: Trainer, resume: Resume) -> None:
        """Let what was drawn and changed as loaders were made for an epoch after the save count as
        if it had come before it.
        """
        mine = resume.mine(trainer)
        objects = self._kept.objects
        if objects.name in mine:
            mine[objects.name] = objects.with_makers_of_now(trainer, mine[objects.name])
        for part in self._kept.generators:
            if part.name in mine:
                mine[part.name] = part.take(trainer)
        self._state_of_data = DataState(trainer)

    def _note_loaded(self, trainer: Trainer) -> None:
        # What a module or callback saves and loads by hooks of its own comes last: to give back the
        # others may call code that counts it.
        kinds = (WeightValues, CallbackStates, ExtraStates, OwnEntries)
        self._before_hooks = [kind(trainer) for kind in kinds]

    def before_loaders(self, trainer: Trainer) -> None:
        """Before the user's ``train_dataloader``: let it find what it found before the save."""
        kept = self._kept
        noted = kept.before_hooks_of_epoch
        if self._resume is None:
            with kept.without_a_trace(trainer):
                noted.before_loaders(trainer)
            if trainer.current_epoch > 0 and self._own_folder.saves:
                # It may choose the data of the new epoch.
                kept.objects.before_epoch_starts(trainer)
            return
        saved = self._resume.mine(trainer).get(noted.name, {})
        noted.return_to_before_loaders(trainer, saved, self._resume.data_start.epoch)
        self._loaders_come_after_save = NEXT_LOADERS in saved

    # c. All start-up hooks are done

    def restore(self, trainer: Trainer) -> None:
        """Note what there is as training starts. In a resumed run, put every part back after that:
        what the start-up hooks do must change nothing of it.
        """
        resume = self._resume
        self._kept.objects.begin(trainer)
        self._kept.settings.begin(trainer)
        self._kept.data_sets.begin()
        self._kept.validation_samples.begin(trainer)
        self._loading.hooks_of_start_are_done()
        if resume is not None:
            self._prepare_epoch(trainer, resume)
        if not self._loading.read_early:
            # The module's own hooks may have read whole epochs of them. Loaders that were asked for
            # a batch earlier were placed then.
            self._loading.begin()
        if resume is not None:
            self._give_back(trainer, resume)
        elif trainer.global_step == 0:
            self._start_anew()
        why = why_loaders_need_whole_epochs(trainer, self._loading)
        self._loading.resume_only_between_epochs(why)

    def _prepare_epoch(self, trainer: Trainer, resume: Resume) -> None:
        """Let Lightning's loops begin where the run was stopped."""
        if resume.place == BETWEEN_EPOCHS:
            # Our own on_train_epoch_start (hooks.py) gives the generators again, before the user's
            # hooks of that name may draw.
            resume.prepare_epoch(trainer, before_batches=lambda: None)
            lightning_internals.end_restart(trainer)
            return
        resume.prepare_epoch(trainer, before_batches=lambda: self.give_generators_again(trainer))
        # As in a new run, samplers know the epoch as the hooks of its start are called.
        for position in self._loading.positions:
            position.set_epoch(trainer.current_epoch)
        noted = self._kept.before_hooks_of_epoch
        noted.return_to_before_hooks(trainer, resume.mine(trainer).get(noted.name, {}))
        call_epoch_start_again(trainer)

    def _give_back(self, trainer: Trainer, resume: Resume) -> None:
        """Undo what the start-up hooks have changed, and give every part back."""
        kept = self._kept
        # Whichever hook has set another batch size, the checkpoint's counts.
        self._loading.cut_again(resume.batch_sizes)
        # The hooks of the epoch's start have changed attributes. What the module loads itself comes
        # later, and stays.
        kept.objects.undo(trainer)
        give_back_all(self._before_hooks, trainer)
        self._before_hooks = []
        if self._state_of_data is not None:
            self._state_of_data.give_back(trainer)
        other_batches = resume.recount_batches(trainer, self._loading)
        if other_batches is not None:
            self._lines.append(other_batches)
        resume.give_back(trainer, [part for part in kept.all if not part.has_a_file])
        if resume.place != BETWEEN_EPOCHS:
            # With what samplers held as the pass began. The generators are given back once more
            # before a batch is read.
            self._loading.draw_again()
        self._batches_validated_before = dict(lightning_internals.validated_batches(trainer))
        self._forget_best_of_other_samples(trainer, resume)
        # Files are changed last: what cannot be restored is refused before.
        self._check_best(trainer)
        resume.give_back(trainer, [part for part in kept.all if part.has_a_file])
        self._compare_data(trainer, resume)
        self._compare_bits(trainer, resume)
        if resume.place != BETWEEN_EPOCHS:
            # The hooks of the epoch's start were called again.
            saved = resume.mine(trainer).get(kept.objects.name, {})
            self._lines += kept.objects.lines_of_epochs_start(trainer, saved)

    def _compare_data(self, trainer: Trainer, resume: Resume) -> None:
        """Say so where data sets hold other samples than at the save."""
        data_sets = self._kept.data_sets
        saved = resume.mine(trainer).get(data_sets.name)
        if saved is None or self._loaders_come_after_save:
            return
        of_ranks = gather_from_ranks(data_sets.others(saved))
        for name in dict.fromkeys(name for names in of_ranks for name in names):
            self._lines.append(
                f"the resume is not exact: {name} holds other samples than at the save. If they are"
                " split at random, samples of the validation are now trained on. Give the split a"
                " seed, as by generator=torch.Generator().manual_seed(0). If a hook of the epoch's"
                " start chooses them, let that be a function of the epoch alone."
            )

    def _compare_bits(self, trainer: Trainer, resume: Resume) -> None:
        """Say so where weights or optimizers in memory are not what they were at the save.

        Settings that the user has changed may change them.
        """
        bits = self._kept.bits_in_memory
        saved = resume.mine(trainer).get(bits.name)
        if saved is None or self._changed:
            return
        of_ranks = gather_from_ranks(bits.differences(trainer, saved))
        for name in dict.fromkeys(name for names in of_ranks for name in names):
            self._lines.append(
                f"{NAMES_OF_BITS[name]} in memory: not what was saved. A bit has flipped, or code"
                " of yours has changed it while it was loaded. The resume is not exact."
            )

    def _start_anew(self) -> None:
        # The best of a training before, with the same callback, says nothing of this one.
        self._best.forget()
        earlier = self._own_folder.earlier_training()
        if earlier is not None:
            self._lines.append(earlier)
        for part in self._kept.all:
            part.start_anew()

    def _forget_best_of_other_samples(self, trainer: Trainer, resume: Resume) -> None:
        """Look for the best anew, where validations read other samples than those that it was
        measured with.
        """
        samples = self._kept.validation_samples
        saved = resume.mine(trainer).get(samples.name)
        if saved is None or not self._kept.followed.is_of_a_validation:
            return
        differs = any(gather_from_ranks(samples.differs(saved)))
        if differs and self._best.score is not None:
            self._lines.append(
                "validations read other samples than before, so the best so far"
                f" ({self._best.monitor} {self._best.score:.6g}) cannot be compared with what"
                f" comes: the best is looked for anew.{who_keeps_the_best_of_before(trainer)}"
            )
            self._best.forget()

    def _check_best(self, trainer: Trainer) -> None:
        """Look for the best anew, where ``best.ckpt`` is not what the state says. A file that
        cannot be used is set aside.
        """
        if not self._own_folder.saves:
            return
        reason = None
        if self._best.score is not None and trainer.is_global_zero:
            files = self._own_folder.files
            checkpoint, reason = usable_best(files.best, self._own_folder.run_id)
            if reason is None and not self._is_this_best(checkpoint):
                # A new one was saved before a kill, or the disk did not take one.
                is_ahead = checkpoint["global_step"] > (self.loaded_step or 0)
                reason = (
                    f"{files.best} is {'ahead of' if is_ahead else 'older than'} the checkpoint:"
                )
        reason = trainer.strategy.broadcast(reason)
        if reason:
            say(f"{reason} the best is looked for anew.")
            self._best.forget()

    def _is_this_best(self, checkpoint: dict[str, Any]) -> bool:
        """Whether ``best.ckpt``, which holds this checkpoint, is the best of the state."""
        saved = checkpoint.get("callbacks", {}).get(self._best_key)
        return saved is None or self._best.is_that_of(saved)

    # d. The training goes on

    def give_generators_again(self, trainer: Trainer) -> None:
        """Give generators and samplers back once more, where the resumed run has done no batch yet.

        Lightning has called ``set_epoch`` of the loaders' samplers, after everything was given
        back, and they may have drawn. The checkpoint was saved after that.
        """
        if self._resume is not None:
            self._loading.return_to_save()
            self._resume.give_back(trainer, self._kept.generators)

    @property
    def came_only_for_a_validation(self) -> bool:
        """Whether the run went on only for a validation that is not over. Where a batch comes, and
        this is still so, Lightning has made no validation.
        """
        return self._kept.settings.steps_more > 0

    def batch_ends(self) -> None:
        """The first batch is done: nothing is left to give back but the count of validated batches
        (:meth:`validation_starts`).
        """
        self._resume = None

    def epoch_ends(self, trainer: Trainer) -> None:
        """Let the next epoch begin like any other, also after one in whose last validation the run
        was resumed. Lightning steps the schedules of an epoch after this, and would leave out those
        of a metric in a resumed one.
        """
        self._kept.settings.take_step_off(trainer)
        self._resume = None
        lightning_internals.end_restart(trainer)

    def training_ends(self) -> None:
        """Lightning has called the hooks of a training's end, also where it has done no batch."""
        self._resume = None

    def validation_starts(self, trainer: Trainer) -> None:
        """Give back how many batches validations have read, if Lightning counts anew."""
        lightning_internals.validated_batches(trainer).update(self._batches_validated_before)

    def forget_validated_batches(self, trainer: Trainer) -> None:
        """Let the validations of this epoch be counted from its start."""
        lightning_internals.validated_batches(trainer).clear()
        self._batches_validated_before = {}

    def validation_is_over(self, trainer: Trainer) -> None:
        """The validation that a run went on for is done."""
        self._batches_validated_before = {}
        self._kept.settings.take_step_off(trainer)

    # Nothing was left to train

    def fit_ends(self, trainer: Trainer) -> None:
        """Put right what a training leaves, where nothing was left to train."""
        self._give_sanity_steps_again(trainer)
        if self._resume is None:
            return
        self.was_over = True
        self._say_what_a_longer_fit_needs(trainer, self._resume)
        if self._resume.place == BETWEEN_EPOCHS and not is_after_epoch_for_batch_norms(trainer):
            # Call the hooks of a training's end, before which the last checkpoint was saved. Such a
            # hook may give the module its averaged weights. Lightning calls none of them here.
            # Those of the start come first, since callbacks rely on them.
            trainer.fit_loop.on_run_start()
            trainer.fit_loop.on_run_end()
        else:
            left = [
                part for part in self._kept.all if part.has_a_file or part.is_read_after_training
            ]
            self._resume.give_back(trainer, left)
        if self._own_folder.saves and trainer.is_global_zero:
            # The run may have been resumed from best.ckpt after its end.
            files = self._own_folder.files
            replace_damaged_last(files.last, files.best)

    def _say_what_a_longer_fit_needs(self, trainer: Trainer, resume: Resume) -> None:
        """Say how a script goes on whose Trainer has been given higher limits by the time that it
        was killed: the next ``fit`` trains on, with new optimizers and another order of samples,
        unless it is given the checkpoint, too.
        """
        step = self.loaded_step or 0
        is_ahead_in_steps = 0 <= trainer.max_steps < step
        max_epochs = trainer.max_epochs
        is_inside_a_later_epoch = (
            resume.place != BETWEEN_EPOCHS
            and max_epochs is not None
            and 0 <= max_epochs <= resume.data_start.epoch
        )
        if is_ahead_in_steps or is_inside_a_later_epoch:
            say(
                f"nothing was trained: the checkpoint is of step {step}, beyond the limits of this"
                " fit. If the next fit has higher ones, give it ckpt_path, too, as by"
                " ckpt_path=keep.resume_from; else it does not go on exactly."
            )

    def put_back(self, trainer: Trainer) -> None:
        """Give the Trainer its own numbers again, and leave its optimizers alone."""
        if self._state_types is not None:
            self._state_types.end()
        self._kept.settings.take_step_off(trainer)
        self._give_sanity_steps_again(trainer)

    def _give_sanity_steps_again(self, trainer: Trainer) -> None:
        if self._sanity_steps is not None:
            trainer.num_sanity_val_steps = self._sanity_steps
            self._sanity_steps = None


def who_keeps_the_best_of_before(trainer: Trainer) -> str:
    """A sentence that names what of Lightning and torch goes by the best value that it has seen;
    empty where nothing does.
    """
    everyone: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    kinds = EarlyStopping | ModelCheckpoint | ReduceLROnPlateau
    found = [each for each in (*everyone, *schedules) if isinstance(each, kinds)]
    names = sorted({type(each).__name__ for each in found})
    return f" The one before still counts for {' and '.join(names)}." if names else ""
