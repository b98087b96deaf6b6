"""Fake tensors use memory as CUDA's kernels do. The expected bytes are those of torch's CUDA allocator."""

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.nn import functional

from hwopt.hardware.device import Hardware, described
from hwopt.memory.shapes import Head, Shape
from hwopt.memory.trace import cuda_emulation as card
from hwopt.memory.trace.dry_run import dry_run_of, fake_recipe
from hwopt.memory.trace.timeline import ColumnSum, Scaled, Timeline, threads_per_multiprocessor, workspace_bytes
from hwopt.memory.trace.traced_step import fake_step_functions
from hwopt.memory.trace.tracer import second_shape
from hwopt.memory.trace.tracker import MemoryTracker, counts_of_sum
from hwopt.testing import TINY_BERT, TINY_LLAMA, plan_for, tiny_job, tiny_profile

MIB = 1 << 20
T4, H100 = described("a T4", (7, 5), 14.56), described("an H100", (9, 0), 79.2)


class Emulated:
    """Fake tensors of a card; `peak` returns the MiB that a function needs beyond what is allocated before it."""

    def __init__(self, hardware: Hardware) -> None:
        processors = hardware.multiprocessors, threads_per_multiprocessor(hardware)
        self.tracker = MemoryTracker(card.workspaces(hardware), card.allocation_granularity(hardware), processors)

    def peak(self, function: Callable[[], Any]) -> tuple[int, Any]:
        gc.collect()
        self.tracker.reset()
        before = self.tracker.timeline().peak().bytes
        result = function()
        return round((self.tracker.timeline().peak().bytes - before) / MIB), result


@pytest.fixture
def on_t4() -> Iterator[Emulated]:
    emulated = Emulated(T4)
    with card.emulated(T4), emulated.tracker:
        yield emulated


SOFTMAX = [
    (torch.float32, 4, 8),  # result; gradient and the product of gradient and output
    (torch.float16, 4, 6),  # one kernel from fp16 to fp32
    (torch.bfloat16, 8, 8),  # the input is copied to fp32 first, and so is its gradient
]


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize(("dtype", "forward", "backward"), SOFTMAX)
def test_softmax_in_fp32_needs_the_memory_of_the_cuda_kernel(
    on_t4: Emulated, dtype: torch.dtype, forward: int, backward: int
) -> None:
    scores = torch.zeros(1024, 1024, dtype=dtype).requires_grad_()
    found, probabilities = on_t4.peak(lambda: functional.softmax(scores, -1, dtype=torch.float32))
    assert found == forward
    gradient = torch.zeros_like(probabilities)
    assert on_t4.peak(lambda: torch.autograd.grad(probabilities, scores, gradient))[0] == backward


COLUMN_SUMS = [  # rows, columns, MiB of torch's reduction kernel on 46 multiprocessors of compute capability 8.6
    (8192, 2048, 35.0),
    (8192, 1024, 34.5),
    (8192, 512, 32.0),
    (1000, 512, 0.0),
]


@pytest.mark.parametrize(("rows", "columns", "mib"), COLUMN_SUMS)
def test_gradient_of_a_bias_needs_room_for_partial_sums(rows: int, columns: int, mib: float) -> None:
    hardware = described("NVIDIA GeForce RTX 3070", (8, 6), 8.0, multiprocessors=46)
    assert hardware.multiprocessors == 46
    summed = card.column_sum(torch.empty(rows, columns, device="meta"), [0])
    assert isinstance(summed, ColumnSum)
    assert workspace_bytes(*summed, hardware.multiprocessors, threads_per_multiprocessor(hardware)) == mib * MIB


