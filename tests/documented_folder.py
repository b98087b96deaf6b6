"""A folder in which the documented commands run: a tiny job, model and profile under the names that the documents use."""

import csv
import json
import random
import re
import shutil
from pathlib import Path

from documentation import ROOT, Block, Command, Page, read_page
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

from hwopt.testing import COLOURS, TINY_LLAMA, WORDS

MODEL = "distilbert-base-uncased"
PLACEHOLDERS = {"PROFILE": "t4_16gb", "A": "rtx3070_8gb", "B": "t4_16gb", "N": "2", "RUN": "runs/job-rtx3070_8gb"}
SHOWN = {"profiles": "cpu", "plugins": "optimizer"}
"""NAME in `hwopt profiles show NAME` and `hwopt plugins show NAME`."""
ELLIPSES = {"run": ["job.toml", "--profile", "cpu"], "--debug": ["profiles"]}
"""The word behind `hwopt` -> what "…" stands for in a command that is run."""
CHECKPOINT = ("checkpoint-1500", "checkpoint-2")
"""A documented checkpoint, and the one that a run of two steps has."""


BEFORE = {
    "docs/after-training.md": ["hwopt run job.toml --profile rtx3070_8gb", "hwopt run chat.toml --profile cpu"],
    "docs/reports.md": ["hwopt run job.toml --profile rtx3070_8gb", "hwopt run job.toml --profile cpu --name lr"],
}
"""Page -> commands of other pages on whose runs it relies."""


def toml_block(page: str, start: str) -> Block:
    """The only TOML block of a page with a line that starts with `start`."""
    (found,) = [
        block for block in read_page(ROOT / page).blocks if block.language == "toml" and f"\n{start}" in "\n" + block.text
    ]
    return found


def write_pairs(path: Path, columns: tuple[str, ...], number: int, seed: int) -> None:
    """A csv file with one or two text columns and a label that says whether the first word is a colour."""
    random_words = random.Random(seed)
    with open(path, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*columns, "label"])
        for _ in range(number):
            texts = [" ".join(random_words.choices(WORDS, k=random_words.randint(3, 8))) for _ in columns]
            rows.writerow([*texts, "colour" if texts[0].split()[0] in COLOURS else "other"])


def write_model(folder: Path) -> None:
    """A DistilBERT of two small layers with its tokenizer, as `save_pretrained` writes them."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = DistilBertConfig(vocab_size=len(vocabulary), dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    DistilBertForSequenceClassification(config).save_pretrained(folder)


def write_folder(folder: Path) -> None:
    """The job of README.md with data, a small model and the profile of docs/profiles.md.

    `folder`/alone has no job.toml, for commands that train the demo or give all keys of a job.
    """
    alone = folder / "alone"
    alone.mkdir(parents=True)
    write_model(folder / MODEL)
    shutil.copytree(folder / MODEL, alone / MODEL)
    (folder / "job.toml").write_text(toml_block("README.md", "[model]").text, encoding="utf-8")
    shutil.copytree(ROOT / "benchmarks" / "profiles", folder / "benchmarks" / "profiles")
    write_chat(folder)
    (training,) = [block for block in read_page(ROOT / "docs/check.md").blocks if block.text.startswith("# training.yaml")]
    (folder / "training.yaml").write_text(training.text, encoding="utf-8")
    (folder / "my_card.toml").write_text(toml_block("docs/profiles.md", 'name = "my_card"').text, encoding="utf-8")
    write_pairs(folder / "train.csv", ("premise", "hypothesis"), 150, seed=0)
    write_pairs(folder / "dev.csv", ("premise", "hypothesis"), 12, seed=1)
    for name in ("test.csv", "new.csv"):
        shutil.copy(folder / "dev.csv", folder / name)
    write_pairs(alone / "train.csv", ("text",), 40, seed=2)
    write_tasks(folder)


def write_tasks(folder: Path, rows: int = 40, seed: int = 3) -> None:
    """The data of docs/jobs.md for regression, multi-label and token classification."""
    random_words = random.Random(seed)
    scores, topics, entities = ["text,score"], [], []
    for _ in range(rows):
        words = random_words.choices(WORDS, k=random_words.randint(3, 8))
        colours = [word for word in words if word in COLOURS]
        scores.append(f"{' '.join(words)},{len(colours) / len(words)}")
        topics.append(json.dumps({"text": " ".join(words), "labels": sorted(set(colours))}))
        entities += [*(f"{word} {'B-COL' if word in COLOURS else 'O'}" for word in words), ""]
    for name, lines in (("scores.csv", scores), ("topics.jsonl", topics), ("entities.conll", entities)):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_chat(folder: Path) -> None:
    """chat.toml: prompts and completions for a small decoder, and questions.jsonl with prompts alone."""
    config = ", ".join(f"{key} = {json.dumps(value)}" for key, value in (TINY_LLAMA | {"max_position_embeddings": 512}).items())
    rows = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(20)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    questions = "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows[:2])
    (folder / "questions.jsonl").write_text(questions, encoding="utf-8")
    (folder / "chat.toml").write_text(
        f'[model]\nconfig = {{ {config} }}\n[data]\ntrain = "chat.jsonl"\nprompt = "prompt"\ncompletion = "completion"\n'
        'eval_fraction = 0.2\n[task]\nkind = "causal-lm"\n',
        encoding="utf-8",
    )


def write_files_of(page: Page, folder: Path) -> None:
    """Write the TOML blocks of a page that begin with a comment that names their file."""
    for block in page.blocks:
        if block.language == "toml" and (name := re.match(r"# (\w+\.toml)\n", block.text)):
            for target in (folder, folder / "alone"):
                if name[1] != "job.toml":
                    (target / name[1]).write_text(block.text, encoding="utf-8")


def folder_of(command: Command, folder: Path) -> Path:
    """`folder`, or its part without a job file if a command gives the data itself, or is a `run` of the demo."""
    gives_data = any(word.startswith("data.train=") for word in command.words)
    demo = "run" in command.words and not any(word.endswith(".toml") for word in command.words)
    return folder / "alone" if gives_data or demo else folder


def arguments(command: Command) -> list[str]:
    """The words of a command with names for the placeholders, and with few steps if it trains, without a redirection."""
    words = list(command.words)
    if "…" in words:
        words[words.index("…") : words.index("…") + 1] = ELLIPSES[words[1]]
    if ">" in words:
        words = words[: words.index(">")]
    if words[-2:] == ["show", "NAME"]:
        words[-1] = SHOWN[words[-3]]
    words = [PLACEHOLDERS.get(word, word).replace(*CHECKPOINT) for word in words]
    if "run" in words:
        # a resumed run trains a step more than the one before
        steps = 4 if "--resume-from" in words else 3 if "--resume" in words else 2
        words += ["--max-steps", str(steps), "--set", "plugins.dataloader.num_workers=0"]
    if words[1:3] == ["plan", "imported/job.toml"]:
        words += ["--set", 'data.text=["premise", "hypothesis"]']  # the columns of the folder's data
    if "tune" in words:
        words += ["--trials", "2", "--steps", "8"]
    if "init" in words:
        words += ["--yes", "-o", "written.toml"]
    return words


def launches(command: Command) -> bool:
    """Whether a command starts other processes that train."""
    return command.words[0] == "accelerate" or "--processes" in command.words
