"""The built-in rules: one module per subject, one function per mistake."""

from hwopt.configs.check.contract import Rule
from hwopt.configs.check.rules import attention, batch, comments, launcher, loader, memory, names, precision, saving, schedule

RULES: tuple[Rule, ...] = tuple(
    each
    for module in (batch, comments, precision, memory, attention, loader, schedule, saving, names, launcher)
    for each in vars(module).values()
    if isinstance(each, Rule)
)
"""What the entry point `builtin` of the group `hwopt.rules` loads."""
