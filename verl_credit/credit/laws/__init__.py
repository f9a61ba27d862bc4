"""The laws that every operator must satisfy, ours and a user's, as functions that find a counterexample."""

from verl_credit.credit.laws.check import LAWS, Finding, check
from verl_credit.credit.laws.effects import PROPERTIES
from verl_credit.credit.laws.laws import Broken
from verl_credit.credit.laws.subjects import Subject, own_subject, registered_subject
from verl_credit.credit.plugins.load import KINDS

__all__ = [
    "KINDS", "LAWS", "PROPERTIES", "Broken", "Finding", "Subject", "check", "own_subject",
    "registered_subject",
]  # fmt: skip
