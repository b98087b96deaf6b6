"""Set up the process for DeepSpeed: process group and environment variables. Restore both at the end of the run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """DeepSpeed's process group within the block. Without a launcher this process is the only rank."""
    import torch

    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed prints that it looked for a GPU
    from deepspeed.utils import logger

    single_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any port
    level, linear = logger.level, torch.nn.functional.linear
    logger.setLevel("ERROR")
    # Accelerate uses DeepSpeed only if the environment says so and does not ask for a CPU. It refuses a config beside the
    # settings of a launcher, although the plan has checked that they agree
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_DEEPSPEED": "true"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # DeepSpeed calls them
        os.environ.update({} if "RANK" in os.environ else single_rank)
        for name in ("ACCELERATE_USE_CPU", "ACCELERATE_CONFIG_DS_FIELDS"):
            os.environ.pop(name, None)
        if device_type == "cpu":  # gloo does not need DeepSpeed's own kernel, which takes 30 s to compile
            import deepspeed.ops

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        else:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            yield
        finally:
            logger.setLevel(level)
            torch.nn.functional.linear = linear  # stage 3 replaces it and never restores it
            end_process_group()


def end_process_group() -> None:
    """Destroy the process group, so that another run in this process can create its own."""
    import torch.distributed as dist
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None
    if dist.is_initialized():  # left by a run whose build failed
        dist.destroy_process_group()
