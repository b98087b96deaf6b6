"""Resolve a profile, a hardware and a job into a plan: the decisions, and the recipe that a run is built from.

Pure: looks at nothing but its arguments, so that a plan can be made, printed and compared on a laptop for a card that is
not there. Precedence: `--set`, the job, the profile, its parent, the plugin's default; each value keeps its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pydantic import ValidationError

from hwopt.config.job import Job, JobFile
from hwopt.config.job_training import Training
from hwopt.config.profile import Profile
from hwopt.errors import InputError, PluginError
from hwopt.hardware.detect import detect_host
from hwopt.hardware.device import Hardware, described
from hwopt.model.facts import ModelFacts
from hwopt.planning.decisions import decide, oom_plugins, with_applied
from hwopt.planning.parts import without, write
from hwopt.planning.plan import Plan
from hwopt.planning.refusals import refuse, refuse_changes
from hwopt.plugin import Context
from hwopt.plugin.batch_sizes import KEYS, BatchSizes
from hwopt.plugin.recipe import Recipe
from hwopt.plugin.registry import Registry
from hwopt.text import listing, nearest, truncate

SAME_THING = ({"warmup_ratio", "warmup_steps"}, {"max_steps", "num_train_epochs"})
"""Pairs of hyperparameters that express the same thing: setting one of a pair sets both."""
SMALLER = 0.9
"""A card with less than this fraction of the profile's memory counts as smaller."""


def resolve(
    profile: Profile,
    hardware: Hardware,
    job_file: JobFile,
    registry: Registry,
    model: ModelFacts,
    software: Mapping[str, str],
    *,
    world_size: int = 1,
    strict: bool = False,
    choices: Mapping[str, int] | None = None,
    lacking: Mapping[str, str] | None = None,
    tokens_per_sample: Callable[[], float | None] = lambda: None,
) -> Plan:
    """The plan: every plugin of the profile is probed in order, and those that apply write the recipe.

    `choices`: plugin -> index of the option to take if its probe offers several (`Decision.choose`); default: the first.
    `lacking`: field or key of the recipe that the training loop cannot take -> why; plugins that write it are skipped.
    `tokens_per_sample`: the function of the same name in `Context`.

    Raises InputError for unknown plugins and options (all at once), PluginError where plugins contradict each other or
    break, and, with `strict`, for every fallback and skip.
    """
    job = under_job(profile, job_file)
    refuse_long_samples(job, model, profile, job_file)
    card = profile.card_of(hardware)
    context = Context(hardware, software, model, job, world_size, card, lacking or {}, profile.chosen)
    context = replace(context, tokens_per_sample=tokens_per_sample)
    decisions = decide(profile, registry, context, choices or {})
    context = with_applied(context, decisions)
    helping = tuple(oom_plugins(profile, registry, context))
    written = write(decisions, context)
    recipe = written.recipe
    training = with_recipe(job.training, recipe)
    provenance = provenance_of(profile, job_file, recipe, training)
    notes = card_notes(profile, hardware)
    batch, lowered = batch_sizes(recipe, profile, context)
    plan = Plan(
        profile=profile,
        hardware=hardware,
        software=software,
        job=job,
        model=model,
        entries=written.entries,
        recipe=recipe,
        training=training,
        batch=batch,
        provenance=provenance,
        world_size=world_size,
        notes=(*notes, *lowered),
        job_name=job_file.document.name,
        oom_plugins=helping,
    )
    refuse(plan, written)
    if strict:
        refuse_changes(plan, notes)
    return plan


def left_out(plan: Plan, lacking: Mapping[str, str]) -> Plan:
    """`plan` without the plugins that write a field of `lacking` (field -> why)."""
    written = write(tuple(without(lacking, entry, plan.recipe) for entry in plan.entries), plan.context)
    batch, _ = batch_sizes(written.recipe, plan.profile, plan.context)
    return replace(plan, entries=written.entries, recipe=written.recipe, batch=batch)


def card_notes(profile: Profile, hardware: Hardware) -> tuple[str, ...]:
    """Notes for a machine that differs from the profile's card; capability and memory always come from the machine."""
    card = profile.card
    if hardware.source == "described" or card.compute_capability is None:
        return ()
    if hardware.device_type == "cpu":
        return (
            f"no CUDA device: profile {profile.name} is for {' / '.join(card.match) or 'a GPU'}, this runs on the CPU. "
            "Check `nvidia-smi` and that torch is a CUDA build; on Colab: Runtime > Change runtime type > GPU.",
        )
    if card.memory_gib and hardware.memory_gib < SMALLER * card.memory_gib:
        return (
            f"profile {profile.name} is for {card.memory_gib:g} GiB, {hardware.name} has {hardware.memory_gib:g}: "
            "the micro-batch gets smaller, the effective batch stays.",
        )
    return ()


