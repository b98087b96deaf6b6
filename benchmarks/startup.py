"""Measure the CPU seconds of `hwopt --help`, `hwopt profiles` and `hwopt plugins list`.

python benchmarks/startup.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

LIMITS = {("--help",): 0.15, ("profiles",): 0.15, ("plugins", "list"): 0.25}


def cpu_seconds(command: list[str]) -> float:
    """The user and system seconds of `command`."""
    before = os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=9)
    rounds = arguments.parse_args().rounds
    program = shutil.which("hwopt", path=os.path.dirname(sys.executable)) or "hwopt"
    found = {}
    for words, limit in LIMITS.items():
        each = [cpu_seconds([program, *words]) for _ in range(rounds)]
        found[" ".join(words)] = {"median": round(statistics.median(each), 3), "min": min(each), "max": max(each), "limit": limit}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
