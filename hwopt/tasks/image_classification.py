"""Classification of images, in a folder with one folder per class or in a table, with models such as ViT, Swin and ConvNeXt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.sources.columns import classes, label_columns, type_of
from hwopt.data.sources.image_folder import is_image
from hwopt.data.sources.rows import Rows, holds_text
from hwopt.data.sources.tables import find_column
from hwopt.data.stores.images import ImageStore, ImageTransform, channels_of, image_store, load_processor, new_processor
from hwopt.errors import DataError
from hwopt.tasks.classification import Classification
from hwopt.tasks.generators import Generation
from hwopt.tasks.model_families import IMAGE_FAMILY, ModelFamily
from hwopt.tasks.predictors import ImagePredictor, TextPredictor
from hwopt.tasks.preparation import report_left_out
from hwopt.tasks.prepared import Prepared, Samples, Trained
from hwopt.tasks.preview import Shown, Span
from hwopt.tasks.recognition import Recognised

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from hwopt.data.batches.collate import Collate

NAMES = ("image", "img", "file_name", "filename", "file", "path", "image_path")
"""Names of a column with images, as data sets of the hub use them."""


class ImageClassification(Classification):
    facts = TaskFacts(
        "image-classification",
        "AutoModelForImageClassification",
        inputs="images",
        adapter="FEATURE_EXTRACTION",
        keys=frozenset({"data.image", "data.augmentation", "task.class_weights"}),
    )
    pipeline_tag: ClassVar[str] = "image-classification"
    models: ClassVar[ModelFamily] = IMAGE_FAMILY
    _shape: tuple[int, int, int] | None = None  # of a placeholder, made once

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """A column with images, or with the names of image files, beside a column of classes."""
        image = image_column(table)
        if image is None:
            return "no column looks like images for image-classification; name it in the job with data.image"
        others = table.select([name for name in table.column_names if name not in (image, *fields_of(image))])
        label = next(iter(label_columns(others, named=not chosen)), None)
        if label is None:
            return "no column looks like a label for image-classification; name it in the job with data.label"
        why = f"column {image!r} holds images, column {label!r} has {classes(table, label):,} values"
        return Recognised({"image": image, "label": label}, (), why, rank=4)

    def samples(self, rows: Rows, job: Job) -> Samples:
        images = read_images(rows, image_name(rows, job))
        return Samples.of(rows, [images], self.read_labels(rows, job))

    def named_tokenizer(self, job: Job, config: PretrainedConfig) -> Any:
        """The model's own image processor, or the default one of the architecture. Raises InputError for one of another kind."""
        plain = transform_for(job, config)
        _ = plain.shape
        return plain.processor

    def store(self, samples: Samples, trained: Trained, cache: Path, seed: int | None = None) -> ImageStore:
        """The store of `samples`, augmented as the job says if there is a `seed`. Unreadable images become bad rows."""
        transform = ImageTransform(trained.tokenizer, channels_of(trained.config))
        if seed is not None:
            transform = replace(transform, augmentation=trained.job.data.augmentation, seed=seed)
        labels = self.label_array(samples.labels, trained.label_names)
        store = image_store(samples.columns[0], labels, transform, cache)
        report_left_out(store, samples)
        return store

    def read_inputs(self, rows: Rows, job: Job) -> list[Any]:
        return read_images(rows, image_name(rows, job))

    def predictor(self, trained: Trained, model: Any, generation: Generation) -> TextPredictor:
        return ImagePredictor(trained, model)

    def collate(self) -> type[Collate]:
        from hwopt.data.batches.collate import ImageCollate

        return ImageCollate

    def fit_model(self, model: Any, prepared: Prepared) -> None:
        """Do nothing: an image has no vocabulary."""

    def fit_config(self, config: PretrainedConfig, job: Job, prepared: Prepared) -> None:
        """Do nothing: an image has no vocabulary."""

    def load_processing(self, folder: str) -> Any:
        return load_processor(folder, key=folder)

    def placeholder(self, job: Job, config: PretrainedConfig, length: int, target: int | None = None) -> dict[str, NDArray[Any]]:
        import numpy as np

        self._shape = self._shape or transform_for(job, config).shape
        return {"pixel_values": np.zeros(self._shape, np.float32), "row_labels": np.zeros((), np.int64)}

    def show(self, prepared: Prepared, row: Mapping[str, NDArray[Any]]) -> Shown:
        """The size and the range of the pixels that the model sees, after the augmentation of the first epoch."""
        pixels = row["pixel_values"]
        size = " x ".join(map(str, pixels.shape))
        text = f"pixels {size} from {pixels.min():.2f} to {pixels.max():.2f}, mean {pixels.mean():.2f}"
        return Shown((Span(text, False),), self.label_text(prepared, row["row_labels"]))


def transform_for(job: Job, config: PretrainedConfig) -> ImageTransform:
    """What makes the model's input of an image: by the model's own processor, or by the default one of the architecture."""
    processor = new_processor(config) if job.model.name is None else load_processor(job.model.name, job.model.revision)
    return ImageTransform(processor, channels_of(config))


def image_name(rows: Rows, job: Job) -> str:
    """The column with the images: that of the job; of a job that names none, the first one with a usual name.

    The model may come from a folder of images, and the table to predict may name its column otherwise.
    """
    wanted = job.data.image
    usual = NAMES if wanted == type(job.data).model_fields["image"].default else ()
    return next((name for name in (wanted, *usual) if name in rows.table.column_names), wanted)


def image_column(table: pa.Table) -> str | None:
    """The column that holds images: in a struct of bytes and path, as bytes, or as names of image files; None without one.

    The fields of a struct are columns of `table`.
    """
    import pyarrow as pa

    columns: list[str] = table.column_names
    for name in sorted(columns, key=lambda each: (each.lower() not in NAMES, columns.index(each))):
        kind, whole = type_of(table, name), name.rpartition(".")[0]
        if {*fields_of(whole)} <= set(columns):
            return whole
        if pa.types.is_binary(kind) and name.lower() in NAMES:
            return name
        if holds_text(kind):
            values = [value for value in table[name].slice(0, 100).to_pylist() if value]
            if values and all(map(is_image, values)):
                return name
    return None


def fields_of(image: str) -> tuple[str, str]:
    """The columns with the fields of the feature Image of `datasets`, where fields are columns."""
    return f"{image}.bytes", f"{image}.path"


def full_path(name: str, source: str) -> str:
    """The path of the image `name`: relative ones start at the folder of the table's file, or at the folder of images."""
    return str((Path(source) if Path(source).is_dir() else Path(source).parent) / name)


def read_images(rows: Rows, name: str) -> list[str | bytes]:
    """The path or the bytes of each image; "" for rows without one, which are marked as bad.

    Raises DataError if the column is missing or holds something else.
    """
    import pyarrow as pa

    column = find_column(rows.table, name, rows.source, "data.image")
    kind = column.type
    if holds_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        found: list[Any] = column.to_pylist()
    elif pa.types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}:
        found = [None if value is None else value["bytes"] or value["path"] for value in column.to_pylist()]
    else:
        raise DataError(f"{rows.source}: column {name!r} holds {kind}, not images; choose another with data.image")
    for row, value in enumerate(found):
        if not value:
            rows.mark_bad(row, f"{name!r} has no image")
    places = rows.places
    return [full_path(value, places.source_of(row)) if isinstance(value, str) else value or "" for row, value in enumerate(found)]
