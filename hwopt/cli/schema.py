"""`hwopt schema`: the JSON Schema of a job or a profile, for editors."""

from __future__ import annotations

import json
from typing import Literal

import click


@click.command(help="Print the JSON Schema of a job or a profile, with the tables of the installed plugins, for editors.")
@click.argument("kind", type=click.Choice(["job", "profile"]))
def schema(kind: Literal["job", "profile"]) -> None:
    from hwopt.planning.schema import schema as made

    click.echo(json.dumps(made(kind), indent=2))
