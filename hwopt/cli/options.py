"""Options that several commands share, and the checks before anything heavy is imported."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from hwopt.model.remote_code import trust_only
from hwopt.report.status_line import folded, status_line
from hwopt.system.ranks import rank_and_world
from hwopt.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from hwopt.planning.inputs import Inputs

Command = TypeVar("Command", bound=Callable[..., Any])

NOISY = ("torchao", "torch.utils._pytree", "transformers", "datasets", "accelerate", "huggingface_hub", "peft", "bitsandbytes")
profile_option = click.option("--profile", default="auto", show_default=True, help="A profile's name, a TOML file, or auto.")
SHORTCUTS = {
    "lr": ("training.learning_rate", "Learning rate"),
    "epochs": ("training.num_train_epochs", "Epochs"),
    "max_steps": ("training.max_steps", "Optimizer steps"),
    "batch": ("effective_batch_size", "Rows per optimizer step, over all ranks"),
}
"""Options for keys that people change most: name -> (key, or the word for which a plugin declares its option; help)."""


def with_shortcuts(command: Command) -> Command:
    """`command` with an option for each of SHORTCUTS, which becomes an assignment before those of --set."""

    @wraps(command)
    def run(*args: Any, assignments: tuple[str, ...], **options: Any) -> Any:
        from hwopt.config.aliases import option_for

        given = {word: options.pop(name) for name, (word, _) in SHORTCUTS.items()}
        keys = {word if "." in word else option_for(word): value for word, value in given.items() if value is not None}
        short = (f"{key}={value}" for key, value in keys.items())
        return command(*args, assignments=(*short, *assignments), **options)

    for name, (_, text) in SHORTCUTS.items():
        run = click.option(f"--{name.replace('_', '-')}", name, metavar="NUMBER", help=f"{text}; short for --set.")(run)
    return cast("Command", run)


def instead_of_option(name: str) -> str:
    """What to give instead of the unknown option `name`; "" if no key of the job or of a plugin has such a name."""
    from hwopt.config.aliases import instead_of
    from hwopt.config.job import Job
    from hwopt.config.validation import home_of

    word = name.lstrip("-").replace("-", "_")
    found = home_of(Job, word) or instead_of(word)
    return found if not found or found.startswith("--") else f"--set {found.split(' ')[0]}=VALUE"


trust_option = click.option(
    "--trust-remote-code",
    "trusted",
    multiple=True,
    metavar="MODEL_NAME",
    expose_value=False,
    callback=lambda context, option, names: trust_only(names),
    help="Allow this model's custom code (command line only).",
)


def set_option(text: str) -> Callable[[Command], Command]:
    """--set, described by `text`."""
    text = f"{text}; repeatable."
    return click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", callback=with_tables, help=text)


def with_tables(context: click.Context, option: click.Parameter, assignments: Sequence[str]) -> Sequence[str]:
    """`assignments`. Raises BadParameter for a known key without its table, as in `learning_rate=1e-4`."""
    for word, equals, _ in (each.partition("=") for each in assignments):
        if equals and word.strip().isidentifier() and (instead := instead_of_option(word.strip())):
            raise click.BadParameter(f"{word}: expected a dotted key. Give {instead}.")
    return assignments


def source_options(command: Command) -> Command:
    """JOB, --set, --memory-limit and --trust-remote-code."""
    text = "Run as if the device had only this much memory, such as 8GiB."
    command = click.option("--memory-limit", metavar="SIZE", help=text)(trust_option(command))
    command = click.argument("job", required=False, type=Path)(command)
    return set_option("Override a key of the job or a plugin's option")(command)


def job_options(command: Command) -> Command:
    """Those of `source_options`, the shortcuts of --set, and --strict: arguments of `api.resolve`."""
    text = "Turn every fallback, every skip and a card that does not match the profile into an error."
    return click.option("--strict", is_flag=True, help=text)(source_options(with_shortcuts(command)))


def read_files(job: Path | None, *names: str | None) -> list[Path]:
    """The files that a command reads, or may read: of `names`, some are files."""
    return [job or Path("job.toml"), *(Path(name) for name in names if name)]


def hardware_option(default: str) -> Callable[[Command], Command]:
    choice = click.Choice(["profile", "detected"])
    text = "Plan for the card, or this machine."
    return click.option("--hardware", type=choice, default=default, show_default=True, help=text)


world_size_option = click.option(
    "--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Number of processes (ranks), one a device."
)
format_option = click.option("--format", "format_", type=click.Choice(["table", "json"]), default="table", show_default=True)


def lister(text: str, listed: Callable[[str], None]) -> click.Group:
    """A command that lists with `listed(format)`; "list" does so too, and further subcommands can be added."""

    def called(context: click.Context, format_: str) -> None:
        if context.invoked_subcommand is None:
            listed(format_)

    group = click.group(invoke_without_command=True, help=text)(format_option(click.pass_context(called)))
    group.command("list", help=f"{text.split(',')[0]}.")(format_option(listed))
    return group


def inference_options(file_needed: bool = True) -> Callable[[Command], Command]:
    """RUN, FILE, --set, --batch-size and --trust-remote-code of commands that use a trained model."""

    def added(command: Command) -> Command:
        text = "Override how the job reads FILE, such as data.text=COLUMN or data.encoding=cp1252"
        command = set_option(text)(trust_option(command))
        text = "Rows of a batch; default: those of the run's evaluation."
        command = click.option("--batch-size", type=click.IntRange(min=1), help=text)(command)
        metavar = "FILE" if file_needed else "[FILE]"
        command = click.argument("source", metavar=metavar, required=file_needed)(command)
        return click.argument("run", metavar="RUN", type=click.Path(path_type=Path))(command)

    return added


def say(text: str, err: bool = False, indent: str | None = None) -> None:
    """Print a text that may come from a file; on a terminal, lines break between words and go on with `indent`."""
    status_line.clear()
    click.echo(folded(printable(text), sys.stderr if err else sys.stdout, indent), err=err)


def warn(message: str) -> None:
    say(f"WARNING: {message}", err=True)


def say_json(found: Any) -> None:
    status_line.clear()
    click.echo(json.dumps(found, indent=2, default=str))


def say_result(format_: str, found: Any, show: Callable[[Console], None]) -> None:
    """Print `found` as JSON, or let `show` print it on the terminal."""
    from hwopt.report.terminal import Terminal

    if format_ == "json":
        say_json(found)
    else:
        show(Terminal())


def begin(
    profiles: Sequence[str], job: Path | None, assignments: Sequence[str], memory_limit: str | None = None, strict: bool = False
) -> Inputs:
    """The command's inputs, checked before torch is imported, which takes seconds. `strict` counts later."""
    status_line.show("reading job and profile")
    quiet_libraries()
    from hwopt.planning.inputs import Inputs, refuse_mistakes

    inputs = Inputs()
    refuse_mistakes(inputs, profiles, job, assignments, memory_limit)
    announce_loading()
    return inputs


def announce_loading() -> None:
    """Say on standard error that torch is loaded next, which takes seconds. Several ranks say it once."""
    from hwopt.runs.rank_errors import LAUNCH_FOLDER

    quiet_libraries()
    rank, _ = rank_and_world(os.environ)
    if "torch" not in sys.modules and rank == 0 and LAUNCH_FOLDER not in os.environ:
        status_line.announce("loading torch")


def quiet_libraries() -> None:
    """Hide the libraries' own notes, progress bars and warnings; errors still show."""
    import logging
    import warnings

    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if "transformers" in sys.modules:  # imported before the command began: it has read the environment
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
