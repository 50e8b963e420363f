"""Moved to :mod:`project.engine.loading`."""

# moved: delete this file after the merge
from project.engine.loading import ExactBatches as ExactBatches
from project.engine.loading import ExactLoader as ExactLoader
from project.engine.loading import ExactLoading as ExactLoading
from project.engine.loading import Fetch as Fetch
from project.engine.loading import Passes as Passes
from project.engine.loading import Start as Start
from project.engine.loading import WatchedLoader as WatchedLoader
