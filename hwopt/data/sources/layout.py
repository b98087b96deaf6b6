"""Which columns causal language modelling reads of a table: one rule for training, prediction, `hwopt init` and export.

The job's keys decide. Without them it is TRL's rule: `prompt` with `completion` come before `messages`, and these before `text`.
Columns that TRL does not know come last: Alpaca's, and other pairs of prompts and completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from hwopt.data.sources.chat import ALPACA, ALPACA_EXTRAS, EXTRAS
from hwopt.data.sources.columns import PROMPTS, holds_messages, is_text, type_of, unusable
from hwopt.data.sources.rows import holds_text
from hwopt.errors import DataError
from hwopt.text import listing

if TYPE_CHECKING:
    import pyarrow as pa

    from hwopt.config.job import Data

MESSAGES = ("messages", "conversations")  # the names of columns with conversations


@dataclass(frozen=True)
class Layout:
    """Columns that hold samples, and how they are read."""

    kind: Literal["messages", "completions", "prompts", "texts"]
    """Conversations whose answers are trained; prompts with completions, as messages or as texts; texts."""
    columns: tuple[str, ...]
    unread: tuple[Layout, ...] = ()  # other columns that could be read instead
    beside: tuple[str, ...] = ()  # further columns that are not read

    @property
    def chat(self) -> bool:
        """Whether the columns hold messages, or a question and its answer that become messages (Alpaca)."""
        return self.kind in ("messages", "completions")

    @property
    def keys(self) -> str:
        """The keys of the job that choose these columns."""
        names = {"messages": ["messages"], "texts": ["text"]}.get(self.kind, ["prompt", "completion"])
        return ", ".join(f'data.{name} = "{column}"' for name, column in zip(names, self.columns, strict=False))

    @property
    def note(self) -> str:
        """What is said of the columns that are not read; "" if there are none."""
        own = listing(list(map(repr, self.columns)))
        notes = []
        if others := "; ".join(f"{listing(list(map(repr, each.columns)))} by {each.keys}" for each in self.unread):
            verb = "are" if len(self.columns) > 1 else "is"
            notes.append(f"the table holds samples in several columns: {own} {verb} read. To read others instead: {others}")
        if self.beside:
            verb = "are" if len(self.beside) > 1 else "is"
            notes.append(
                f"{listing(list(map(repr, self.beside)))} beside {own} {verb} not read: put what the model needs into {own}"
            )
        return "; ".join(notes)


def layout_of(table: pa.Table, data: Data, answers: bool = True) -> Layout:
    """How `table` is read. `answers`: for training, where the columns with the answers must exist. Raises DataError."""
    return with_beside(chosen_columns(table, data, answers), table.column_names)


def with_beside(layout: Layout, names: Sequence[str]) -> Layout:
    """`layout` with those of the columns `names` that are not read, and that no other layout has."""
    extras = () if not layout.chat else (*EXTRAS, *ALPACA_EXTRAS) if layout.columns == ALPACA else EXTRAS
    others = {column for each in layout.unread for column in (*each.columns, *ALPACA_EXTRAS * (each.columns == ALPACA))}
    known = {*layout.columns, *extras, *others}
    return replace(layout, beside=tuple(name for name in names if name not in known))


def chosen_columns(table: pa.Table, data: Data, answers: bool) -> Layout:
    """The columns that the job names, else the first ones that are recognised. Raises DataError."""
    names = table.column_names
    if data.prompt is not None:
        pair = (data.prompt, str(data.completion))
        chat = any(holds_messages(table, name) for name in (pair if answers else pair[:1]))
        return Layout("completions" if chat else "prompts", pair)
    if data.messages is not None:
        alpaca = data.messages == ALPACA[0] and (ALPACA[1] in names or not answers)
        return Layout("messages", ALPACA if alpaca else (data.messages,))
    texts = Layout("texts", tuple(data.text))
    if "text" in data.model_fields_set and set(data.text) <= set(names):
        return texts
    if answers and (reason := unusable(table)):
        raise DataError(reason)
    found = [*recognised(table)] or [*recognised(table, answers)] or [texts]
    if (
        found == [texts]
        and not set(data.text) <= set(names)
        and (chats := [name for name in names if holds_messages(table, name)])
    ):
        raise DataError(f"column {chats[0]!r} holds conversations. Set {Layout('messages', (chats[0],)).keys}")
    if found[0].kind == "texts" and set(data.text) <= set(names) and holds_messages(table, data.text[0]):
        raise DataError(
            f"column {data.text[0]!r} holds messages as JSON text. Set {Layout('messages', data.text).keys} to train their "
            f"answers, or {texts.keys} to train the JSON itself"
        )
    return Layout(found[0].kind, found[0].columns, tuple(found[1:]))


def recognised(table: pa.Table, answers: bool = True) -> Iterator[Layout]:
    """The columns of `table` that hold samples by their names and their contents, those to read first.

    Without `answers`, a prompt needs no column of completions.
    """
    names = set(table.column_names)
    pairs = []
    for pair in PROMPTS:
        needed = pair if answers else pair[:1]
        if needed == ALPACA[: len(needed)] and set(needed) <= names and not holds_messages(table, ALPACA[0]):
            pairs.append(Layout("messages", ALPACA))
        elif pair[0] == "input" and set(ALPACA) <= names:
            continue  # a part of Alpaca's question
        elif all(holds_messages(table, name) for name in needed):
            pairs.append(Layout("completions", pair))
        elif all(is_text(table, name) or (pair == PROMPTS[0] and holds_text(type_of(table, name))) for name in needed):
            pairs.append(Layout("prompts", pair))
    chats = [Layout("messages", (name,)) for name in MESSAGES if name in names]
    known = [pair for pair in pairs if pair.columns == PROMPTS[0]]
    yield from known
    yield from (chat for chat in chats if holds_messages(table, chat.columns[0]))
    if "text" in names:
        yield Layout("texts", ("text",))
    else:  # their rows have a reason why they are no messages
        yield from (chat for chat in chats if not holds_messages(table, chat.columns[0]))
    yield from sorted((pair for pair in pairs if pair not in known), key=lambda pair: pair.columns != ALPACA)
