# moved: delete this file after the merge
"""Moved to :mod:`project.command_line` and :mod:`project.final_test`."""

from project.command_line.refusals import refusals_as_errors as refusals_as_errors
from project.command_line.trainer_flags import as_list as as_list
from project.command_line.trainer_flags import build_trainer as build_trainer
from project.command_line.trainer_flags import requeue_signal as requeue_signal
from project.command_line.trainer_flags import trainer_flags as trainer_flags
from project.final_test import final_test as final_test
from project.final_test import float32_products as float32_products
from project.final_test import lacks_for_test as lacks_for_test
