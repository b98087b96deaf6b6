"""The command line: one command per file, imported only when it is called. No decisions are made here.

Commands that must start fast use plain click; commands that import torch anyway use rich-click.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import keyword
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

import click
from click.exceptions import Exit, NoArgsIsHelpError

from hwopt.errors import StorageError
from hwopt.report.status_line import folded, status_line
from hwopt.system import garbage
from hwopt.text import cut, nearest, printable

COMMANDS = {
    "run": "Train: a card's profile, a job, and what you override.",
    "init": "Look at a data file and this machine, and write a job.toml.",
    "plan": "Show what `run` would do, also for a card that is not installed; a training sample.",
    "tune": "Measure settings of a profile in short trials, and write a profile with the fastest.",
    "evaluate": "Evaluate the model of a run on a file.",
    "predict": "Predict the rows of a file with the model of a run, or answer in the terminal.",
    "report": "Write an HTML file about a run, or several runs; with --watch, follow a run.",
    "bench": "Measure what a profile gains, plugin by plugin.",
    "compare": "Runs or profiles side by side: time, memory, quality, what differs.",
    "check": "Find mistakes in a profile, a job, or a configuration of another tool.",
    "import": "Turn a configuration of another tool into a profile and a job.",
    "export": "Write the plan as Accelerate's YAML or DeepSpeed's JSON.",
    "profiles": "List the profiles, or show one.",
    "plugins": "List the plugins, or show one with its options.",
    "doctor": "Check the machine, with the command that fixes each problem.",
}
FORMER = {"detect": "doctor --report", "preview": "plan --sample 1", "schema": "check --schema", "watch": "report --watch"}
"""Former command -> what to type instead."""
ENDINGS = {
    1: "error: this is a bug in hwopt or in a package that it uses; please report the lines above.",
    130: "interrupted",
    143: "terminated",
}
MOST_LINES, LONGEST_LINE = 12, 1_000


def command_called(name: str) -> click.Command:
    """The command `name`, from its module. A name that is a word of Python has "_" behind it there."""
    word = f"{name}_" if keyword.iskeyword(name) else name
    command: click.Command = getattr(importlib.import_module(f"hwopt.cli.{word}"), word)
    return command


class Commands(click.Group):
    """Lists the commands with their one-line help; imports a command when it is called."""

    typed: Sequence[str] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self.typed = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the pipe is closed, as in `hwopt plugins | head`
            throw_away(sys.stdout)
            return 0

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        if not self.typed or self.typed[0] in ("-h", "--help"):  # only listed
            return click.Command(name=name, short_help=COMMANDS[name], help=COMMANDS[name])
        return command_called(name)

    def resolve_command(self, context: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            instead = FORMER.get(args[0])
            hint = f" Type: hwopt {instead}" if instead else nearest(args[0], COMMANDS)
            raise click.UsageError(f"No such command {args[0][:60]!r}.{hint}", context)
        return super().resolve_command(context, args)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks; with every command.")
@click.version_option(None, "--version", package_name="hwopt", prog_name="hwopt")
def cli(debug: bool) -> None:
    """You say which card you have; hwopt makes the fine-tuning fit, makes it fast, and proves that every optimization is on.

    hwopt run --profile auto trains an embedded demo; hwopt run job.toml --profile rtx3070_8gb trains your job.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the code of docs/exit-codes.md."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a "?" for what the terminal's encoding lacks, instead of an error
    garbage.collect_seldom()
    code = run_command(list(sys.argv[1:] if arguments is None else arguments))
    kill_workers()
    sys.exit(last_words(code))


def last_words(code: int) -> int:
    """Flush the output and return the exit code. If Python's own flush at exit fails, it replaces the code with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            throw_away(stream)
        except OSError:
            throw_away(stream)
            code = code or StorageError.exit_code
    return code


def throw_away(stream: TextIO) -> None:
    """Send all further output of `stream` to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def kill_workers() -> None:
    """Kill remaining worker processes, for which Python would wait at exit."""
    if (multiprocessing := sys.modules.get("multiprocessing")) and (workers := multiprocessing.active_children()):
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
        for worker in workers:
            worker.kill()


def run_command(typed: list[str]) -> int:
    """Run `hwopt TYPED`, show what ended it, and return the exit code."""
    debug = "--debug" in typed  # with any command, anywhere
    try:
        try:
            arguments = [argument for argument in typed if argument != "--debug"]
            code = cli.main(arguments, prog_name="hwopt", standalone_mode=False, obj=typed)
        finally:
            status_line.clear()
        return code if isinstance(code, int) else 0
    except Exit as error:
        return int(error.exit_code)
    except NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            error = with_instead(error)
        text = folded(f"Error: {cut(printable(error.format_message()), LONGEST_LINE)}", sys.stderr).removeprefix("Error: ")
        object.__setattr__(error, "format_message", lambda: text)
        with contextlib.suppress(OSError):  # a full disk must not hide the exit code
            error.show()
        return error.exit_code
    except click.Abort as error:  # click's form of KeyboardInterrupt, which the terminal has shown as ^C
        from hwopt.runs.rank_errors import report_error

        message = str(error.__cause__ or "")
        if not report_error(130, message or ENDINGS[130]) and message:
            click.echo(folded(printable(message), sys.stderr), err=True)
        return 130
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            return 0  # shell completion ends so
        return show_error(error, debug)


def with_instead(error: click.NoSuchOption) -> click.ClickException:
    """`error`, with what to give instead of the unknown option if it is a key of the job or of a plugin."""
    from hwopt.cli.options import instead_of_option

    instead = instead_of_option(error.option_name)
    return click.UsageError(f"{error.message} Give {instead}.", error.ctx) if instead else error


def show_error(error: BaseException, debug: bool) -> int:
    """Show what ended the command, and return the exit code."""
    import traceback

    from hwopt.runs.rank_errors import report_error
    from hwopt.system import signals

    code = signals.exit_code(error)
    trace = "".join(traceback.format_exception(error)) if debug or code == 1 else ""
    message = printable(trace + (ENDINGS.get(code) or in_short(f"error: {error}")))
    if not report_error(code, message, secondhand=getattr(error, "secondhand", False)):
        with contextlib.suppress(OSError):
            click.echo(message if trace else folded(message, sys.stderr), err=True)
    return code


def in_short(message: str) -> str:
    """`message`, shortened to fit a screen; it may quote a long file or exception."""
    lines = [cut(line, LONGEST_LINE) for line in message.splitlines()]
    more = len(lines) - MOST_LINES
    return "\n".join(lines if more <= 0 else [*lines[: MOST_LINES - 1], f"… and {more + 1} more lines"])
