"""Workers follow the cores, pinning needs CUDA, and a real DataLoader accepts the settings, also with spawn."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation
from torch.utils.data import DataLoader

from hwopt.hardware.device import described
from hwopt.plugin import Context, Recipe, verify
from hwopt_plugins.dataloader import Dataloader, cores_of_a_rank

T4 = described("T4", (7, 5), 16.0)
CPU = described("CPU", None, 32.0)


def context(hardware, world_size=1):
    return Context(hardware, {}, None, None, world_size)


def loader_settings(options):
    recipe = Recipe()
    Dataloader(options).apply(recipe, context(T4))
    return dict(recipe.loader)


def test_ranks_on_one_machine_share_its_cores():
    assert cores_of_a_rank(replace(T4, count=4, cpu_cores=8), world_size=4) == 2
    assert cores_of_a_rank(replace(T4, count=1, cpu_cores=8), world_size=4) == 8, "four machines"
    assert cores_of_a_rank(replace(T4, count=4, cpu_cores=2), world_size=4) == 1


@pytest.mark.parametrize(
    ("hardware", "options", "kind", "chosen", "why"),
    [
        (T4, {}, "apply", {"num_workers": 4, "pin_memory": True}, "4 workers for 8 cores"),
        (CPU, {}, "apply", {"num_workers": 4, "pin_memory": False}, "not pinned"),
        (replace(CPU, cpu_cores=2), {}, "apply", {"num_workers": 0}, "0 workers for 2 cores"),
        (replace(T4, cpu_cores=3), {}, "apply", {"num_workers": 2}, "2 workers for 3 cores"),
        (replace(T4, cpu_cores=2, source="detected"), {"num_workers": 8}, "fallback", {"num_workers": 2}, "a rank has 2"),
        # a fallback would fail `--strict` on a laptop, for a card that is in a machine with more cores
        (replace(T4, cpu_cores=2), {"num_workers": 8}, "apply", {"num_workers": 8}, "this machine does not have (2)"),
        (CPU, {"pin_memory": True}, "fallback", {"pin_memory": False}, "needs a CUDA device, found a CPU"),
        (
            replace(T4, system="Windows"),
            {"multiprocessing_context": "fork"},
            "fallback",
            {"multiprocessing_context": "spawn"},
            "Windows cannot start processes by 'fork'",
        ),
    ],
)
def test_decision_depends_on_cores_and_device(hardware, options, kind, chosen, why):
    decision = Dataloader(Dataloader.Options(**options)).probe(context(hardware))
    assert (decision.kind, why in decision.reason) == (kind, True), decision.reason
    assert chosen.items() <= vars(decision.options[0]).items()


def test_no_worker_settings_without_workers():
    assert loader_settings(Dataloader.Options(num_workers=0, pin_memory=False)) == {"num_workers": 0, "pin_memory": False}


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.integration)])
def test_real_loader_accepts_the_settings(start):
    options = Dataloader.Options(num_workers=1, pin_memory=False, prefetch_factor=3, multiprocessing_context=start)
    loader = DataLoader([1, 2, 3, 4], batch_size=2, **loader_settings(options))
    run = SimpleNamespace(train_loader=loader, last_step_batch=SimpleNamespace(pinned=False))
    assert verify(Dataloader(options), run).status == "inactive", "no worker is alive yet"
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4]]
    evidence = verify(Dataloader(options), run)
    assert evidence.status == "active"
    assert "1 alive" in evidence.seen
    loader._iterator._shutdown_workers()
    assert verify(Dataloader(options), run).status == "inactive"


def no_workers(patch):
    """torch's DataLoader ignores `num_workers`."""
    real = torch.utils.data.DataLoader.__init__

    def init(self, *args, num_workers=0, **kwargs):
        for key in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            kwargs.pop(key, None)
        real(self, *args, **kwargs)

    patch.setattr(torch.utils.data.DataLoader, "__init__", init)


def never_pinned(patch):
    """torch leaves tensors in pageable memory."""
    patch.setattr(torch.Tensor, "pin_memory", lambda self, *device: self)


PINNED = {"num_workers": 0, "pin_memory": True}
CASES = Cases(
    whole="torch ends a run in which a worker ended",
    mutations=(
        Mutation("the loader starts no workers", no_workers, "expected num_workers 1, found 0", {"num_workers": 1}),
        Mutation("memory is not pinned", never_pinned, "expected pinned True", PINNED, on_cuda=True),
    ),
)
