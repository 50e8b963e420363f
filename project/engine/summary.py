# moved: delete this file after the merge
"""Moved to :mod:`project.facts`, :mod:`project.progress`, :mod:`project.run_result` and
:mod:`project.run_record`.
"""

from project.facts import Summary as Summary
from project.facts import command_line as command_line
from project.facts import device_name as device_name
from project.facts import git_state as git_state
from project.facts import network_of as network_of
from project.facts import parameter_count as parameter_count
from project.facts import samples_of as samples_of
from project.facts import training_samples as training_samples
from project.facts import versions as versions
from project.progress import closing_lines as closing_lines
from project.progress import stopped_lines as stopped_lines
from project.run_record import write_config as write_config
from project.run_result import Mistake as Mistake
from project.run_result import RunResult as RunRecord  # noqa: F401
from project.run_result import Series as Series
from project.run_result import read_series as read_series
