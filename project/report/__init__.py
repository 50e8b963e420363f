"""The run report: ``report.html`` in a run's folder, one file that opens anywhere without a network."""

from project.report.page import write_report

__all__ = ["write_report"]
