"""Replaces a run's loaders by ones with order by (seed, epoch), start at any batch, and exact
shares for the ranks.

PyTorch and Lightning shuffle from a global generator, so a resumed run sees other batches, and they
repeat or drop samples to make ranks equal, so metrics depend on the number of devices. Here a plain
``DataLoader`` keeps all but its sampler and seeding. A loader that cannot be made exact stays as it
is, and the run says so in one line.

How a resume in the middle of an epoch is exact:

1. :class:`ExactLoading` (exact_loading.py) sees every loader before Lightning reads it. Its form
   depends on its kind, and on who shares the data among the ranks: :class:`Shares` (shares.py).
2. A plain loader over a dataset that is asked by keys becomes an :class:`ExactLoader`. The order of
   an epoch's samples is drawn from (seed, epoch) alone, and cut into batches and shares:
   :class:`ExactBatches` (batches.py). To start at batch k, the same order is drawn again, and the
   first k batches are left out; no sample is loaded for them. What is drawn as batch k is loaded is
   seeded from (seed, rank, epoch, k), in this process or in a worker, and the process's own
   generators are put back: :class:`Fetch` (fetch.py). So neither the order nor a random transform
   depends on what was read before, or by which worker. Batches that workers had loaded ahead at a
   save are loaded again.
3. Anything else (a stream, a loader of the user's own) becomes a :class:`WatchedLoader`. Nobody can
   leave out its first k batches. If it has a state, the state is kept after every batch, and loaded
   again. It is tried before training (proof.py), and what is not exact is said (faults.py). Where
   it has none, or not a good one, checkpoints are only taken at the end of an epoch.
4. The seed is given, or drawn from torch's generator or the loader's own as a training starts
   (:meth:`ExactLoading.settle_seed`), and kept in every checkpoint.
5. A checkpoint holds, for each loader, what :meth:`Passes.state_after` returns (passes.py). The
   epoch and the number of its batches are in Lightning's own counters. Of both a resumed run makes
   a :class:`Start` (``Resume.of`` in checkpoint/resume.py), and :meth:`ExactLoading.begin` puts the
   loaders there when training starts.
"""

from unbroken.loading.batches import ExactBatches as ExactBatches
from unbroken.loading.exact_loader import ExactLoader as ExactLoader
from unbroken.loading.exact_loader import exact_form as exact_form
from unbroken.loading.exact_loader import passes_of as passes_of
from unbroken.loading.exact_loading import ExactLoading as ExactLoading
from unbroken.loading.fetch import Fetch as Fetch
from unbroken.loading.passes import Passes as Passes
from unbroken.loading.passes import Start as Start
from unbroken.loading.watched_loader import LiveLoader as LiveLoader
from unbroken.loading.watched_loader import WatchedLoader as WatchedLoader
from unbroken.loading.watched_loader import users_own as users_own
