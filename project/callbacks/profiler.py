"""Moved: delete this file after the merge."""

from project.profiler import StepProfiler as StepProfiler
