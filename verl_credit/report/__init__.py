"""The report of a run: one offline HTML page and the learning curves, made from the run's files alone."""

from verl_credit.report.write import write_report

__all__ = ["write_report"]