OPERATIONS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "softmax": (lambda x: x.softmax(-1), 4),
    "sum": (lambda x: x.sum(-1), 0),
    "norm": (torch.linalg.vector_norm, 0),
    "cumsum": (lambda x: x.cumsum(-1), 8),
    "exp": (torch.exp, 8),
    "cross entropy": (lambda x: functional.cross_entropy(x, torch.zeros(1024, dtype=torch.long)), 6),
}


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_converts_as_on_cuda(on_t4: Emulated, name: str) -> None:
    operation, expected = OPERATIONS[name]
    x = torch.zeros(1024, 1024, dtype=torch.float16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        found, result = on_t4.peak(lambda: operation(x))
    assert found == expected
    assert result.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_copy_of_a_layer_needs_the_memory_of_its_weights_only(on_t4: Emulated) -> None:
    """PEFT copies the layers of `modules_to_save`."""
    layer = torch.nn.Linear(1 << 10, 1 << 10, bias=False)
    peak, copied = on_t4.peak(lambda: copy.deepcopy(layer))
    assert peak == 4
    assert on_t4.tracker.number_of(copied.weight.t()) == on_t4.tracker.number_of(copied.weight)


@pytest.mark.filterwarnings("ignore")
def test_workspace_of_a_column_sum_grows_as_the_kernel_does(tmp_path: Path) -> None:
    """The trace of few rows is scaled to many, for which more blocks share a column; at last the card has no more threads."""
    hardware = described("NVIDIA GeForce RTX 3070", (8, 6), 8.0, multiprocessors=46)
    plan = plan_for(tiny_profile(), tiny_job(tmp_path, config=TINY_BERT | {"intermediate_size": 512}), hardware=hardware)

    def traced(rows: int) -> Timeline:
        with fake_step_functions(plan, Head(2), whole=True) as functions:
            return functions.train(Shape(rows, 64))

    small, other, large = (traced(rows) for rows in (8, 56, 1024))
    scaled = Scaled.fit(small, (8, 64, 1), other, (56, 64, 1))
    sums = large.column_sums[:, 0] > 0
    assert large.sizes[sums].max() == 34.5 * MIB
    assert scaled.at(1024, 64).sizes[sums].tolist() == large.sizes[sums].tolist()


@pytest.mark.filterwarnings("ignore")
def test_trace_of_an_encoder_decoder_is_scaled_in_its_targets(tmp_path: Path) -> None:
    """Rows, width and width of the targets have powers of their own, so a trace of short targets gives that of long ones."""
    plan = plan_for(tiny_profile(), tiny_job(tmp_path, "seq2seq-lm"), hardware=T4)
    small, other, asked = (8, 64, 16), second_shape(64, 16), (24, 48, 40)

    def traced(rows: int, width: int, target: int | None) -> Timeline:
        with fake_step_functions(plan, Head(2, target=16), whole=True) as functions:
            return functions.train(Shape(rows, width, target))

    scaled = Scaled.fit(traced(*small), small, traced(*other), (other.rows, other.width, other.target or 16))
    assert scaled.at(*asked).peak().bytes == pytest.approx(traced(*asked).peak().bytes, rel=0.01)
    assert scaled.at(*small[:2]).peak().bytes == scaled.base.peak().bytes, "targets as wide as traced"
    assert second_shape(8, 8) == Shape(56, 24), "T5 runs other operations for longer targets than 8"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hardware", [T4, H100], ids=["T4", "H100"])
def test_each_product_has_a_cublas_workspace(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 allocates it for the product and frees it."""
    monkeypatch.setattr(card, "TORCH", (2, 15))
    assert card.kept_workspaces(hardware) == []
    with Emulated(hardware).tracker as tracker:
        left, bias = torch.empty(256, 128), torch.empty(64)
        for product, size in (
            (lambda: left @ torch.empty(128, 64), card.cublas_workspace(hardware)),
            (lambda: torch.addmm(bias, left, torch.empty(128, 64)), 1 << 20),
        ):
            tracker.reset()
            product()
            assert max(tracker.sizes[tracker.before :]) == size


@pytest.mark.filterwarnings("ignore")
def test_every_thread_has_a_cublas_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.15 it allocates one for the thread of the forward pass and one for autograd's."""
    monkeypatch.setattr(card, "TORCH", (2, 14))
    for hardware, each in ((T4, 8519680), (H100, 32 << 20)):
        plan = plan_for(tiny_profile(), tiny_job(tmp_path), hardware=hardware)
        with fake_step_functions(plan, Head(2), whole=True) as functions:
            for step in (functions.train, functions.evaluate):
                assert sorted(step(Shape(2, 16)).sizes)[-2:] == [each, each]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
def test_traced_model_has_the_parameters_of_the_model_facts(tied: bool, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "causal-lm", config=TINY_LLAMA | {"tie_word_embeddings": tied})
    plan = plan_for(tiny_profile(), job)
    with dry_run_of(plan, fake_recipe(plan), Head(2), torch.device("cpu")) as run:
        assert sum(parameter.numel() for parameter in run.inner_model.parameters()) == plan.model.parameters


class FusedLoss(torch.autograd.Function):
    """Computes its gradients in the forward pass, as fused losses do."""

    @staticmethod
    def forward(context: Any, *inputs: Any, **_: Any) -> Any:
        hidden, weight = inputs
        context.gradients = torch.ones_like(hidden), torch.ones_like(weight)
        return hidden.sum()

    @staticmethod
    def backward(context: Any, *_: Any) -> Any:
        gradients, context.gradients = context.gradients, None
        return gradients


def tied_weights() -> None:
    weight = torch.zeros(100, 8, requires_grad=True)
    FusedLoss.apply(functional.embedding(torch.arange(5), weight), weight).backward()


def residual_stream() -> None:
    stream = torch.zeros(4, 8, requires_grad=True) * 2
    weight = torch.zeros(8, 8, requires_grad=True)
    for _ in range(3):
        stream = stream + torch.relu(stream @ weight)
    stream.sum().backward()


def gradient_that_is_kept() -> None:
    kept: list[Any] = []
    stream = torch.zeros(4, 8, requires_grad=True) * 2
    stream.register_hook(kept.append)
    first = stream * 3
    first.register_hook(kept.append)
    (first.exp() + stream.tanh()).sum().backward()


@pytest.fixture(params=[None, False], ids=["", "after torch.compile"])
def frame_evaluation(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch.compile's frame evaluation adds a reference to the arguments of every call of Python."""
    counts_of_sum()
    previous = set_eval_frame(request.param)
    yield
    set_eval_frame(previous)


@pytest.mark.usefixtures("frame_evaluation")
@pytest.mark.parametrize(("function", "sums"), [(tied_weights, 1), (residual_stream, 4), (gradient_that_is_kept, 1)])
def test_gradients_are_added_in_place_where_autograd_does_so(
    function: Callable[[], None], sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.profiler.profile(acc_events=True) as profile:
        function()
    reused: list[int] = []
    reuse = MemoryTracker._reuse
    monkeypatch.setattr(MemoryTracker, "_reuse", lambda self, *tensors: (reused.append(1), reuse(self, *tensors)))
    tracker = MemoryTracker()
    tracker.counts_of_sum = counts_of_sum()
    with tracker:
        function()
    in_place = sum(event.name == "aten::add_" for event in profile.events())
    assert (len(reused), in_place) == (sums, sums)
