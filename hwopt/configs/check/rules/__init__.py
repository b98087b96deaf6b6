"""The built-in rules: one module per subject, one function or one entry of a table per mistake."""

from hwopt.configs.check import Rule
from hwopt.configs.check.rules import batch, card, combinations, comments, engines, names, refused, schedule

RULES: tuple[Rule, ...] = (
    *combinations.RULES_OF_ROWS,
    *(
        each
        for module in (batch, card, combinations, comments, engines, names, refused, schedule)
        for each in vars(module).values()
        if isinstance(each, Rule)
    ),
)
"""What the entry point `builtin` of the group `hwopt.rules` loads."""
