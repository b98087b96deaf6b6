"""Precedence: `--set`, the job, the profile, its parent, the plugin's default; and the place that each value came from."""

from __future__ import annotations

from pydantic import ValidationError

from hwopt.config.job import Job, JobFile
from hwopt.config.job_training import Training
from hwopt.config.profile import Profile
from hwopt.errors import InputError, PluginError
from hwopt.model.facts import ModelFacts
from hwopt.plugin.recipe import Recipe

SAME_THING = ({"warmup_ratio", "warmup_steps"}, {"max_steps", "num_train_epochs"})
"""Pairs of hyperparameters that express the same thing: setting one of a pair sets both."""


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
        for key in getattr(job_file.job, table).model_fields_set:
            found[f"{table}.{key}"] = job_file.place(table, key)
    if job_file.job.data.max_length is None and profile.content.data.max_length is not None:
        found["data.max_length"] = profile.place("data", "max_length")
    return found
