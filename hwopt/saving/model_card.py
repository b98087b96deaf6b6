"""The model card of a run, `final/README.md`. Of local files it has the names only: a card is made to be published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hwopt.config.job_sources import described
from hwopt.data.sources.location import has_glob
from hwopt.model.config import find_model_file
from hwopt.saving.savable_run import SavableRun
from hwopt.text import cut

LICENSE_KEYS = ("license", "license_name", "license_link")
TIMING = ("_runtime", "_samples_per_second")
MAX_CLASSES = 100  # classes of which the card has the metrics; a summary.json has those of all


def model_card(run: SavableRun, summary: Mapping[str, Any], best_metrics: Mapping[str, float]) -> str:
    """The text of the card. `best_metrics`: those of the evaluation of the saved weights, empty without evaluation data."""
    from huggingface_hub import ModelCardData

    job, base = run.plan.job, base_license(run.plan.job.model)
    name = (run.training.hub_model_id or run.folder.name).rpartition("/")[2]
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=run.task.pipeline_tag,
        base_model=None if job.model.name is None or Path(job.model.name).exists() else job.model.name,
        tags=["hwopt"],
        **base,
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {plain(name)}",
        origin(run, base),
        loading(run),
        *section("Data", ("part", "source", "samples"), data_rows(run)),
        *section("Results", *results(best_metrics, summary)),
        *classes_section(summary),
        *section("Training", ("setting", "value"), training_rows(run)),
        *section("Versions", ("package", "version"), [("hwopt", version("hwopt")), *run.plan.software.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def base_license(model: Any) -> dict[str, Any]:
    """The license of the base model by the metadata of its card; {} if it is not known."""
    from huggingface_hub import metadata_load

    try:
        path = model.name and find_model_file(model.name, "README.md", model.revision)
        found = (path and metadata_load(Path(path))) or {}
    except Exception:  # no card, or one that is damaged: the hub client, YAML and the system each raise their own
        return {}
    return {key: found[key] for key in LICENSE_KEYS if isinstance(found.get(key), str)}


def shown_source(source: str) -> str:
    """`source`, of a local file or folder without the path."""
    local = Path(source).exists() or source.startswith((".", "/", "~")) or has_glob(source)
    return Path(source).name if local else source


def origin(run: SavableRun, base: Mapping[str, Any]) -> str:
    """Sentences that say which model was trained, for what, with which profile, and the license of its base model."""
    model = run.plan.job.model
    how = f"for {run.task.kind} with hwopt {version('hwopt')}, profile {code(run.plan.profile.name)}."
    if not model.name:
        return f"Trained from random weights: a {plain(model.label)} model {how}"
    license = plain(str(base.get("license", "unknown")))
    return f"Fine-tuned from {code(shown_source(model.name))} {how} License of the base model: {license}."


def loading(run: SavableRun) -> str:
    if not hasattr(run.skeleton, "save_pretrained"):
        return (
            "## Use\n\nThe class of this model has no `save_pretrained`: build the model in Python and load `model.safetensors` "
            "with `safetensors.torch.load_file`."
        )
    where = run.training.hub_model_id or "final"
    return f"## Use\n\n```python\n{run.task.usage(where)}\n```"


def data_rows(run: SavableRun) -> Iterator[tuple[str, str, str]]:
    """(part, source, number of samples) of the data."""
    data, prepared = run.plan.job.data, run.prepared
    held_out = f"{data.eval_fraction:g} of the training data" if data.eval_fraction is not None else data.eval or data.eval_split
    for part, source, store in (
        ("training", data.train, prepared.train),
        ("evaluation", held_out, prepared.eval),
        *((f"evaluation ({name})", data.more_eval[name], store) for name, store in prepared.more_eval.items()),
        ("test", data.test or data.test_split, prepared.test),
    ):
        if store is not None:
            yield part, described(source or "", shown_source), f"{len(store):,}"


def results(best_metrics: Mapping[str, float], summary: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """(columns, rows) of the metrics of the saved weights, on the evaluation data and on the test data if there are any."""
    found = {"evaluation": numbers("eval_", best_metrics), "test": numbers("test_", summary)}
    parts = {name: values for name, values in found.items() if values}
    rows = [(name, *(values.get(name, "") for values in parts.values())) for name in found["evaluation"] | found["test"]]
    return ["metric", *parts], rows


def numbers(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of `values` that begin with `prefix`, without it and without timing, as texts."""
    return {
        name.removeprefix(prefix): f"{value:.4f}"
        for name, value in values.items()
        if name.startswith(prefix) and isinstance(value, int | float) and not name.endswith(TIMING)
    }


def classes_section(summary: Mapping[str, Any]) -> list[str]:
    """The metrics of each class on the test data, else on the evaluation data."""
    prefix = "test_" if "test_classes" in summary else "best_eval_"
    classes = summary.get(f"{prefix}classes", [])
    if not 0 < len(classes) <= MAX_CLASSES:
        return []
    names = ("precision", "recall", "f1")
    rows = [(each["label"], *(f"{each[name]:.4f}" for name in names), f"{each['support']:,}") for each in classes]
    return section(f"Classes ({'test' if prefix == 'test_' else 'evaluation'})", ("label", *names, "support"), rows)


def training_rows(run: SavableRun) -> Iterator[tuple[str, str]]:
    """(setting, value) of the training: those that differ from the default, and what describes the run."""
    yield "steps", f"{run.step:,}"
    yield "rows per step", f"{run.batch.step:,}"
    yield "device", f"{run.world_size} x {run.plan.hardware.name}"
    yield "plugins", ", ".join(entry.name for entry in run.plan.applied())
    for key, value in run.plan.job.task.loss_changes.items():
        yield key, str(value)
    own = {"push_to_hub", "hub_model_id", "hub_private_repo", "max_steps"}
    for key, value in run.training.model_dump(mode="json", exclude_defaults=True, exclude_none=True, exclude=own).items():
        yield key, str(value)


def section(title: str, columns: Sequence[str], rows: Any) -> list[str]:
    """A heading with a table below it; nothing without rows."""
    lines = ["| " + " | ".join(map(plain, row)) + " |" for row in rows]
    head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return [f"## {title}", "\n".join([*head, *lines])] if lines else []


def code(text: str) -> str:
    """`text` on one line as code of Markdown, in which a backslash escapes nothing."""
    line = " ".join(cut(text, 200).split())
    return f"`{line}`" if "`" not in line else plain(line)


def plain(text: str) -> str:
    """`text` as one line that Markdown does not read as markup."""
    line = " ".join(cut(text, 200).split())
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|" else letter for letter in line)
