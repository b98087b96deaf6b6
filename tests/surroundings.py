"""Sets the signals, variables, home, umask and standard input that the tests need.

A job in a shell's background ignores SIGINT, `nohup` ignores SIGHUP, a service has no home and a closed standard input, and
terminals and launchers export variables that change what hwopt prints and how it trains. SIGHUP stays as it is: hwopt does not
handle it, and the session needs `nohup` to survive its terminal.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
PREFIXES = ("ACCELERATE_", "FSDP_", "HF_", "HWOPT_", "LC_", "PYTHON", "TORCH", "TRANSFORMERS_", "XDG_")
"""Variables that begin so are removed, except those of `KEPT`."""
KEPT = ("HWOPT_FIGURES", "HWOPT_UPDATE_GOLDEN", "HWOPT_TEST_OUTPUT", "PYTHONPATH", "PYTHONHASHSEED")
NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("LANG", "LANGUAGE", "USE_TORCH_XLA"),
)
SET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # one test process runs per core
    "LC_ALL": "C.UTF-8",
    "TERM": "xterm",
    "TZ": "UTC",
}
ONEDNN = {"default": "SSE41", "avx2": "AVX2"}
"""ATEN_CPU_CAPABILITY -> ONEDNN_MAX_CPU_ISA. Attention in bf16 fails where a CPU with AMX hides AVX-512 from torch alone."""
DESCRIBED_MACHINE = Path(__file__).parent / "described_machine"
"""The folder of sitecustomize.py, which describes the machine in processes that the tests start."""


def environment(before: dict[str, str], home: str, on_card: bool = False) -> dict[str, str]:
    """The environment variables of the session, derived from those of the parent process. `on_card`: it uses CUDA devices."""
    removed = {name for name in before if name in NAMES or (name.startswith(PREFIXES) and name not in KEPT)}
    # DeepSpeed looks for programs on PATH, and fails at a folder of another user
    path = os.pathsep.join(folder for folder in before.get("PATH", os.defpath).split(os.pathsep) if os.access(folder, os.X_OK))
    python_path = os.pathsep.join([str(DESCRIBED_MACHINE), *filter(None, [before.get("PYTHONPATH")])])
    machine = {} if on_card else {"PYTHONPATH": python_path, "CUDA_VISIBLE_DEVICES": ""}
    hidden = {"ONEDNN_MAX_CPU_ISA": ONEDNN[isa]} if (isa := before.get("ATEN_CPU_CAPABILITY", "")) in ONEDNN else {}
    # torch.compile reuses code of other runs, which may be for other vector instructions (ATEN_CPU_CAPABILITY)
    own = {"HOME": home, "PATH": path, "TORCHINDUCTOR_CACHE_DIR": os.path.join(home, "inductor")}
    return {name: value for name, value in before.items() if name not in removed} | hidden | SET | own | machine


def open_standard_input() -> None:
    """Open /dev/null as descriptor 0 if it is closed. Otherwise the next opened file becomes the standard input of children."""
    try:
        os.fstat(0)
    except OSError:
        os.open(os.devnull, os.O_RDONLY)


@contextmanager
def prepared(on_card: bool = False) -> Iterator[None]:
    """A context in which this process and its children have the environment that the tests need (see `environment`)."""
    open_standard_input()
    before, mask = dict(os.environ), os.umask(0o022)
    handlers = {number: signal.getsignal(number) for number in HANDLERS}
    home = tempfile.mkdtemp(prefix="hwopt-tests-home-")
    restore(os.environ, environment(before, home, on_card))
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in handlers.items():
            signal.signal(number, earlier)
        restore(os.environ, before)
        os.umask(mask)
        with suppress(OSError):
            shutil.rmtree(home)


def restore(variables: os._Environ[str], wanted: dict[str, str]) -> None:
    """Change `variables` to `wanted` in place: child processes inherit the process environment."""
    for name in variables.keys() - wanted.keys():
        del variables[name]
    variables.update(wanted)
    if hasattr(time, "tzset"):
        time.tzset()
