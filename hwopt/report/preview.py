"""Print one training sample, with the part that counts in the loss marked."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from hwopt.report.terminal import say
from hwopt.tasks.preview import Preview
from hwopt.text import printable

MARKED = "bold green"


def show_preview(console: Console, found: Preview) -> None:
    """Print length, label and text of a sample. The part in the loss is green, or in [[…]] if the output has no colours."""
    others = "".join(f", {number:,} {which} samples" for which, number in found.held_out.items())
    say(console, "sample", f"{found.sample:,} of {found.samples:,} training samples{others}")
    counted = "" if found.tokens_in_loss is None else f", {found.tokens_in_loss:,} in the loss"
    if found.tokens is not None:
        say(console, "length", f"{found.tokens:,} tokens{counted}")
    if found.label is not None:
        say(console, "label", found.label)
    coloured = console.is_terminal and not console.no_color
    if found.tokens_in_loss is not None:
        say(console, "marked", f"the part that counts in the loss, {'in green' if coloured else 'between [[ and ]]'}")
    for note in found.notes:
        say(console, "note", note, "yellow")
    text = Text()
    for span in found.spans:
        shown = printable(span.text)
        if coloured:
            text.append(shown, MARKED if span.in_loss else "")
        else:
            text.append(f"[[{shown}]]" if span.in_loss else shown)
    console.print()
    console.print(text, soft_wrap=True)
