"""The report of a run: one offline HTML page and the learning curves, made only from the run's files."""

from verl_credit.records.report.write import watch, write_report, write_two

__all__ = ["watch", "write_report", "write_two"]
