"""Fixed widths, skips without a compiler, one real compilation, and a real compiler failure that ends in eager mode."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.utils
from plugin_cases import Cases, Mutation, Refused

from hwopt.hardware.device import described
from hwopt.model.facts import ModelFacts
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.training.evidence import observing
from hwopt_plugins.compile import WITHOUT_GRAPHS, Compile, compiler_limits

CPU = described("CPU", None, 32.0)
H100 = described("H100", (9, 0), 80.0)
OWN_WARNINGS = (
    pytest.mark.filterwarnings(  # warnings of torch about its own code: a deprecated import, and dynamo's access to `.grad`
        "ignore:.*torch.jit.script_method:DeprecationWarning",
        "ignore:The .grad attribute of a Tensor:UserWarning",
        "ignore::UserWarning:torch._dynamo",
    )
)


def context(hardware, max_length=128):
    facts = ModelFacts("tiny", "bert", "Bert", 10_000, 2, 32, 100, 512, False, True, True, True, 0.0)
    task = SimpleNamespace(kind="text-classification")
    job = SimpleNamespace(data=SimpleNamespace(max_length=max_length), task=task)
    return Context(hardware, {}, facts, job)


class Block(torch.nn.Module):
    def __init__(self, features=8):
        super().__init__()
        self.linear = torch.nn.Linear(features, 8)

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x)).sin()


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x):  # (batch, length, 8)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled_run(scope):
    torch.manual_seed(0)
    recipe = Recipe()
    plugin = Compile(Compile.Options(scope=scope, widths=(4, 8)))
    plugin.apply(recipe, context(CPU))
    warnings = []
    run = SimpleNamespace(inner_model=Tiny(), warn=warnings.append, warnings=warnings, observation=Observation({"aten::mm": 1}))
    return plugin, recipe, run


@pytest.mark.parametrize(
    ("hardware", "widths", "kind", "why"),
    [
        (CPU, "auto", "apply", "5 widths up to 192"),
        (CPU, (64, 192), "apply", "[64, 192]"),
        (CPU, (64, 96), "fallback", "samples can have 192 tokens, the largest of widths is 96; 192 added"),
        (replace(CPU, compiler=None), "auto", "skip", "needs a C++ compiler"),
        (described("P100", (6, 0), 16.0), "auto", "skip", "7.0 (Triton needs Volta), found compute capability 6.0"),
        (replace(H100, source="detected"), "auto", "skip", "triton is not installed"),
        (H100, "auto", "apply", "192"),  # a described card: its software is unknown
    ],
)
def test_decision_depends_on_hardware_and_widths(hardware, widths, kind, why):
    decision = Compile(Compile.Options(widths=widths)).probe(context(hardware, max_length=192))
    assert (decision.kind, why in decision.reason) == (kind, True), decision.reason
    assert kind == "skip" or (decision.options or [Compile.Options(widths=widths)])[0].widths[-1] == 192


@pytest.mark.parametrize("mode", WITHOUT_GRAPHS)
def test_modes_with_cuda_graphs_are_used_without_graphs_on_a_card(mode):
    plugin = Compile(Compile.Options(mode=mode))
    decision = plugin.probe(context(H100))
    assert (decision.kind, decision.options[0].mode) == ("fallback", WITHOUT_GRAPHS[mode])
    assert decision.options[0].widths[-1] == 128
    assert "several micro-batches of a step would overwrite" in decision.reason
    assert plugin.probe(context(CPU)).options[0].mode == mode


@OWN_WARNINGS
def test_compiled_blocks_compute_the_same_and_share_a_graph():
    plugin, recipe, run = compiled_run("block")
    assert recipe.batch == {"widths": (4, 8)}
    assert verify(plugin, run).status == "inactive"
    samples = [torch.randn(rows, 4, 8) for rows in (2, 3, 5)]
    wanted = [run.inner_model(x).detach() for x in samples]
    with recipe.process[0]():
        recipe.prepared_steps[0](run)
        for x, y in zip(samples, wanted, strict=True):
            with observing(run):
                out = run.inner_model(x)
                torch.testing.assert_close(out.detach(), y)
                out.sum().backward()
    evidence = verify(plugin, run)
    assert evidence.status == "active", (evidence.seen, run.warnings)
    assert "3 module(s) compiled (Block)" in evidence.seen
    # two graphs for any number of rows: only the first block's input needs no gradient
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert run.warnings == []
    assert not any("_orig_mod" in name for name in run.inner_model.state_dict())


def test_a_run_is_compiled_after_runs_that_reached_the_limit():
    """Several runs in a process, as in a notebook: all blocks share the code of `Block.forward`."""
    from torch._dynamo.testing import CompileCounter

    graphs = CompileCounter()
    for _ in range(2):
        with compiler_limits(1), torch.no_grad():
            for features in range(1, 10):  # the limit is 8
                block = Block(features)
                block.compile(backend=graphs)
                block(torch.randn(3, features))
    assert graphs.frame_count > 8


@OWN_WARNINGS
def test_failing_compiler_falls_back_to_eager_with_a_warning():
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    plugin, recipe, run = compiled_run("model")
    x = torch.randn(2, 4, 8)
    wanted = run.inner_model(x).detach()
    with recipe.process[0](), fresh_cache(), config.patch({"cpp.cxx": ("false",)}):
        recipe.prepared_steps[0](run)
        out = run.inner_model(x)
        out.sum().backward()
    assert torch.equal(out, wanted), "the failing step continues in eager mode"
    assert len(run.warnings) == 1
    assert "InductorError" in run.warnings[0]
    assert verify(plugin, run).status == "inactive"


@pytest.mark.parametrize("eager", [(0,), (0, 2), (0, 1)])
def test_evidence_names_layers_that_became_eager(eager):
    run = compiled_run("block")[2]
    for number, block in enumerate(run.inner_model.blocks):
        block._compiled_call_impl = None if number in eager else block.forward
    run.observation = Observation({"## Call CompiledFxGraph": 3 - len(eager)})
    evidence = verify(Compile(Compile.Options(scope="block")), run)
    assert (evidence.status, f"{len(eager)} repeated layer(s) stayed eager: blocks.0" in evidence.seen) == ("inactive", True)


def never_compiled(patch):
    patch.setattr(torch, "compile", lambda function, **_: function)


def graphs_run_eagerly(patch):
    """inductor returns the graph as it is, without code of its own."""
    import torch._inductor.compile_fx

    def as_it_is(graph, inputs, **_):
        return graph.forward

    torch._dynamo.reset()  # forgets the code that is compiled already
    patch.setattr(torch._inductor.compile_fx, "compile_fx", as_it_is)


def half_of_a_layer_eager(patch):
    """dynamo leaves the MLP of every second layer out of the graphs."""
    from transformers.models.bert.modeling_bert import BertIntermediate

    real = BertIntermediate.forward
    left_out, numbers = torch._dynamo.disable(real), count()
    torch._dynamo.reset()
    init = BertIntermediate.__init__

    def make(self, config):
        init(self, config)
        self.left_out = next(numbers) % 2 == 0

    patch.setattr(BertIntermediate, "__init__", make)
    patch.setattr(BertIntermediate, "forward", lambda self, x: left_out(self, x) if self.left_out else real(self, x))


BLOCKS, NO_CALL = {"scope": "block", "widths": (32,)}, "0 call(s) of compiled graphs"
CASES = Cases(
    invalid=(({"widths": [64, 32]}, "must be positive and ascending"),),
    options=BLOCKS,
    whole="a test here makes some layers eager",
    writes=frozenset({"batch", "process", "prepared_steps"}),
    hardware=described("a card", (8, 6), 24.0),
    pretend=False,
    conflicts=(
        Refused("zero", '[plugins.compile]\nscope = "model"\n[plugins.zero]\nstage = 3', on_card=True),
        Refused("fsdp", '[plugins.compile]\nscope = "model"\n[plugins.fsdp]', on_card=True),
    ),
    mutations=(
        Mutation("torch.compile returns the function", never_compiled, NO_CALL, BLOCKS, compiles=True),
        Mutation("inductor compiles nothing", graphs_run_eagerly, NO_CALL, BLOCKS, compiles=True),
        Mutation(
            "a layer has an eager part", half_of_a_layer_eager, "1 of 2 compiled module(s) ran outside", BLOCKS, compiles=True
        ),
    ),
)
