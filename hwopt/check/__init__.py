"""Mistakes in training configurations. Rules are small functions, found through the entry-point group `hwopt.rules`.

A third-party rule imports from here: `from hwopt.check import Facts, Finding, View, rule`.
"""

from hwopt.check.contract import Facts, Finding, Level, Rule, rule
from hwopt.interop.view import Setting, View

__all__ = ["Facts", "Finding", "Level", "Rule", "Setting", "View", "rule"]
