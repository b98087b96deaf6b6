"""Device memory that earlier work of this process holds but does not need, as after a run in a notebook."""

from __future__ import annotations

import gc


def release_unused_memory() -> None:
    """Free the CUDA memory of garbage, and the blocks that torch's allocator keeps for later.

    A run that failed leaves its model in reference cycles. torch keeps freed blocks, and CUDA reports them as used.
    """
    import torch

    if torch.cuda.is_initialized() and any(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())):
        gc.collect()
        torch.cuda.empty_cache()
