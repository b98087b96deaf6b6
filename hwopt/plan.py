"""plan: a profile, a hardware and a job resolved into decisions, and into the recipe that a run is built from.

Pure: looks at nothing but its arguments, so that a plan can be made, printed and compared on a laptop for a card that is
not there. Whose value wins: `--set`, the job, the profile, its parent, the plugin's default; each keeps its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hwopt.blame import blaming
from hwopt.errors import InputError, PluginError, Problems, listing, nearest, shorten
from hwopt.hardware import Hardware, described, detect_host
from hwopt.job import Job, JobFile, Training
from hwopt.model_facts import ModelFacts
from hwopt.plugin import Context, Decision, Plugin, PluginOptions
from hwopt.precedence import has_key, provenance_of, under_job
from hwopt.profile import Profile
from hwopt.recipe import Recipe
from hwopt.registry import Registry
from hwopt.toml_files import validate

if TYPE_CHECKING:  # for an annotation only: it stands to the right of this module
    from hwopt.memory.planner import MemoryPlan

DEMO = "the embedded demo"
"""The name of the job document that no file holds."""

DECISIONS = ("apply", "fallback", "skip", "choose")
BATCH_KEYS = ("train", "eval", "accumulation", "effective", "widths", "pad_to_multiple_of")

SMALLER = 0.9
"""A card with less than this part of the profile's memory counts as smaller."""


@dataclass(frozen=True)
class Entry:
    """What was decided for one plugin, and why."""

    plugin: Plugin
    distribution: str
    decision: str
    """apply, fallback or skip."""
    reason: str
    options: PluginOptions
    provenance: Mapping[str, str]
    """Option -> the file and line, `--set` or "default" that it came from."""
    place: str
    choices: int = 1
    """Among how many options `probe` left the choice to the planner."""

    @property
    def name(self) -> str:
        return self.plugin.name

    @property
    def author(self) -> str:
        return f"plugin {self.name!r} ({self.place})"

    @property
    def who(self) -> str:
        return f"{self.author} of {self.distribution}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "distribution": self.distribution,
            "stage": self.plugin.stage.name,
            "preserves": self.plugin.preserves,
            "decision": self.decision,
            "reason": self.reason,
            "options": self.options.model_dump(mode="json"),
            "provenance": dict(self.provenance),
        }


@dataclass(frozen=True)
class BatchSizes:
    """Rows per micro-batch and per optimizer step. `step` counts the rows of one step over all ranks."""

    train: int
    eval: int
    step: int
    widths: tuple[int, ...] = ()
    """Fixed widths that micro-batches are padded to; empty: the longest row's."""
    pad_to_multiple_of: int = 1

    def accumulation(self, world_size: int) -> int:
        return ceil(self.step / (self.train * world_size))


