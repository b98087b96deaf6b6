"""Plan every shipped profile that states planned figures in a comment, and compare or rewrite the comment; a named one gets it.

    python benchmarks/profile_figures.py [PROFILE …] [--write] [--cache FOLDER]

Each profile is planned for its `tuned_for` model with padded rows on its own card. Needs no GPU, data or weights.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from pathlib import Path

from reference import BASELINES, reference_memory, reference_plan

from hwopt.config.profile_files import profile_files
from hwopt.planning.inputs import Inputs

FILES = {**profile_files(), **{path.stem: path for path in BASELINES.glob("*.toml")}}
FIGURES = re.compile(r"^# Planned, not measured.*$", re.MULTILINE)
NAMES = {"bert": "BERT-base", "gemma3_text": "Gemma 3 1B"}
"""Model type of the shipped profiles' configs -> name."""


def planned_figures(profile: str, inputs: Inputs, cache: Path) -> str:
    """Return the comment with the planned figures of `profile`."""
    plan = reference_plan(profile, inputs, cache)
    memory = reference_memory(plan, cache)
    name = NAMES[plan.profile.content.tuned_for.config["model_type"]]
    fits = "" if memory.fits else ", which does not fit"
    return (
        f"# Planned, not measured (`hwopt plan`): {name}, {memory.rows} x {memory.width} tokens, takes {memory.highest_gib:.1f} "
        f"GiB{fits}; {memory.largest_train:,} rows would fit."
    )


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="*", help="default: all profiles with planned figures")
    parser.add_argument("--write", action="store_true", help="rewrite the comments")
    parser.add_argument("--cache", type=Path, help="folder for traces")
    options = parser.parse_args()
    if unknown := {*options.profiles} - FILES.keys():
        parser.error(f"no profile {', '.join(unknown)}: it needs a file in profiles/ or benchmarks/profiles")
    inputs = Inputs()
    with tempfile.TemporaryDirectory() as empty:
        for name, path in FILES.items():
            text = path.read_text(encoding="utf-8")
            if name in options.profiles and not FIGURES.search(text):
                text = text.replace("[plugins.batch]", "# Planned, not measured\n[plugins.batch]")
            stated = FIGURES.search(text)
            if stated is None or (options.profiles and name not in options.profiles):
                continue
            planned = planned_figures(name, inputs, options.cache or Path(empty))
            print(f"{name}: {'as stated' if planned == stated[0] else planned}", flush=True)
            if options.write:
                path.write_text(text.replace(stated[0], planned), encoding="utf-8")


if __name__ == "__main__":
    main()
