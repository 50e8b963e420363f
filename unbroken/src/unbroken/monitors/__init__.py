"""Callbacks that watch a run, one file each."""

from unbroken.monitors.last_step import LogLastStep as LogLastStep
from unbroken.monitors.memory import MemoryMonitor as MemoryMonitor
from unbroken.monitors.memory_snapshot import MemorySnapshot as MemorySnapshot
from unbroken.monitors.monitor import Monitor as Monitor
from unbroken.monitors.optimizer import OptimizerMonitor as OptimizerMonitor
from unbroken.monitors.slow_precision import SlowPrecision as SlowPrecision
from unbroken.monitors.test_predictions import TestPredictions as TestPredictions
from unbroken.monitors.throughput import ThroughputMonitor as ThroughputMonitor
