"""What a column of a table looks like: a text, a label, a part of a prompt; and the files beside a file.

Names decide first, as data sets of the hub use them; then the content: a label has few values, a text is long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.data.sources.chat import ALPACA, MESSAGES_TEXT
from hwopt.data.sources.image_folder import split_folders
from hwopt.data.sources.number_format import decimal_of, numbers_of, unread_number
from hwopt.data.sources.rows import holds_text, is_list, values_type
from hwopt.text import listing

if TYPE_CHECKING:
    import pyarrow as pa

LABELS = ("label", "labels", "class", "category", "target", "sentiment", "intent", "topic", "y")
SCORES = ("score", "rating", "stars", "value", "similarity", "similarity_score")
"""Names of columns with grades or numbers to predict, beside those of labels."""
FACTS = re.compile(
    r"(.*_)?(id|uuid|index|zip|zip_?code|post(al)?_?code|plz|ean|phone|date|time|at|on|year|month|day|hour|split|fold"
    r"|confidence)"
)
"""Names of columns that say which row it is, where or when it is from, or how sure its label is: seldom what is predicted."""
PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2")),
    *(("text_a", "text_b"), ("question", "sentence"), ("question", "passage"), ("query", "passage")),
    *(("question", "answer"), ("prompt", "response")),
)
PROMPTS = (
    *(("prompt", "completion"), ("prompt", "response"), ("instruction", "response"), ("instruction", "output")),
    *(("question", "answer"), ("input", "output"), ("source", "target"), ("query", "response"), ("question", "response")),
)
PREFERENCES = (  # columns of pairs of a good and a bad answer; the last ones are OpenAI's
    *(("chosen", "rejected"), ("chosen_response", "rejected_response"), ("preferred_output", "non_preferred_output")),
)
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
TEXTS = ("text", "sentence", "content", "review", "document", "body")
COLUMN_KEYS = "data.text, data.messages, or data.prompt and data.completion"
"""What names the columns of a file, for a message about a file without them."""
LONG_TEXT = 6_000  # Letters. Longer texts, on average, are books or articles rather than samples.
MOST_CLASSES = 100  # A column with more values is not a label, unless its name says so
ROWS_A_CLASS = 4  # A label's values have so many rows on average, unless its name says so
MOST_SPELLINGS = 20  # A column of texts such as "3.11" with more values holds measurements
EXAMINED = 2_000  # rows whose lengths are measured
HELD_OUT = {"eval": ("eval", "dev", "valid", "validation", "val"), "test": ("test",)}


def label_columns(table: pa.Table, named: bool) -> list[str]:
    """The columns that may hold the classes, the likeliest one first. If no name decides: grades, then a name with the word of
    a label, then the one with the fewest values; identifiers, places and dates last.

    `named`: the task is open, so a column whose name says nothing must look like a label beside a text.
    """
    columns: list[str] = table.column_names
    named_so = [each for name in LABELS for each in columns if each.lower() == name]
    usable = [name for name in named_so if is_scalar(table, name) and classes(table, name) >= 2]
    if usable:
        return [next((name for name in usable if not has_many_classes(table, name)), usable[0])]
    if named and ({"messages", "conversations"} & set(columns) or set(ALPACA) <= set(columns)):
        return []
    most = min(MOST_CLASSES, table.num_rows // ROWS_A_CLASS)
    prompts = next((pair for pair in PROMPTS if all(is_text(table, name) for name in pair)), ())
    others = [name for name in columns if name not in prompts and is_scalar(table, name)]
    found = [name for name in others if 2 <= classes(table, name) <= most and mean_length(table, name) < 40]
    words = {*LABELS} - {"y"}  # pandas adds "_y" to a name
    partly = {each for each in found if not is_fact(each) and {*re.split(r"[\W_0-9]+", each.lower())} & words}  # gold_label
    if named and not partly and any(name.lower() in SCORES and is_fractional(table, name) for name in columns):
        return []  # the score is predicted, and a genre or a product beside it is not
    return sorted(found, key=lambda each: (each.lower() not in SCORES, is_fact(each), each not in partly, classes(table, each)))


def is_fact(name: str) -> bool:
    """Whether the name of a column is that of an identifier, a place or a date."""
    return FACTS.fullmatch(name.lower()) is not None


def text_of(table: pa.Table, label: str | None) -> list[str]:
    """The column with the text, or two for pairs; empty if there is none."""
    lower = {name.lower(): name for name in table.column_names if name != label and is_text(table, name)}
    for pair in PAIRS:
        if set(pair) <= set(lower):
            return [lower[name] for name in pair]
    for name in TEXTS:
        if name in lower:
            return [lower[name]]
    longest = max(lower.values(), key=lambda name: mean_length(table, name), default=None)
    return [] if longest is None else [longest]


def unread_texts(table: pa.Table, known: Iterable[str]) -> str:
    """What to say of further columns whose cells are mostly of several words; "" if there are none."""
    first = table.slice(0, EXAMINED)
    others = [name for name in table.column_names if name not in known and is_text(table, name)]
    prose = [name for name in others if 2 * sum(" " in str(cell or "") for cell in first[name].to_pylist()) > first.num_rows]
    return f"; {listing([*map(repr, prose)])} not read: name in data.text all that the model needs" if prose else ""


def unread_numbers(table: pa.Table) -> str:
    """What to say of a column of numbers that a task would not read as numbers; "" if there is none."""
    for name in table.column_names:
        read = not is_fact(name) and holds_text(type_of(table, name))
        found = unread_number(table[name].slice(0, EXAMINED).to_pylist()) if read else None
        if found:
            what = f"column {name!r} holds numbers in a format that is not read, such as {found!r}"
            return f"{what}: to predict them, write them without units, with one decimal mark, and set task.kind = 'regression'"
    return ""


def type_of(table: pa.Table, name: str) -> pa.DataType:
    """The type of a column; null if there is none of this name, or several."""
    import pyarrow as pa

    return table[name].type if table.column_names.count(name) == 1 else pa.null()


def holds_messages(table: pa.Table, name: str) -> bool:
    """Whether the column holds messages, alone or in lists, or one of its cells such messages as JSON text."""
    import pyarrow as pa
    import pyarrow.compute

    kind = type_of(table, name)
    message = kind.value_type if is_list(kind) else kind
    if pa.types.is_struct(message):
        return bool({"role", "from"} & {field.name for field in message})
    if not holds_text(kind):
        return False
    texts = table[name] if kind in (pa.string(), pa.large_string()) else table[name].cast(pa.large_string())
    return bool(pyarrow.compute.any(pyarrow.compute.match_substring_regex(texts, MESSAGES_TEXT)).as_py())


def preferences(table: pa.Table) -> str | None:
    """Why the data of preference methods, whose bad answers must not be trained, cannot be used; None for other data."""
    import pyarrow as pa

    names = set(table.column_names)
    chats = [name for name in ("messages", "conversations") if holds_messages(table, name)]
    answers = ["completion"] * ("prompt" in names) + chats
    marked = [(name, mark) for name in answers for mark in ("label", "kto_tag")]
    whole = {name.partition(".")[0] for name in names}  # an answer may be an object, whose fields are columns here
    found = next((pair for pair in PREFERENCES if set(pair) <= whole), None) or next(
        (pair for pair in marked if set(pair) <= names and pa.types.is_boolean(table[pair[1]].type)), None
    )
    return found and (
        f"columns {found[0]!r} and {found[1]!r} hold preferences, and `hwopt run` would train the bad answers too. Use a "
        "trainer of TRL in a script of your own, with hwopt.optimized(DPOTrainer, PROFILE): docs/your-script.md. To train "
        "good answers alone, name their column in data.messages, or prompts and answers in data.prompt and data.completion"
    )


def unusable(table: pa.Table) -> str | None:
    """Why the model would learn wrong answers from `table`, unless the job names its columns; None for usable data."""
    names = set(table.column_names)
    filled = (name for name in MEDIA if name in names and any(cell.as_py() not in (None, "", "[]", []) for cell in table[name]))
    if media := next(filled, None):
        return (
            f"column {media!r} belongs to samples with more than text, and the model would learn answers about what it does not "
            f"see. To train the text alone, name its columns in {COLUMN_KEYS}"
        )
    if set(PROMPTS[0]) <= names and not names & {"messages", "conversations", "text"}:
        chats = [holds_messages(table, name) for name in PROMPTS[0]]
        if not all(chats) and (any(chats) or not all(holds_text(type_of(table, name)) for name in PROMPTS[0])):
            kinds = ["messages" if chat else type_of(table, name) for name, chat in zip(PROMPTS[0], chats, strict=True)]
            return f"columns 'prompt' and 'completion' hold {kinds[0]} and {kinds[1]}; give strings or messages in both"
    return preferences(table)


def written_lists(table: pa.Table) -> str | None:
    """Why words that a csv file has as texts such as "['a', 'b']", or JSON beside numbers, cannot be used; else None."""
    cells = {name: str(table[name][0]) for name in ("tokens", "words") if is_text(table, name)}
    name = next((name for name, cell in cells.items() if cell.startswith("[") and cell.endswith("]")), None)
    return name and (
        f"column {name!r} holds lists as texts, or lists with other values than strings; token-classification reads lists of "
        "strings. Save the rows so, as jsonl or parquet"
    )


def is_text(table: pa.Table, name: str) -> bool:
    """Whether the column holds strings, of which one has a letter."""
    values = table[name].slice(0, EXAMINED).to_pylist() if holds_text(type_of(table, name)) else []
    return any(any(map(str.isalpha, value or "")) for value in values)


def is_scalar(table: pa.Table, name: str) -> bool:
    """Whether the column holds strings, whole numbers or booleans: what a class can be."""
    import pyarrow as pa

    kind = values_type(type_of(table, name))
    if is_whole(kind) or pa.types.is_boolean(kind):
        return True
    return (holds_text(kind) or pa.types.is_floating(kind)) and not is_fractional(table, name)


def is_whole(kind: pa.DataType) -> bool:
    """Whether a type holds integers: also decimals without places, as databases export them."""
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0))


def values_of(table: pa.Table, name: str) -> list[Any]:
    """The different values of a column, without empty cells and NaN."""
    return [value for value in table[name].unique().to_pylist() if value is not None and value == value and str(value).strip()]


def classes(table: pa.Table, name: str) -> int:
    return len(values_of(table, name))


def has_many_classes(table: pa.Table, name: str) -> bool:
    """Whether a column has more values than labels usually have, as one of identifiers has."""
    most: int = max(MOST_CLASSES, table.num_rows // ROWS_A_CLASS)
    return classes(table, name) > most


def is_fractional(table: pa.Table, name: str) -> bool:
    """Whether the values of a column are numbers of which one has a fraction: a measurement.

    A few texts with a point, each in several rows, are classes, as versions (3.9, 3.11) are, unless the column's name is that
    of a number.
    """
    values = table[name].slice(0, EXAMINED).to_pylist()
    texts = holds_text(values_type(type_of(table, name))) and name.lower() not in SCORES and decimal_of(values) == "."
    if texts and classes(table, name) <= min(MOST_SPELLINGS, table.num_rows // ROWS_A_CLASS):
        return False
    numbers = numbers_of(values)
    return any(not number.is_integer() for number in numbers or ())


def mean_length(table: pa.Table, name: str) -> float:
    values = table[name].slice(0, EXAMINED).to_pylist()
    return sum(len(str(value or "")) for value in values) / max(len(values), 1)


def files_beside(source: str) -> dict[str, str]:
    """Files for evaluation and test beside a file with "train" in its name: dev.csv beside train.csv.

    In a folder of images or of a saved DatasetDict, the splits beside that of training, as eval_split and test_split.
    """
    path = Path(source)
    if (path / "dataset_dict.json").is_file():
        return {f"{key}_split": word for key, words in HELD_OUT.items() for word in words if (path / word).is_dir()}
    if path.is_dir() and "train" in (splits := split_folders(path)):
        return {f"{part}_split": folder.name for part, folder in splits.items() if part != "train"}
    if "train" not in path.stem or not path.is_file():
        return {}
    beside = {key: [path.with_name(path.name.replace("train", word)) for word in words] for key, words in HELD_OUT.items()}
    return {key: str(next(filter(Path.is_file, files))) for key, files in beside.items() if any(map(Path.is_file, files))}
