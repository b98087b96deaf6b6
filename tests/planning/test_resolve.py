"""Plans: order, precedence, conflicts, and the golden plans of the seeds' profiles (tests/golden, reviewed by hand).

`HWOPT_UPDATE_GOLDEN=1 pytest tests/planning/test_resolve.py` rewrites the golden plans; read the difference before you commit.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from applied import Applied
from golden_files import check_golden
from hypothesis import given
from hypothesis import strategies as st

from hwopt.config.job import JobFile, make_job
from hwopt.config.profile import Profile, load_profile, make_profile
from hwopt.config.profile_files import profile_files
from hwopt.config.task_kinds import task_facts
from hwopt.config.toml import Document
from hwopt.errors import InputError, PluginError
from hwopt.hardware.device import Hardware, described
from hwopt.model.facts import ModelFacts, model_facts
from hwopt.model.forward_cost import ForwardCost
from hwopt.planning.capabilities import BERT_BASE
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import resolve
from hwopt.plugin import Context, Decision, Plugin, PluginOptions, Recipe, Relations, Stage, Traits
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job

SIZES = (999_885_952, 26, 1152, 262_144, 32_768)
GEMMA = ModelFacts("gemma-3-1b", "gemma3_text", "Gemma3TextForSequenceClassification", *SIZES, True, True, True, True, 0.0)
HOST = Hardware("cpu", "a CPU", 32, 30, cpu_cores=16, cpu_memory_gib=32, cpu_features=("avx2",), compiler="g++")
CARDS = {
    "rtx3070": described("NVIDIA GeForce RTX 3070", (8, 6), 7.78, HOST, 46),
    "rtx3090": described("NVIDIA GeForce RTX 3090", (8, 6), 23.7, HOST, 82),
    "t4": described("Tesla T4", (7, 5), 14.56, HOST, 40),
    "v100": described("Tesla V100-SXM2-16GB", (7, 0), 15.75, HOST, 80),
    "a100": described("NVIDIA A100-SXM4-80GB", (8, 0), 79.15, HOST, 108),
    "h100": described("NVIDIA H100 80GB HBM3", (9, 0), 79.11, HOST, 132),
    "no_gpu": HOST,
}
SEEDS = [
    *("rtx3070_8gb", "rtx3070_8gb_batch16"),
    *("rtx3090_24gb", "rtx3090_24gb_max_perf", "rtx3090_24gb_experimental", "t4_16gb"),
]
SOFTWARE = dict.fromkeys(("torch", "accelerate", "transformers", "peft", "bitsandbytes", "triton"), "1.0")
GOLDEN = Path(__file__).parents[1] / "golden"


def job(**training: object) -> JobFile:
    return make_job(Document("job.toml", {"model": {"name": "some/model"}, "data": {"train": "t.csv"}, "training": training}))


def plan_of(profile: Profile, hardware: Hardware, facts: ModelFacts = BERT_BASE, **options: object) -> Plan:
    registry = options.pop("registry", None) or Registry()
    job_file = options.pop("job_file", None) or job()
    return resolve(profile, hardware, job_file, registry, facts, SOFTWARE, **options)


def golden_text(profile: str) -> str:
    lines, folder = [], f"{Path(profile_files()[profile]).parent}{os.sep}"
    facts = GEMMA if "3090" in profile else BERT_BASE
    for card, hardware in CARDS.items():
        plan = plan_of(load_profile(profile, profile_files()), hardware, facts)
        lines.append(f"## {profile} on {card}: {facts.architecture}")
        lines += [f"note: {note}" for note in plan.notes]
        sizes = plan.batch
        lines.append(
            f"batch: {sizes.step} = {sizes.train} x {sizes.accumulation(1)}, eval {sizes.eval_rows()}, "
            f"widths {list(sizes.widths)}"
        )
        for entry in plan.entries:
            # without defaults: a new option does not change the golden plans
            options = ", ".join(
                f"{key}={value}" for key, value in entry.options.model_dump(mode="json", exclude_defaults=True).items()
            )
            reason = entry.reason.replace(folder, "")
            lines.append(f"{entry.plugin.stage.name.lower()} {entry.name}: {entry.decision}: {reason} [{options}]")
        training = plan.training.model_dump(exclude_defaults=True)
        lines.append(
            "training: "
            + ", ".join(
                f"{key}={value} ({plan.provenance[f'training.{key}'].rsplit('/', 1)[-1]})" for key, value in training.items()
            )
        )
        lines.append("")
    return "\n".join(lines)


@pytest.mark.parametrize("profile", SEEDS)
def test_plans_match_the_golden_files(profile: str) -> None:
    check_golden(GOLDEN / f"{profile}.txt", golden_text(profile))


class One(Applied):
    """A plugin without effect. Tests derive from it."""

    name = "one"

    class Options(PluginOptions):
        value: int = 1


def registry_of(*plugins: type[Plugin]) -> Registry:
    registry = Registry([])
    for plugin in plugins:
        registry.add(plugin)
    return registry


def profile_of(*names: str, **tables: dict[str, object]) -> Profile:
    plugins = {name: {} for name in names} | tables
    lines = {("plugins", name): number for number, name in enumerate(plugins, 5)}
    return make_profile(Document("p.toml", {"name": "p", "plugins": plugins}, lines))


def variant(name: str, **content: object) -> type[Plugin]:
    return type(name.title(), (One,), {"name": name, **content})


@given(st.permutations(list(Stage)))
def test_order_is_by_stage_then_by_profile(stages: list[Stage]) -> None:
    plugins = [variant(f"p{number}", stage=stage) for number, stage in enumerate([*stages, *stages])]
    names = [plugin.name for plugin in plugins]
    plan = plan_of(profile_of(*names), HOST, registry=registry_of(*plugins))
    order = [(entry.plugin.stage, names.index(entry.name)) for entry in plan.entries]
    assert order == sorted(order)


def test_after_wins_over_the_order_of_the_profile() -> None:
    first, second = variant("first"), variant("second", relations=Relations(after=("first", "absent")))
    registry = registry_of(first, second, variant("third"))
    for names in (("second", "third", "first"), ("first", "second", "third")):
        plan = plan_of(profile_of(*names), HOST, registry=registry)
        assert [entry.name for entry in plan.entries] == ["first", "second", "third"]
    assert plan_of(profile_of("second"), HOST, registry=registry).entries


def test_two_plugins_on_one_slot_are_both_named() -> None:
    def take(self: Plugin, recipe: Recipe, context: Context) -> None:
        recipe.optimizer = len

    registry = registry_of(variant("a", apply=take), variant("b", apply=take))
    with pytest.raises(PluginError, match=r"recipe.optimizer.*'a' \(p.toml:5\).*'b' \(p.toml:6\)"):
        plan_of(profile_of("a", "b"), HOST, registry=registry)


def explode(*_: object) -> Decision:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize("hook", ["probe", "apply"])
def test_plugin_that_raises_is_named(hook: str) -> None:
    with pytest.raises(PluginError, match=r"'a' \(p.toml:5\) of this process.*ZeroDivisionError: boom"):
        plan_of(profile_of("a"), HOST, registry=registry_of(variant("a", **{hook: explode})))


def test_all_wrong_plugins_and_options_are_reported_at_once() -> None:
    profile = profile_of("oen", one={"valeu": 3}, two={"value": "3"})
    with pytest.raises(InputError) as caught:
        plan_of(profile, HOST, registry=registry_of(One, variant("two")))
    text = str(caught.value)
    assert "no plugin 'oen' is installed. Did you mean 'one'" in text
    assert "plugins.one.valeu: unknown key. Did you mean 'value'" in text
    assert "plugins.two.value" in text


def test_strict_makes_skips_and_fallbacks_errors() -> None:
    with pytest.raises(PluginError) as caught:
        plan_of(load_profile("rtx3070_8gb", profile_files()), Hardware("cpu", "a CPU", 8, 8, cpu_cores=8), strict=True)
    assert "tf32" in str(caught.value)
    assert "precision" in str(caught.value)
    assert "no CUDA device" in str(caught.value)


def test_strict_plan_for_another_machine_ignores_the_cores_of_this_one() -> None:
    """4 workers on a laptop with two cores: the card is in another machine."""
    laptop = described("NVIDIA GeForce RTX 3070", (8, 6), 7.78, replace(HOST, cpu_cores=2))
    plan = plan_of(load_profile("rtx3070_8gb", profile_files()), laptop, strict=True)
    loader = next(entry for entry in plan.entries if entry.name == "dataloader")
    assert loader.options.num_workers == 4
    assert "this machine does not have (2)" in loader.reason


def test_job_overrides_the_profile() -> None:
    profile = load_profile("rtx3070_8gb_batch16", profile_files())
    plan = plan_of(profile, CARDS["rtx3070"], job_file=job(learning_rate=1e-3, warmup_steps=7))
    assert plan.training.learning_rate == 1e-3
    assert plan.training.warmup_steps == 7
    assert plan.training.warmup_ratio is None, "warmup_steps of the job also removes warmup_ratio of the profile"
    assert plan.training.num_train_epochs == 5
    assert plan.provenance["training.num_train_epochs"].endswith(
        ":" + plan.provenance["training.num_train_epochs"].split(":")[-1]
    )
    assert "batch16" in plan.provenance["training.num_train_epochs"]
    assert plan.provenance["training.seed"] == "default"
    given = [key for key in plan.provenance if not key.startswith("training.")]
    assert given == ["model.name", "data.train"], "plan.json is the same in each process"


def test_smaller_card_lowers_only_the_micro_batch() -> None:
    profile = load_profile("rtx3090_24gb", profile_files())
    small = Hardware("cuda", "RTX A2000", 12, 11, compute_capability=(8, 6), cpu_cores=16)
    plan = plan_of(profile, small, GEMMA)
    asked = dict(profile.plugin_tables())["batch"]
    assert plan.batch.step == asked["train"] * asked.get("gradient_accumulation_steps", 1)
    assert plan.batch.train == asked["train"] // 2
    assert any("smaller" in note for note in plan.notes)
    big = Hardware("cuda", "A100", 80, 79, compute_capability=(8, 0), cpu_cores=16)
    assert plan_of(profile, big, GEMMA).batch.train == asked["train"]
    assert not plan_of(profile, big, GEMMA).notes


def test_command_line_table_is_sorted_by_stage(tmp_path: Path) -> None:
    """A table from `--set` has no position in the profile. Its stage puts the adapter before precision."""
    document = Document("a profile", {"name": "short", "plugins": {"precision": {}, "batch": {}}})
    profile = make_profile(document, ["plugins.adapter.always=true"])
    names = [entry.name for entry in plan_for(profile, tiny_job(tmp_path)).entries]
    assert names.index("adapter") < names.index("precision")


def test_facts_of_detect_are_those_of_bert_base() -> None:
    from transformers import BertConfig

    found, counted = model_facts(BertConfig(), task_facts("text-classification"), BERT_BASE.name), ForwardCost._fields
    for key in counted:  # other versions of torch and transformers run a few other operations
        assert getattr(found, key) == pytest.approx(getattr(BERT_BASE, key), rel=0.1), key
    assert replace(found, **{key: getattr(BERT_BASE, key) for key in counted}) == BERT_BASE


def test_context_of_the_probes_and_of_the_plan_have_the_same_card() -> None:
    seen: list[Context] = []

    def keep(self: Plugin, context: Context) -> Decision:
        seen.append(context)
        return Decision.apply("sees the card")

    profile = make_profile(Document("p.toml", {"name": "p", "card": {"match": ["RTX 3090"]}, "plugins": {"one": {}}}))
    registry = registry_of(variant("one", probe=keep))
    plans = [plan_of(profile, CARDS[card], registry=registry) for card in ("rtx3090", "t4", "no_gpu")]
    assert [context.card for context in seen] == [profile.card, None, None]
    assert [plan.context for plan in plans] == [replace(context, applied=frozenset({"one"})) for context in seen]


@pytest.mark.parametrize("freezes", [False, True])
def test_plugins_after_one_that_freezes_the_weights_know_it(freezes: bool) -> None:
    """Whatever its name is."""
    seen: list[bool] = []

    def keep(self: Plugin, context: Context) -> Decision:
        seen.append(context.model.frozen)
        return Decision.apply("sees the model")

    layers = variant("layers", stage=Stage.MODEL, traits=Traits(freezes=freezes))
    registry = registry_of(layers, variant("later", stage=Stage.DATA, probe=keep))
    plan = plan_of(profile_of("layers", "later"), HOST, registry=registry)
    assert (seen, plan.context.model.frozen) == ([freezes], freezes)
