"""Accepted values that several rooms name."""

from __future__ import annotations

AUTO = "auto"


DETECTORS = ("grams", "anchors")


EVALUATION_MODES = ("greedy", "sampled")
