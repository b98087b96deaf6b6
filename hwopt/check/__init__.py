"""Mistakes in training configurations. Rules are small functions, found through the entry-point group `hwopt.rules`.

`hwopt.interop` reads and translates the formats of other tools and knows no rule. Rules are a package of their own: third parties
import only this one, and a new format needs no change here.

A third-party rule imports from here: `from hwopt.check import Facts, Finding, View, rule`.
"""

from hwopt.check.contract import Facts, Finding, Level, Rule, rule
from hwopt.interop.view import Setting, View

__all__ = ["Facts", "Finding", "Level", "Rule", "Setting", "View", "rule"]
