"""The run report: ``report.html`` in a run's folder, one file that opens anywhere without a network."""

from project.report.page import write_report
from project.report.record import RunRecord

__all__ = ["RunRecord", "write_report"]
