"""Mistakes in training configurations. Rules are small functions, found through the entry-point group `hwopt.rules`.

A third-party rule imports from here only: `from hwopt.configs.check import Facts, Finding, View, rule`.
"""

from hwopt.configs.check.contract import Facts, Finding, Level, Rule, rule
from hwopt.configs.view import ConfigSetting, View

__all__ = ["ConfigSetting", "Facts", "Finding", "Level", "Rule", "View", "rule"]
