"""Mistakes in training configurations. Rules are small functions, found through the entry-point group `hwopt.rules`.

Rules know nothing of the formats of other tools, which `hwopt.configs` reads and translates into a `View`: third parties
import only this one, and a new format needs no change here.

A third-party rule imports from here: `from hwopt.configs.check import Facts, Finding, View, rule`.
"""

from hwopt.configs.check.contract import Facts, Finding, Level, Rule, rule
from hwopt.configs.view import ConfigSetting, View

__all__ = ["ConfigSetting", "Facts", "Finding", "Level", "Rule", "View", "rule"]
