"""Workers follow the cores, pinning needs CUDA, and a real DataLoader accepts the settings, also with spawn."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation
from torch.utils.data import DataLoader

from hwopt.hardware.device import described
from hwopt.plugin import Context, Recipe, verify
from hwopt_plugins.dataloader import Dataloader, auto_workers, cores_of_a_rank

T4 = described("T4", (7, 5), 16.0)
CPU = described("CPU", None, 32.0)


def context(hardware, world_size=1):
    return Context(hardware, {}, None, None, world_size)


def decided(hardware, world_size=1, **options):
    return Dataloader(Dataloader.Options(**options)).probe(context(hardware, world_size))


def loader_settings(options):
    recipe = Recipe()
    Dataloader(options).apply(recipe, context(T4))
    return dict(recipe.loader)


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 0), (3, 2), (4, 3), (5, 4), (64, 4)])
def test_auto_workers_follow_the_cores(cores, workers):
    assert auto_workers(cores) == workers


def test_ranks_on_one_machine_share_its_cores():
    assert cores_of_a_rank(replace(T4, count=4, cpu_cores=8), world_size=4) == 2
    assert cores_of_a_rank(replace(T4, count=1, cpu_cores=8), world_size=4) == 8, "four machines"
    assert cores_of_a_rank(replace(T4, count=4, cpu_cores=2), world_size=4) == 1


def test_auto_pins_memory_only_for_a_card():
    card, cpu = decided(T4), decided(CPU)
    assert (card.kind, card.options[0].num_workers, card.options[0].pin_memory) == ("apply", 4, True)
    assert (cpu.kind, cpu.options[0].num_workers, cpu.options[0].pin_memory) == ("apply", 4, False)
    assert "8 cores" in card.reason
    assert "0 workers for 2 cores" in decided(replace(CPU, cpu_cores=2)).reason


def test_workers_are_limited_to_the_cores():
    decision = decided(replace(T4, cpu_cores=2, source="detected"), num_workers=8)
    assert (decision.kind, decision.options[0].num_workers) == ("fallback", 2)
    assert "8 workers need 8 cores, a rank has 2" in decision.reason


def test_cores_of_this_machine_do_not_limit_a_plan_for_another():
    """A fallback would fail `--strict` on a laptop, for a card that is in a machine with more cores."""
    decision = decided(replace(T4, cpu_cores=2), num_workers=8)
    assert (decision.kind, decision.options[0].num_workers) == ("apply", 8)
    assert "they need 8 cores a process, which this machine does not have (2)" in decision.reason


def test_pinning_without_cuda_falls_back():
    decision = decided(CPU, num_workers=2, pin_memory=True)
    assert (decision.kind, decision.options[0].pin_memory) == ("fallback", False)
    assert "needs a CUDA device, found a CPU" in decision.reason


def test_fork_falls_back_to_spawn_on_windows():
    decision = decided(replace(T4, system="Windows"), num_workers=2, multiprocessing_context="fork")
    assert (decision.kind, decision.options[0].multiprocessing_context) == ("fallback", "spawn")


def test_no_worker_settings_without_workers():
    assert loader_settings(Dataloader.Options(num_workers=0, pin_memory=False)) == {"num_workers": 0, "pin_memory": False}


@pytest.mark.parametrize("start", ["fork", "spawn"])
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


def test_evidence_is_inactive_for_another_loader():
    run = SimpleNamespace(train_loader=DataLoader([1], num_workers=0), last_step_batch=SimpleNamespace(pinned=False))
    assert verify(Dataloader(Dataloader.Options(num_workers=2, pin_memory=False)), run).status == "inactive"
    assert verify(Dataloader(Dataloader.Options(num_workers=0, pin_memory=False)), run).status == "active"
    assert verify(Dataloader(Dataloader.Options(num_workers=0, pin_memory=True)), run).status == "inactive"


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
    mutations=(
        Mutation("the loader starts no workers", no_workers, "expected num_workers 1, found 0", {"num_workers": 1}),
        Mutation("memory is not pinned", never_pinned, "expected pinned True", PINNED, on_cuda=True),
    )
)
