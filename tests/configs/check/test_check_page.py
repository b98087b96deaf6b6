"""docs/check.md: its table of rules is that of the registry, and its example is real.

`HWOPT_UPDATE_GOLDEN=1 pytest tests/configs/check/test_check_page.py` rewrites the table.
"""

from pathlib import Path

from command_line import hwopt
from documentation import ROOT, read_page
from golden_files import check_part

from hwopt.configs.check.checker import installed_rules

PAGE = ROOT / "docs" / "check.md"
BEGIN, END = "<!-- rules -->\n", "<!-- /rules -->"


def rules_table() -> str:
    lines = ["| rule | level | mistake | needs | source |", "|---|---|---|---|---|"]
    for rule in installed_rules():
        level = {"information": "note"}.get(rule.level, rule.level)
        needs = ", ".join({"size": "model size"}.get(need, need) for need in rule.needs)
        lines.append(f"| `{rule.name}` | {level} | {rule.about.rstrip('.')} | {needs} | {rule.source} |")
    return "\n".join(lines) + "\n"


def test_table_of_rules_is_that_of_the_registry() -> None:
    check_part(PAGE, BEGIN, rules_table(), END)


def test_example_is_the_real_output(tmp_path: Path) -> None:
    page = read_page(PAGE)
    (example,) = [block for block in page.blocks if block.text.startswith("# training.yaml")]
    (session,) = [block for block in page.blocks if block.kind == "session"]
    (tmp_path / "training.yaml").write_text(example.text)
    (command,) = session.commands()
    shown = hwopt(*command.words[1:], cwd=tmp_path).stdout
    assert session.text.splitlines()[1:] == shown.rstrip("\n").splitlines()
