"""Moved to run_folder.py, command_line/trust.py and command_line/read_checkpoint.py."""

# moved: delete this file after the merge
from project.command_line.read_checkpoint import Loaded as Loaded
from project.command_line.read_checkpoint import load as load
from project.command_line.read_checkpoint import read_configuration as read_configuration
from project.command_line.read_checkpoint import start_from as start_from
from project.engine.ranks import is_rank_zero as is_rank_zero
from project.engine.run_folder import ROOT as ROOT
from project.engine.run_folder import RunFolder as Run  # noqa: F401
from project.engine.run_folder import choose as choose
from project.engine.run_folder import find_checkpoint as find_checkpoint
from project.engine.run_folder import point_latest_at as point_latest_at
