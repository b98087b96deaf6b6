"""Image classification, from a folder or a table of images to predictions."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from transformers import pipeline

from hwopt import api
from hwopt.cli import run_command
from hwopt.config.job import Job
from hwopt.errors import DataError, InputError
from hwopt.memory.forecast.lengths import lengths_of
from hwopt.memory.forecast.measured import measure
from hwopt.memory.forecast.planner import plan_memory
from hwopt.memory.shapes import Head, Shape
from hwopt.planning.plan import Plan
from hwopt.saving.reader import list_checkpoints
from hwopt.tasks.recognition import recognise
from hwopt.testing import (
    TINY_VIT,
    Recorder,
    plan_for,
    relative_error,
    rewound,
    saved_bits,
    tiny_job,
    tiny_profile,
    train_tiny,
    write_photos,
)

KIND = "image-classification"


def planned(folder: Path, data: dict[str, Any] | None = None, plugins: dict[str, Any] | None = None, **training: Any) -> Plan:
    return plan_for(tiny_profile(**(plugins or {})), tiny_job(folder / "data", KIND, data=data, **training))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on `../data/train`, with checkpoints of every second step."""
    folder = tmp_path_factory.mktemp("trained")
    plan = planned(folder, max_steps=8, save_steps=2, save_total_limit=0, learning_rate=5e-3)
    train_tiny(plan, folder)
    return folder / "run"