@dataclass(frozen=True)
class Plan:
    """Everything that was decided before anything was built."""

    profile: Profile
    hardware: Hardware
    software: Mapping[str, str]
    job: Job
    model: ModelFacts
    entries: tuple[Entry, ...]
    recipe: Recipe
    training: Training
    batch: BatchSizes
    provenance: Mapping[str, str]
    """Dotted key of the job or the training -> where its value came from."""
    world_size: int = 1
    notes: tuple[str, ...] = field(default=())
    job_name: str = ""
    """The file that the job came from."""
    memory: MemoryPlan | None = None
    """Where it was asked for."""
    rescuers: tuple[Plugin, ...] = ()
    """Plugins without a table in the profile that can still help a run that does not fit."""

    @property
    def is_demo(self) -> bool:
        return self.job_name == DEMO

    @property
    def chose(self) -> bool:
        """Whether a plugin left sizes to the planner, which a run then tries."""
        return any(entry.choices > 1 for entry in self.entries)

    @property
    def context(self) -> Context:
        """What its plugins were asked with."""
        return Context(self.hardware, self.software, self.model, self.job, self.world_size)

    @property
    def machine(self) -> list[Any]:
        """What a choice of sizes depends on."""
        return [self.hardware.name, self.hardware.memory_gib, self.hardware.memory_limit_gib, self.world_size]

    def decided(self) -> dict[str, Any]:
        """What plugins left to the planner and the planner has chosen: a run that goes on does not choose again."""
        return {entry.name: entry.options.model_dump(mode="json") for entry in self.entries if entry.choices > 1}

    def applied(self) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.decision != "skip")

    def to_dict(self) -> dict[str, Any]:
        """What `plan.json` and `hwopt plan --format json` hold."""
        return {
            "profile": self.profile.name,
            "hardware": asdict(self.hardware),
            "software": dict(self.software),
            "model": asdict(self.model),
            "job": self.job.model_dump(mode="json", exclude={"training"}),
            "training": self.training.model_dump(mode="json"),
            "batch": asdict(self.batch) | {"accumulation": self.batch.accumulation(self.world_size)},
            "world_size": self.world_size,
            "plugins": [entry.to_dict() for entry in self.entries],
            **({} if self.memory is None else {"memory": self.memory.to_dict()}),
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
        }


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
) -> Plan:
    """Ask every plugin of the profile, in order, and let those that can write the recipe.

    `choices`: plugin -> which of the options to take, where its probe offers several (`Decision.choose`); else the first.

    Raises InputError for unknown plugins and options (all at once), PluginError where plugins contradict each other or
    break, and, with `strict`, for every fallback and skip.
    """
    job = under_job(profile, job_file)
    refuse_long_samples(job, model, profile, job_file)
    context = Context(hardware, software, model, job, world_size)
    entries = in_order(tuple(decide(profile, registry, context, choices or {})))
    refuse_conflicts(entries)
    recipe = write_recipe(entries, context)
    notes = card_notes(profile, hardware)
    if strict:
        refuse_compromises(entries, notes)
    training = job.training.model_copy(
        update={key: value for key, value in recipe.training.items() if not has_key(job.training, key)}
    )
    check_hyperparameters(recipe, training)
    batch, batch_note = batch_sizes(recipe, profile, hardware, world_size)
    return Plan(
        profile=profile,
        hardware=hardware,
        software=software,
        job=job,
        model=model,
        entries=entries,
        recipe=recipe,
        training=training,
        batch=batch,
        provenance=provenance_of(profile, job_file, recipe, training),
        world_size=world_size,
        notes=(*notes, *batch_note),
        job_name=job_file.document.name,
        rescuers=tuple(rescuers(profile, registry)),
    )


def rescuers(profile: Profile, registry: Registry) -> Iterator[Plugin]:
    """Only of those that the profile does not speak of: a table with `enabled = false` is an answer too."""
    for name in registry.names:
        with suppress(PluginError, ValidationError):  # broken, or without default options: no help, but nobody asked for it
            found = registry.plugin(name)
            if name not in profile.content.plugins and found.rescue is not Plugin.rescue:
                with blaming(f"plugin {name!r} of {registry.distribution(name)}", "its constructor"):
                    helper = found(found.Options())
                yield helper


def write_recipe(entries: tuple[Entry, ...], context: Context) -> Recipe:
    """What the plugins that are not skipped write, in their order; whoever needs a recipe of their own makes it anew."""
    recipe = Recipe()
    for entry in entries:
        if entry.decision != "skip":
            with recipe.written_by(entry.author, entry.distribution), asking(entry, "apply()", context):
                entry.plugin.apply(recipe, context)
    return recipe


def check_hyperparameters(recipe: Recipe, training: Training) -> None:
    """Raise PluginError for what a plugin wrote into `recipe.training` or `recipe.batch` and no run could use."""
    try:
        Training.model_validate(training.model_dump(exclude_none=True))
    except ValidationError as error:
        authors = ", ".join(sorted({recipe.named(recipe.author_of(f"training[{key!r}]")) for key in recipe.training}))
        raise PluginError(f"recipe.training of {authors}: {error.errors()[0]['msg']}") from error
    for key, value in recipe.batch.items():
        author = recipe.named(recipe.author_of(f"batch[{key!r}]"))
        if key not in BATCH_KEYS:
            near = nearest(key, BATCH_KEYS)
            raise PluginError(f"{author}: recipe.batch has no key {key!r}.{near} It has: {listing(BATCH_KEYS)}")
        if key != "widths" and not (isinstance(value, int) and value > 0):
            raise PluginError(f"{author}: recipe.batch[{key!r}] is {shorten(value)}; expected a whole number above 0")


def refuse_long_samples(job: Job, model: ModelFacts, profile: Profile, job_file: JobFile) -> None:
    """Raise InputError where data.max_length is more than the model takes."""
    length, most = job.data.max_length, model.max_positions
    if length is None or most is None or length <= most:
        return
    own = job_file.job.data.max_length is not None
    place = job_file.place("data", "max_length") if own else profile.place("data", "max_length")
    raise InputError(
        f"{place}: data.max_length: {length:,} is more than the {most:,} tokens that {model.name} takes; set {most} or less"
    )


