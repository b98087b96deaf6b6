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
from hwopt.report.status_line import status_line
from hwopt.system.ranks import rank_and_world
from hwopt.text import printable

if TYPE_CHECKING:
    from hwopt.planning.inputs import Inputs

Command = TypeVar("Command", bound=Callable[..., Any])

NOISY = ("torchao", "torch.utils._pytree", "transformers", "datasets", "accelerate", "huggingface_hub", "peft", "bitsandbytes")


def profile_option(command: Command) -> Command:
    return click.option("--profile", default="auto", show_default=True, help="A profile's name, a TOML file, or auto.")(command)


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
        given = {name: options.pop(name) for name in SHORTCUTS}
        short = tuple(f"{key_of(SHORTCUTS[name][0])}={value}" for name, value in given.items() if value is not None)
        return command(*args, assignments=(*short, *assignments), **options)

    for name, (_, text) in SHORTCUTS.items():
        run = click.option(f"--{name.replace('_', '-')}", name, metavar="NUMBER", help=f"{text}; short for --set.")(run)
    return cast("Command", run)


def key_of(word: str) -> str:
    """The key of a job, or the option of a plugin that declares `word`."""
    from hwopt.config.aliases import option_for

    return word if "." in word else option_for(word)


def instead_of_option(name: str) -> str:
    """What to give instead of the unknown option `name`; "" if no key of the job or of a plugin has such a name."""
    from hwopt.config.aliases import instead_of
    from hwopt.config.job import Data
    from hwopt.config.job_model import Model
    from hwopt.config.job_training import Training

    word = name.lstrip("-").replace("-", "_")
    for table, keys in (("training", Training), ("data", Data), ("model", Model)):
        if word in keys.model_fields:
            return f"--set {table}.{word}=VALUE"
    found = instead_of(word)
    if not found or found.startswith("--"):
        return found
    return f"--set {found.split(' ')[0]}=VALUE"


def trust_option(command: Command) -> Command:
    return click.option(
        "--trust-remote-code",
        "trusted",
        multiple=True,
        metavar="MODEL_NAME",
        expose_value=False,
        callback=lambda context, option, names: trust_only(names),
        help="Allow this model's custom code (command line only).",
    )(command)


def set_option(text: str) -> Callable[[Command], Command]:
    """--set, described by `text`."""
    return click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help=f"{text}; repeatable.")


def memory_limit_option(command: Command) -> Command:
    text = "Run as if the device had only this much memory, such as 8GiB."
    return click.option("--memory-limit", metavar="SIZE", help=text)(command)


def source_options(command: Command) -> Command:
    """JOB, --set, --memory-limit and --trust-remote-code."""
    command = memory_limit_option(trust_option(command))
    command = click.argument("job", required=False, type=Path)(command)
    return set_option("Override a key of the job or a plugin's option")(command)


def job_options(command: Command) -> Command:
    """Those of `source_options`, the shortcuts of --set, and --strict: arguments of `api.resolve`."""
    text = "Turn every fallback, every skip and a card that does not match the profile into an error."
    return click.option("--strict", is_flag=True, help=text)(source_options(with_shortcuts(command)))


def hardware_option(default: str) -> Callable[[Command], Command]:
    choice = click.Choice(["profile", "detected"])
    text = "Plan for the card, or this machine."
    return click.option("--hardware", type=choice, default=default, show_default=True, help=text)


def world_size_option(command: Command) -> Command:
    kind = click.IntRange(min=1)
    return click.option(
        "--world-size", type=kind, default=1, show_default=True, help="Number of processes (ranks), one a device."
    )(command)


def format_option(command: Command) -> Command:
    return click.option("--format", "format_", type=click.Choice(["table", "json"]), default="table", show_default=True)(command)


def lister(text: str, listed: Callable[[str], None]) -> click.Group:
    """A command that lists with `listed(format)`; "list" does so too, and further subcommands can be added."""

    def called(context: click.Context, format_: str) -> None:
        if context.invoked_subcommand is None:
            listed(format_)

    group = click.group(invoke_without_command=True, help=text)(format_option(click.pass_context(called)))
    group.command("list", help=f"{text.split(',')[0]}.")(format_option(listed))
    return group


def inference_options(command: Command) -> Command:
    """RUN, FILE, --set, --batch-size and --trust-remote-code of commands that use a trained model."""
    command = set_option("Override how the job reads FILE, such as data.text=COLUMN or data.encoding=cp1252")(
        trust_option(command)
    )
    command = click.option(
        "--batch-size", type=click.IntRange(min=1), help="Rows of a batch; default: those of the run's evaluation."
    )(command)
    command = click.argument("source", metavar="FILE")(command)
    return click.argument("run", metavar="RUN", type=click.Path(path_type=Path))(command)


def say(text: str, err: bool = False) -> None:
    """Print a text that may come from a file."""
    status_line.clear()
    click.echo(printable(text), err=err)


def warn(message: str) -> None:
    say(f"WARNING: {message}", err=True)


def say_json(found: Any, ensure_ascii: bool = True) -> None:
    """Print `found` as JSON."""
    status_line.clear()
    click.echo(json.dumps(found, indent=2, default=str, ensure_ascii=ensure_ascii))


def begin(
    profiles: Sequence[str], job: Path | None, assignments: Sequence[str], memory_limit: str | None = None, strict: bool = False
) -> Inputs:
    """The command's inputs, checked before torch is imported, which takes seconds. `strict` counts later."""
    status_line.show("reading job and profile")
    quiet_libraries()
    from hwopt.export.launcher_environment import refuse_odd_switches
    from hwopt.planning.inputs import Inputs, refuse_mistakes

    refuse_odd_switches(os.environ)
    inputs = Inputs()
    refuse_mistakes(inputs, profiles, job, assignments, memory_limit)
    announce_loading()
    return inputs


def announce_loading() -> None:
    """Say on standard error that torch is loaded next, which takes seconds. Several ranks say it once."""
    from hwopt.runs.rank_errors import LAUNCH_FOLDER

    rank, _ = rank_and_world(os.environ)
    if "torch" not in sys.modules and rank == 0 and LAUNCH_FOLDER not in os.environ:
        status_line.announce("loading torch")


def quiet_libraries() -> None:
    """Hide the libraries' own notes and warnings; errors still show."""
    import logging
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def quiet_transformers() -> None:
    """Turn off transformers' progress bars, which no environment variable controls."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