def test_folder_of_images_to_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that a user types."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWOPT_CACHE", str(tmp_path / "cache"))
    write_photos(Path("photos/train"), 60)
    write_photos(Path("photos/val"), 12, seed=1)
    assert run_command(["init", "photos", "--yes"]) == 0
    written = Path("job.toml").read_text()
    assert f'kind = "{KIND}"' in written
    assert 'eval_split = "val"' in written
    assert "max_length" not in written
    tiny = "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_VIT.items()) + " }"
    lines = [f"config = {tiny}" if line.startswith("config =") else line for line in written.splitlines()]
    Path("job.toml").write_text("\n".join(lines))
    assert run_command(["plan", "--sample", "1", "--profile", "cpu"]) == 0
    assert "pixels 3 x 16 x 16" in capsys.readouterr().out
    options = "--profile cpu --name first --set training.num_train_epochs=3 --set training.learning_rate=2e-3"
    assert run_command(["run", *options.split()]) == 0
    shown = capsys.readouterr().out
    assert "tokens/s" not in shown
    assert "images of one size need no padding" in shown
    assert run_command(["evaluate", "runs/first", "photos/val", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 12
    (tmp_path / "photos" / "val" / "light" / "broken.png").write_bytes(b"no image")
    assert run_command(["predict", "runs/first", "photos/val", "-o", "out.csv"]) == 0
    rows = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    right = [row["predicted_label"] == Path(row["image"]).parent.name for row in rows if "broken" not in row["image"]]
    assert (len(right), sum(right) / 12) == (12, pytest.approx(found["accuracy"]))
    assert next(row for row in rows if "broken" in row["image"])["predicted_label"] == ""
    assert re.search(r"is not an image that Pillow can read: \S*broken\.png", capsys.readouterr().out)


def test_predictions_are_those_of_the_pipeline(trained: Path, tmp_path: Path) -> None:
    photos = trained.parent / "data" / "eval"
    api.predict(trained, str(photos), tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = pipeline(KIND, model=str(trained / "final"), device="cpu")([str(photos / row["image"]) for row in rows])
    for row, (best, *_) in zip(rows, expected, strict=True):
        assert row["predicted_label"] == best["label"]
        assert row["predicted_probability"] == pytest.approx(best["score"], abs=1e-4)


def test_model_of_a_folder_takes_a_table_of_paths_and_a_folder_without_labels(trained: Path, tmp_path: Path) -> None:
    photos = sorted(write_photos(tmp_path / "photos", 4).rglob("*.png"))
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in photos]
    (tmp_path / "new.csv").write_text("path,label\n" + "\n".join(rows))
    assert api.predict(trained, str(tmp_path / "new.csv"), tmp_path / "out.csv").predicted == 4
    assert api.evaluate(trained, str(tmp_path / "new.csv")).samples == 4
    (tmp_path / "flat").mkdir()
    for path in photos:
        path.rename(tmp_path / "flat" / path.name)
    assert api.predict(trained, str(tmp_path / "flat"), tmp_path / "out.jsonl").predicted == 4


@pytest.mark.parametrize("form", ["paths", "embedded", "datasets"])
def test_table_of_images_trains_as_the_folder_does(form: str, trained: Path, tmp_path: Path) -> None:
    data = {}
    for part in ("train", "eval"):
        folder = trained.parent / "data" / part
        paths = sorted(folder.rglob("*.png"), key=lambda path: path.relative_to(folder))
        labels = [path.parent.name for path in paths]
        if form == "paths":
            source = folder / "table.csv"
            rows = [f"{path.relative_to(folder)},{label}" for path, label in zip(paths, labels, strict=True)]
            source.write_text("file,kind\n" + "\n".join(rows))
        elif form == "embedded":
            source = tmp_path / f"{part}.parquet"
            pyarrow.parquet.write_table(pa.table({"file": [path.read_bytes() for path in paths], "kind": labels}), source)
        else:
            source = tmp_path / part
            features = datasets.Features({"file": datasets.Image(), "kind": datasets.Value("string")})
            cells = {"file": [{"bytes": path.read_bytes(), "path": None} for path in paths], "kind": labels}
            datasets.Dataset.from_dict(cells, features=features).save_to_disk(str(source))
        data[part] = str(source)
    plan = planned(tmp_path, {**data, "image": "file", "label": "kind"}, max_steps=8, learning_rate=5e-3)
    train_tiny(plan, tmp_path)
    if form == "paths":
        for part in ("train", "eval"):
            Path(data[part]).unlink()
    assert saved_bits(tmp_path / "run" / "final") == saved_bits(trained / "final")


def test_resumed_run_ends_with_the_same_bits(trained: Path, tmp_path: Path) -> None:
    """Augmentation is a function of the sample's place. 40 samples are five steps an epoch: step 4 resumes inside an epoch."""
    run = rewound(trained, tmp_path / "run", 4)
    assert list_checkpoints(run)[0].name == "checkpoint-4"
    plan = planned(trained.parent, max_steps=8, save_steps=2, save_total_limit=0, learning_rate=5e-3)
    api.execute(plan, run, Recorder(), cache=tmp_path / "cache", resume=True)
    assert saved_bits(run / "final") == saved_bits(trained / "final")


def test_workers_and_micro_batches_do_not_change_the_pixels(trained: Path, tmp_path: Path) -> None:
    plugins = {"dataloader": {"num_workers": 1}, "batch": {"train": 2, "gradient_accumulation_steps": 4}}
    plan = planned(tmp_path, plugins=plugins, max_steps=8, learning_rate=5e-3)
    train_tiny(plan, tmp_path)
    assert relative_error(weights(tmp_path / "run"), weights(trained)) < 1e-4


def test_class_weights_and_labels_are_those_of_classification(tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", KIND)
    tables = {**job.document.data, "task": {"kind": KIND, "class_weights": {"light": 3.0}}}
    plan = plan_for(tiny_profile(), type(job)(Job.model_validate(tables), job.document))
    recorder = train_tiny(plan, tmp_path)
    assert recorder.run.prepared.class_weights == (1.0, 3.0)
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["id2label"] == {"0": "dark", "1": "light"}
    assert "eval_f1_binary" in recorder.rows[-1]


def test_plugins_for_texts_say_that_they_do_not_apply(tmp_path: Path) -> None:
    tables = {name: {} for name in ("length_batching", "group_lengths", "pack", "fused_loss", "compile")}
    entries = {entry.name: entry for entry in planned(tmp_path, plugins=tables).entries}
    for name in ("length_batching", "group_lengths", "pack"):
        assert (entries[name].decision, entries[name].reason) == ("skip", "images of one size need no padding")
    assert entries["fused_loss"].decision == "skip"
    if entries["compile"].decision == "apply":  # without a C++ compiler it is skipped
        assert entries["compile"].reason.endswith("images of one size")
    assert planned(tmp_path, plugins=tables).batch.widths == ()


@pytest.mark.filterwarnings("ignore")
def test_memory_forecast_is_that_of_a_real_step(tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", KIND)
    plan = plan_for(tiny_profile(batch={"train": 8, "gradient_accumulation_steps": 1}), job)
    memory = plan_memory(plan, tmp_path / "cache", lengths_of(plan, tmp_path / "cache"))
    assert memory.tier == "traced", memory.note
    assert memory.largest_max_length is None
    assert memory.peak_gib * 2**30 == pytest.approx(measure(plan, Shape(8, 1), Head(2)).train, rel=0.05, abs=8192)


def test_job_that_images_cannot_serve_is_refused(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 4)
    with pytest.raises(DataError, match="has no column 'picture'. It has: image, label"):
        train_tiny(planned(tmp_path, {"train": str(photos), "image": "picture"}), tmp_path)
    (photos / "light").rename(tmp_path / "other")
    with pytest.raises(DataError, match="every 'label' is 'dark'; classification needs at least two classes"):
        train_tiny(planned(tmp_path, {"train": str(photos)}), tmp_path)
    resnet = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
    with pytest.raises(InputError, match="is a BatchNorm2d, whose statistics depend on the split"):
        train_tiny(plan_for(tiny_profile(), tiny_job(tmp_path / "data", KIND, config=resnet)), tmp_path)
    with pytest.raises(InputError, match="transformers has no image-classification head for 'bert'"):
        plan_for(tiny_profile(), tiny_job(tmp_path / "data", KIND, config={"model_type": "bert"}))


def test_columns_of_images_are_recognised(tmp_path: Path) -> None:
    table = tmp_path / "train.csv"
    table.write_text(
        "id,path,species,text\n" + "".join(f"{n},a/{n}.jpg,{'cat' if n % 2 else 'dog'},word {n}\n" for n in range(40))
    )
    found = recognise(str(table))
    assert (found.kind, found.keys) == (KIND, {"image": "path", "label": "species"})
    assert recognise(str(table), "text-classification").kind == "text-classification"
    table.write_text("text,label\nred,a\nup,b\n")
    with pytest.raises(DataError, match="no column looks like images"):
        recognise(str(table), KIND)
