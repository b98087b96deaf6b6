"""Run a command on pretend CUDA cards. Builds the pretend NVIDIA libraries if they are missing or out of date.

python tests/pretend_cuda rtx3070 pytest tests/gpu             # a profile, or the part before "_"
python tests/pretend_cuda t4,t4 python script.py               # two cards
python tests/pretend_cuda "My GPU:8.6:8192" python script.py   # NAME:COMPUTE CAPABILITY:MIB[:MULTIPROCESSORS]
"""

import os
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(str(__doc__))
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from pretend_cuda.build import DownloadError, build, environment
    from pretend_cuda.cards import cards_of

    try:
        cards = cards_of(sys.argv[1])
        os.environ.update(environment(build(), cards))
    except ValueError as error:
        sys.exit(str(error))
    except DownloadError as error:
        print(error, file=sys.stderr)
        sys.exit(DownloadError.exit_code)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
