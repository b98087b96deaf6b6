"""`hwopt export`: a plan as a file of Accelerate or DeepSpeed, as arguments of the Trainer or TRL, or as a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import rich_click as click

from hwopt.cli.options import begin, hardware_option, job_options, profile_option, read_files, say, world_size_option


@click.command(
    help="Write the plan for other tools: a file for `accelerate launch --config_file`, DeepSpeed's JSON, Python that makes "
    "TrainingArguments (trainer) or SFTConfig (trl), or a training script without hwopt whose losses equal those of `hwopt run`."
)
@job_options
@profile_option
@click.option("--to", "format_", type=click.Choice(["accelerate", "deepspeed", "trainer", "trl", "script"]), required=True)
@hardware_option("detected")
@world_size_option
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Number of machines (nodes).")
@click.option(
    "--deepspeed-config-file",
    metavar="FILE",
    help="With --to accelerate: point to this DeepSpeed JSON instead of listing its settings.",
)
@click.option("-o", "--output", type=Path, help="The file to write; default: the screen.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def export(
    profile: str,
    format_: Literal["accelerate", "deepspeed", "trainer", "trl", "script"],
    hardware: Literal["profile", "detected"],
    world_size: int,
    nodes: int,
    deepspeed_config_file: str | None,
    output: Path | None,
    force: bool,
    **asked: Any,
) -> None:
    inputs = begin([profile], **asked)
    from hwopt import api
    from hwopt.export import files
    from hwopt.memory.forecast.communication import Ranks
    from hwopt.system.paths import OR_FORCE, refuse_output, write_text

    ranks = Ranks(world_size, nodes)
    if output is not None:
        refuse_output(output, "--output", "" if force else OR_FORCE, read_files(asked["job"], profile, deepspeed_config_file))
    device = "detected" if profile == "auto" else hardware
    plan = api.resolve(profile, hardware=device, world_size=ranks.number, inputs=inputs, **asked)
    text = files.exported(plan, format_, ranks.nodes, deepspeed_config_file)
    for remark in files.remarks(plan):
        say(remark, err=True)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text, new=not force)
        say(f"written: {output}", err=True)