def decide(profile: Profile, registry: Registry, context: Context, choices: Mapping[str, int]) -> Iterator[Entry]:
    problems = Problems()
    asked: list[tuple[type[Plugin], PluginOptions, str]] = []
    for name, table in profile.plugin_tables():
        key = ("plugins", name)
        try:
            plugin_class = registry.plugin(name, profile.place(*key))
        except InputError as error:
            problems.add(str(error))
            continue
        document = replace(profile.document, data={"plugins": {name: table}})
        with blaming(f"plugin {name!r} of {registry.distribution(name)}", "checking its options"):
            options: PluginOptions | None = validate(plugin_class.Options, document, key, problems)
        if options is not None:
            asked.append((plugin_class, options, profile.place(*key)))
    problems.raise_if_any()
    for plugin_class, options, place in asked:
        with blaming(f"plugin {plugin_class.name!r} of {registry.distribution(plugin_class.name)}", "its constructor"):
            plugin = plugin_class(options)
        yield entry_for(plugin, options, place, profile, registry, context, choices.get(plugin_class.name, 0))


def entry_for(
    plugin: Plugin, options: PluginOptions, place: str, profile: Profile, registry: Registry, context: Context, choice: int = 0
) -> Entry:
    entry = Entry(plugin, registry.distribution(plugin.name), "apply", "", options, {}, place)
    with asking(entry, "probe()", context):
        decision = plugin.probe(context)
        check_decision(decision, type(plugin).Options)
        if decision.kind in ("fallback", "choose"):
            plugin = type(plugin)(decision.options[choice])
    provenance = {
        key: profile.place("plugins", plugin.name, key) if key in options.model_fields_set else "default"
        for key in type(options).model_fields
    }
    for key in type(options).model_fields:
        if getattr(plugin.options, key) != getattr(options, key):
            provenance[key] = f"decided here, instead of {getattr(options, key)!r} ({provenance[key]})"
    kind = "apply" if decision.kind == "choose" else decision.kind
    return replace(
        entry,
        plugin=plugin,
        decision=kind,
        reason=decision.reason,
        options=plugin.options,
        provenance=provenance,
        choices=len(decision.options) if decision.kind == "choose" else 1,
    )


def check_decision(decision: object, options: type[PluginOptions]) -> None:
    """Raise PluginError for an answer of `probe` that is none."""
    if not isinstance(decision, Decision) or decision.kind not in DECISIONS:
        raise PluginError(f"probe() returned {shorten(decision)} instead of a Decision")
    if not isinstance(decision.reason, str):
        raise PluginError(f"probe() gave {shorten(decision.reason)} as a reason instead of a text")
    if decision.kind in ("fallback", "choose") and not decision.options:
        raise PluginError(f"probe() decided to {decision.kind}, and gave no options")
    if wrong := [given for given in decision.options if not isinstance(given, options)]:
        raise PluginError(f"probe() gave {shorten(wrong[0])} as options instead of {options.__qualname__}")


@contextmanager
def asking(entry: Entry, hook: str, context: Context | None = None) -> Iterator[None]:
    """Around a plugin's hook: what it raises becomes a PluginError that names it and its distribution, what it prints goes to the
    standard error, and the job of `context` stays as it is."""
    before = context and context.job.model_dump()
    try:
        with blaming(entry.who, hook), redirect_stdout(sys.stderr):
            yield
    except PluginError as error:
        raise error if str(error).startswith(entry.who) else PluginError(f"{entry.who}: {error}") from error
    if context and context.job.model_dump() != before:
        raise PluginError(f"{entry.who}: {hook} changed the job; a plugin writes into the recipe and nothing else")


