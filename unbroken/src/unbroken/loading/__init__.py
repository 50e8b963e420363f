"""Puts loaders that can be resumed in the place of a run's own: they can start at any batch, and
cut the data into exact shares for the ranks.

PyTorch and Lightning shuffle from a global generator, so a resumed run sees other batches, and they
repeat or drop samples to make ranks equal, so metrics depend on the number of devices. Here a plain
``DataLoader`` keeps all but its sampler and seeding. Any other loader is read as it is, and its
state, if it has one, is saved.

How the data of a resume in the middle of an epoch are exact (checkpoint/restoring.py has the whole
of a resume, and under which conditions it is exact):

1. :class:`RunLoaders` (run_loaders.py) sees every loader before Lightning reads it. What it makes
   of a loader depends on its kind, and on who shares the data among the ranks: :class:`Shares`
   (shares.py).
2. A plain loader over a dataset that is asked by keys becomes an :class:`ExactLoader`. The order of
   an epoch's samples is drawn from (seed, epoch) and what the sampler holds, and cut into batches
   and shares: :class:`ExactBatches` (batches.py). To start at batch k, the same order is drawn
   again, and the first k batches are left out; no sample is loaded for them. A checkpoint keeps
   what the sampler held as the pass began (one way through the loader), such as weights that
   training has changed since, generators in its attributes, or its ``state_dict``. The sampler is
   given that, then asked for its order, then given what it held at the save. The random numbers of
   batch k, in this process or in a worker, come from (seed, rank, epoch, k), and each fetch leaves
   this process's global generators as it found them: :class:`Fetch` (fetch.py). So neither the
   order nor a random transform depends on what was read before, or by which worker. Batches that
   were fetched beyond k at the save are fetched again. (One exception: a data set that gathers
   whole batches, :class:`unbroken.contract.GathersBatches`, must draw from Python's and NumPy's
   generators for each batch or for none. If it draws for some alone, a resume is not exact, and
   nothing tells that.)
3. Anything else (a stream, a loader of the user's own) becomes a :class:`WatchedLoader`. Nobody can
   leave out its first k batches. If it has a state, the state is kept after every batch, and loaded
   again. It is tried before training (proof.py), and what is not exact is said (faults.py). Where
   it has none, or one that has failed the trial, a run resumes from the end of an epoch alone.
4. The seed is given, or is what torch's generator would give next (:meth:`RunLoaders.settle_seed`).
   A loader or sampler with a generator of its own has a seed from that one (``seeds_of``). All are
   kept in every checkpoint.
5. A checkpoint holds, for each loader, what :meth:`LoaderPosition.state_to_start_after` returns
   (position.py). The epoch, and how many of its batches are done, are in Lightning's own counters.
   A resumed run makes a :class:`DataStart` of both (``Resume.of`` in checkpoint/resume.py).
6. :meth:`RunLoaders.begin` puts the loaders there when the hooks of the training's start are done.
   Lightning has called ``iter(loader)`` by then, and nothing was read: ``ExactLoader.__iter__`` is
   a generator, which looks where to start when its first batch is asked for. (Beside a loader
   without a length Lightning reads a batch at once. Then all are put there when they are made.)
"""

from unbroken.loading.batches import ExactBatches as ExactBatches
from unbroken.loading.exact_loader import ExactLoader as ExactLoader
from unbroken.loading.exact_loader import exact_form as exact_form
from unbroken.loading.exact_loader import position_of as position_of
from unbroken.loading.fetch import Fetch as Fetch
from unbroken.loading.position import DataStart as DataStart
from unbroken.loading.position import LoaderPosition as LoaderPosition
from unbroken.loading.run_loaders import RunLoaders as RunLoaders
from unbroken.loading.watched_loader import LiveLoader as LiveLoader
from unbroken.loading.watched_loader import WatchedLoader as WatchedLoader
from unbroken.loading.watched_loader import users_own as users_own
