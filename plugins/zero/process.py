"""The process as DeepSpeed wants it: a process group, environment variables; and everything put back behind it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """DeepSpeed's process group, with this process as its only rank where no launcher has started others."""
    import torch

    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it says on the screen that it looked for a GPU
    from deepspeed.utils import logger

    alone: dict[str, str | None] = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    level, linear = logger.level, torch.nn.functional.linear
    logger.setLevel("ERROR")
    with environment({} if "RANK" in os.environ else alone):
        if device_type == "cpu":  # gloo needs no kernel of DeepSpeed's own, which takes half a minute to compile
            import deepspeed.ops

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        else:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Accelerate knows DeepSpeed by the environment alone, forgets it where a CPU is asked for, and refuses a configuration
        # beside the settings of a launcher, which agree with the plan by now
        asked: dict[str, str | None] = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": None}
        with environment(asked | {"ACCELERATE_CONFIG_DS_FIELDS": None}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # DeepSpeed calls them
            try:
                yield
            finally:
                logger.setLevel(level)
                torch.nn.functional.linear = linear  # stage 3 puts its own there, for good
                end_process_group()


def end_process_group() -> None:
    """So that another run in this process can make its own."""
    import torch.distributed as dist
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None
    if dist.is_initialized():  # a run that was not built to its end
        dist.destroy_process_group()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def environment(values: dict[str, str | None]) -> Iterator[None]:
    """These environment variables (None: unset) inside the block."""
    before = {name: os.environ.get(name) for name in values}
    try:
        put_into_environment(values)
        yield
    finally:
        put_into_environment(before)


def put_into_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