def batch_sizes(recipe: Recipe, profile: Profile, context: Context) -> tuple[BatchSizes, tuple[str, ...]]:
    """The sizes that plugins wrote, and a note if this card is too small for them. Raises PluginError for a wrong one."""
    for key, value in recipe.batch.items():
        author = recipe.named(recipe.author_of(f"batch[{key!r}]"))
        if key not in KEYS:
            raise PluginError(f"{author}: recipe.batch has no key {key!r}.{nearest(key, KEYS)} It has: {listing(KEYS)}")
        if key != "widths" and not (isinstance(value, int) and value > 0):
            raise PluginError(f"{author}: recipe.batch[{key!r}] is {truncate(value)}; expected a whole number above 0")
    sizes = BatchSizes.of(recipe.batch, context.world_size)
    hardware, memory = context.hardware, profile.card.memory_gib
    if memory is None or hardware.device_type != "cuda" or hardware.memory_gib >= SMALLER * memory:
        return sizes, ()
    lowered = BatchSizes.of(recipe.batch, context.world_size, hardware.memory_gib / memory)
    of_memory = f"{hardware.memory_gib:g} of {memory:g} GiB"
    return lowered, (f"micro-batch {sizes.train} -> {lowered.train}, {of_memory}; {sizes.step} rows a step as before",)


def hardware_of_card(profile: Profile) -> Hardware:
    """The hardware of the profile's card with this machine's host, to plan for a card that is not installed."""
    host = detect_host()
    card = profile.card
    if card.capability is None and not card.amd:
        return host
    if card.memory_gib is None:
        raise InputError(f"{profile.document.name}: card.memory_gib is missing; add it to plan for this card")
    name = card.match[0] if card.match else profile.name
    return described(name, card.capability, card.memory_gib, host, card.multiprocessors, card.amd or "")


def under_job(profile: Profile, job_file: JobFile) -> Job:
    """The job with the profile's defaults under its own keys."""
    job, defaults = job_file.job, profile.content
    own = job.training.model_fields_set
    update = {
        key: getattr(defaults.training, key) for key in defaults.training.model_fields_set if not has_key(job.training, key)
    }
    training = Training.model_construct(own | set(update), **(job.training.model_dump() | update))
    data = job.data
    if data.max_length is None and defaults.data.max_length is not None:
        data = data.model_copy(update={"max_length": defaults.data.max_length})
    return job.model_copy(update={"training": training, "data": data})


def refuse_long_samples(job: Job, model: ModelFacts, profile: Profile, job_file: JobFile) -> None:
    """Raise InputError if data.max_length is more than the model accepts."""
    length, most = job.data.max_length, model.max_positions
    if length is None or most is None or length <= most:
        return
    own = job_file.job.data.max_length is not None
    place = job_file.place("data", "max_length") if own else profile.place("data", "max_length")
    raise InputError(
        f"{place}: data.max_length: {length:,} is more than the {most:,} tokens that {model.name} takes; set {most} or less"
    )


def has_key(training: Training, key: str) -> bool:
    """Whether the job or the profile sets `key`, or the other one of its pair."""
    same = next((pair for pair in SAME_THING if key in pair), {key})
    return bool(same & training.model_fields_set)


def with_recipe(training: Training, recipe: Recipe) -> Training:
    """`training` with what plugins wrote, as far as neither job nor profile sets it. Raises PluginError for a wrong value."""
    merged = training.model_copy(update={key: value for key, value in recipe.training.items() if not has_key(training, key)})
    try:
        Training.model_validate(merged.model_dump(exclude_none=True))
    except ValidationError as error:
        authors = ", ".join(sorted({recipe.named(recipe.author_of(f"training[{key!r}]")) for key in recipe.training}))
        raise PluginError(f"recipe.training of {authors}: {error.errors()[0]['msg']}") from error
    return merged


def provenance_of(profile: Profile, job_file: JobFile, recipe: Recipe, training: Training) -> dict[str, str]:
    found = {}
    for key in Training.model_fields:
        if key in job_file.job.training.model_fields_set:
            place = job_file.place("training", key)
        elif key in profile.content.training.model_fields_set:
            place = profile.place("training", key)
        elif key in recipe.training and getattr(training, key) == recipe.training[key]:
            place = recipe.author_of(f"training[{key!r}]")
        else:
            place = "default"
        found[f"training.{key}"] = place
    for table in ("model", "data", "task"):
        for key in sorted(getattr(job_file.job, table).model_fields_set):  # a set has another order in each process
            found[f"{table}.{key}"] = job_file.place(table, key)
    if job_file.job.data.max_length is None and profile.content.data.max_length is not None:
        found["data.max_length"] = profile.place("data", "max_length")
    return found