def in_order(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """By stage, then by the profile; raises PluginError where an `after` is contradicted by the profile's order."""
    ordered = sorted(entries, key=lambda entry: entry.plugin.stage)
    for entry in list(ordered):
        stage = [other for other in ordered if other.plugin.stage == entry.plugin.stage]
        # inherited tables keep their place: one of `--set`, or of the profile that extends theirs, could not stand before them
        followers = [other for other in stage if entry.name in other.plugin.after and not stands_below(entry, other)]
        if followers and ordered.index(followers[0]) < ordered.index(entry):
            ordered.remove(entry)
            ordered.insert(ordered.index(followers[0]), entry)
    for index, entry in enumerate(ordered):
        for later in ordered[index + 1 :]:
            same_stage = later.plugin.stage == entry.plugin.stage
            if same_stage and later.name in entry.plugin.after and "skip" not in (entry.decision, later.decision):
                raise PluginError(
                    f"plugin {entry.name!r} ({entry.place}) must come after {later.name!r} ({later.place}): "
                    f"move the table [plugins.{entry.name}] below [plugins.{later.name}]"
                )
    return tuple(ordered)


def stands_below(entry: Entry, other: Entry) -> bool:
    """Whether its table stands below the other's in one file."""
    (file, _, line), (other_file, _, other_line) = entry.place.rpartition(":"), other.place.rpartition(":")
    if not (file and file == other_file and line.isdigit() and other_line.isdigit()):
        return entry.place == other.place != "--set"  # no file to look at: as they were given
    return int(line) > int(other_line)


def refuse_conflicts(entries: tuple[Entry, ...]) -> None:
    """Raise PluginError, with both places, where a plugin in effect excludes another or lacks one that it needs."""
    problems = Problems()
    applied = {entry.name: entry for entry in entries if entry.decision != "skip"}
    skipped = {entry.name: entry for entry in entries if entry.decision == "skip"}
    for entry in applied.values():
        for name in entry.plugin.requires:
            if name in skipped:
                problems.add(f"{entry.author} needs {skipped[name].author}, which is skipped: {skipped[name].reason}")
            elif name not in applied:
                problems.add(f"{entry.author} needs the plugin {name!r}: add a table [plugins.{name}], or remove this one")
        for conflict in entry.plugin.conflicts:
            other = applied.get(conflict.other)
            if other is not None:
                with asking(entry, "conflicts"):
                    clash = conflict.when(entry.options, other.options)
                if clash:
                    problems.add(f"{entry.author} and {other.author} cannot be used together: {conflict.why}")
    problems.raise_if_any(PluginError)


def refuse_compromises(entries: tuple[Entry, ...], notes: tuple[str, ...]) -> None:
    problems = Problems()
    for entry in entries:
        if entry.decision != "apply":
            problems.add(f"--strict: {entry.author}: {entry.decision}: {entry.reason}")
    for note in notes:
        problems.add(f"--strict: {note}")
    problems.raise_if_any(PluginError)


def card_notes(profile: Profile, hardware: Hardware) -> tuple[str, ...]:
    """What to say where the machine is not the profile's card; capability and memory always come from the machine."""
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


def batch_sizes(recipe: Recipe, profile: Profile, hardware: Hardware, world_size: int) -> tuple[BatchSizes, tuple[str, ...]]:
    """Rows per micro-batch and step; without a plugin that says so, 8 and 16 as Hugging Face's Trainer."""
    train = int(recipe.batch.get("train", 8))
    evaluation = int(recipe.batch.get("eval", 2 * train))
    accumulation = int(recipe.batch.get("accumulation", 1))
    step = int(recipe.batch.get("effective", train * accumulation))
    notes: tuple[str, ...] = ()
    memory = profile.card.memory_gib
    smaller = memory and hardware.device_type == "cuda" and hardware.memory_gib < SMALLER * memory
    if smaller and memory:
        lowered = max(1, int(train * hardware.memory_gib / memory))
        notes = (f"micro-batch {train} -> {lowered}, {hardware.memory_gib:g} of {memory:g} GiB; {step} rows a step as before",)
        train, evaluation = lowered, max(1, int(evaluation * hardware.memory_gib / memory))
    per_rank = ceil(step / world_size)
    sizes = BatchSizes(
        train=min(train, per_rank),
        eval=evaluation,
        step=step,
        widths=tuple(recipe.batch.get("widths", ())),
        pad_to_multiple_of=int(recipe.batch.get("pad_to_multiple_of", 1)),
    )
    return sizes, notes


def hardware_of_card(profile: Profile) -> Hardware:
    """The profile's card in this machine, for plans of a card that is not there."""
    host = detect_host()
    card = profile.card
    if card.capability is None:
        return host
    if card.memory_gib is None:
        raise InputError(f"{profile.document.name}: card.memory_gib is missing, so that no plan can be made for this card")
    return described(card.match[0] if card.match else profile.name, card.capability, card.memory_gib, host)
