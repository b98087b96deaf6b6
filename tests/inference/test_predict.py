"""hwopt predict: any rows in, the same rows with predictions out."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from task_rows import write_jsonl
from transformers import pipeline

from hwopt import api
from hwopt.cli import run_command
from hwopt.data.sources.tables import read_rows
from hwopt.errors import DoesNotFitError, StorageError
from hwopt.inference import predict as predict_module
from hwopt.inference.output import free_names, replacing
from hwopt.inference.trained_model import find_run_model, load_trained_model
from hwopt.tasks.generators import Generation
from hwopt.tasks.predictors import TextPredictor
from hwopt.testing import write_samples


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_predictions_are_those_of_the_pipeline_in_the_order_of_the_input(classifier: Path, tmp_path: Path) -> None:
    source = write_samples(tmp_path / "in.jsonl", 70, seed=5)
    report = api.predict(classifier, str(source), tmp_path / "out.jsonl", batch_size=2)  # two windows
    found = rows_of(tmp_path / "out.jsonl")
    assert [{"text": row["text"], "label": row["label"]} for row in found] == rows_of(source)
    assert (report.rows, report.predicted, report.columns) == (70, 70, ("predicted_label", "predicted_probability"))
    expected = pipeline("text-classification", model=str(classifier / "final"), device="cpu")([row["text"] for row in found])
    for row, other in zip(found, expected, strict=True):
        assert row["predicted_probability"] == pytest.approx(other["score"], abs=0.01)  # bf16 against fp32
        assert row["predicted_label"] == other["label"] or other["score"] < 0.51


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_each_format_keeps_the_columns_and_adds_the_prediction(suffix: str, classifier: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text('id,text,note\n01,red one,"a, b"\n02,two up,ä\n')
    output = tmp_path / f"out.{suffix}"
    api.predict(classifier, str(source), output)
    if suffix == "csv":
        found = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    else:
        found = rows_of(output) if suffix == "jsonl" else pyarrow.parquet.read_table(output).to_pylist()
    assert list(found[0]) == ["id", "text", "note", "predicted_label", "predicted_probability"]
    assert [(row["id"], row["note"]) for row in found] == [("01", "a, b"), ("02", "ä")]
    assert all(row["predicted_label"] in ("colour", "other") for row in found)
    assert all(0.5 <= float(row["predicted_probability"]) <= 1 for row in found)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_lists_and_booleans_in_csv_are_json_in_the_columns_of_the_input_and_in_new_ones(tmp_path: Path) -> None:
    """So a typed boolean has the spelling of the predicted label."""
    table = pyarrow.table({"tokens": [["a", "ß"], ["c"]], "label": [True, None]})
    with replacing(tmp_path / "out.csv", {"predicted_tags": list}) as writer:
        writer.write(table, {"predicted_tags": [["O", "B-X"], None]}, {})
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()))
    assert rows == [
        {"tokens": '["a", "ß"]', "label": "true", "predicted_tags": '["O", "B-X"]'},
        {"tokens": '["c"]', "label": "", "predicted_tags": ""},
    ]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_bytes_are_in_parquet_only(tmp_path: Path, suffix: str, classifier: Path) -> None:
    source, image = tmp_path / "in.parquet", {"bytes": b"\x89PNG", "path": "a.png"}
    pyarrow.parquet.write_table(pyarrow.table({"text": ["red"], "image": [image], "raw": [b"\x89"]}), source)
    report = api.predict(classifier, str(source), output := tmp_path / f"out.{suffix}")
    (row,) = read_rows(str(output)).table.to_pylist()
    if suffix == "parquet":
        assert (row["image"], row["raw"], report.notes) == (image, b"\x89", ())
    else:
        assert (row["image"], row["raw"]) == (
            ('{"bytes": null, "path": "a.png"}', "") if suffix == "csv" else ({"bytes": None, "path": "a.png"}, None)
        )
        assert report.notes == (f"{output} lacks the bytes in 'image', 'raw', which only a parquet file can hold",)


def test_a_lone_carriage_return_in_a_cell_ends_no_row(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one\rtwo", "three\r\nfour", "five"]})
    with replacing(output := tmp_path / "out.csv", {"predicted_label": str}) as writer:
        writer.write(table, {"predicted_label": ["x\r", "y", None]}, {})
    assert read_rows(str(output)).table.to_pydict() == {**table.to_pydict(), "predicted_label": ["x\r", "y", ""]}
    assert output.read_bytes().endswith(b"five,\n")


def test_unusable_rows_stay_without_a_prediction_and_are_named(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"text": "red one"}, {"text": " "}, {"text": None, "x": [1, {"y": 2}]}, {"text": "up", "x": 3}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    assert run_command(["predict", str(classifier), str(source), "-o", str(tmp_path / "out.jsonl")]) == 0
    found = rows_of(tmp_path / "out.jsonl")
    assert [row["text"] for row in found] == ["red one", " ", None, "up"]
    assert [row["x"] for row in found] == [None, None, [1, {"y": 2}], 3]
    assert [row["predicted_label"] is None for row in found] == [False, True, True, False]
    said = capsys.readouterr().out
    assert f"no prediction: {source}:2: has no text" in said
    assert f"no prediction: {source}:3: 'text' has no value" in said
    assert f"not in the output: {source}:5: is not valid JSON" in said
    assert "4 rows, 2 with predicted_label, predicted_probability, 1 row left out" in said


def test_a_text_longer_than_the_model_is_truncated_only_if_the_job_says_so(classifier: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "red " * 100}, {"text": "one"}])
    assert api.predict(classifier, source, tmp_path / "cut.jsonl").predicted == 2  # data.max_length = 32
    run = shutil.copytree(classifier, tmp_path / "run")
    job = (run / "job.toml").read_text().replace("max_length = 32\n", "")
    (run / "job.toml").write_text(job)
    report = api.predict(run, source, tmp_path / "out.jsonl")
    (reason,) = report.without_prediction.values()
    assert list(report.without_prediction) == [f"{source}:1"]
    assert reason.endswith("tokens, more than the model's limit of 64 (data.max_length truncates)")
    assert api.predict(run, source, tmp_path / "set.jsonl", assignments=["data.max_length=20"]).predicted == 2


def test_new_columns_never_replace_a_column_of_the_input(classifier: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("text,predicted_label,predicted_label_2\nred,a,b\n")
    report = api.predict(classifier, str(source), tmp_path / "out.csv")
    (row,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert (row["predicted_label"], row["predicted_label_2"]) == ("a", "b")
    assert row["predicted_label_3"] in ("colour", "other")
    assert "'predicted_label_3' instead of 'predicted_label'" in report.notes[0]
    assert free_names(["a", "a_2"], ["a"]) == {"a": "a_2", "a_2": "a_2_2"}


def test_unnamed_columns_are_told_apart_by_their_places(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(",text,,\n1,red,,x\n")
    assert api.predict(classifier, str(tmp_path / "in.csv"), tmp_path / "out.jsonl").predicted == 1
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert list(row.items())[:4] == [("column 1", "1"), ("text", "red"), ("column 3", ""), ("column 4", "x")]


def test_final_copied_alone_predicts_as_the_run(classifier: Path, tmp_path: Path) -> None:
    source = write_samples(tmp_path / "in.jsonl", 5, seed=3)
    copied = shutil.copytree(classifier / "final", tmp_path / "copied")
    for name, model in (("run", classifier), ("copied", copied)):
        assert api.predict(model, str(source), tmp_path / f"{name}.jsonl").predicted == 5
    assert (tmp_path / "copied.jsonl").read_text() == (tmp_path / "run.jsonl").read_text()


def test_running_out_of_memory_halves_the_batch(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sizes, warnings = write_samples(tmp_path / "in.jsonl", 20, seed=3), [], []
    from hwopt.tasks.predictors import ClassPredictor

    whole = ClassPredictor.predict

    def limited(self: ClassPredictor, inputs: dict[str, torch.Tensor]) -> Any:
        if len(inputs["input_ids"]) > 3:
            raise torch.OutOfMemoryError("8 GiB")
        sizes.append(len(inputs["input_ids"]))
        return whole(self, inputs)

    monkeypatch.setattr(ClassPredictor, "predict", limited)
    report = api.predict(classifier, str(source), tmp_path / "out.jsonl", warn=warnings.append)
    assert (report.predicted, sum(sizes), sizes[:2]) == (20, 20, [2, 2])
    assert [line.split(":")[0] for line in warnings[:2]] == ["Inference ran out of memory in a batch of 8 rows"] * 2
    monkeypatch.setattr(ClassPredictor, "predict", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("8 GiB")))
    with pytest.raises(DoesNotFitError, match="not even row by row"):
        api.predict(classifier, str(source), tmp_path / "none.jsonl")
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize(("error", "code"), [(DoesNotFitError("A single row does not fit"), 7), (KeyboardInterrupt(), 130)])
def test_rows_that_are_done_stay_if_a_later_window_fails(
    error: BaseException,
    code: int,
    classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_samples(tmp_path / "in.jsonl", 10, seed=3)
    monkeypatch.setattr(TextPredictor, "window_batches", 1)
    windows = predict_module.predict_window

    def failing(*arguments: Any) -> Any:
        if arguments[-1].start == 8:
            raise error
        return windows(*arguments)

    monkeypatch.setattr(predict_module, "predict_window", failing)
    output = tmp_path / "out.jsonl"
    assert run_command(["predict", str(classifier), str(source), "-o", str(output), "--batch-size", "4"]) == code
    assert f". The rows until then are in {tmp_path / 'out.partial.jsonl'}\n" in capsys.readouterr().err
    assert len(rows_of(tmp_path / "out.partial.jsonl")) == 8
    assert not output.exists()


def test_inference_has_the_precision_and_attention_of_the_run(classifier: Path, tmp_path: Path) -> None:
    loaded = load_trained_model(find_run_model(classifier), tmp_path)
    assert (loaded.settings.dtype, loaded.model.config._attn_implementation) == ("bf16", "sdpa")
    with loaded.inference():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()


def test_generation_is_that_of_the_pipeline(generator: Path, tmp_path: Path) -> None:
    source = str(generator.parent / "eval.jsonl")
    report = api.predict(generator, source, tmp_path / "out.jsonl", generation={"max_new_tokens": 6}, batch_size=5)
    assert report.columns == ("generated_text",)
    found = rows_of(tmp_path / "out.jsonl")
    assert any(row["generated_text"] for row in found)
    generate = pipeline("text-generation", model=str(generator / "final"), device="cpu")
    for row in found[:6]:
        (other,) = generate(row["question"], max_new_tokens=6, max_length=None, do_sample=False, return_full_text=False)
        assert row["generated_text"] == other["generated_text"]


def test_sampling_repeats_with_the_same_seed(generator: Path, tmp_path: Path) -> None:
    source = str(generator.parent / "eval.jsonl")
    texts = []
    for seed in (1, 1, 2):
        options = {"max_new_tokens": 8, "do_sample": True, "temperature": 3.0, "seed": seed}
        api.predict(generator, source, tmp_path / "out.jsonl", generation=options, overwrite=True)
        texts.append([row["generated_text"] for row in rows_of(tmp_path / "out.jsonl")])
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_without_room_for_a_token_has_no_prediction(generator: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"question": "what is " * 80}, {"question": "what"}])
    report = api.predict(generator, source, tmp_path / "out.jsonl")
    (reason,) = report.without_prediction.values()
    assert "leaves no room to generate: the model's limit is 64" in reason
    assert Generation().max_new_tokens > 64  # limited by the model


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("{run} in.jsonl -o out.xlsx", 2, "unknown extension '.xlsx'; give a file that ends with .csv, .jsonl, .parquet"),
        ("{run} in.jsonl -o mine.csv", 2, "mine.csv: exists; give another name, or --overwrite"),
        ("{run} in.jsonl -o nowhere/out.csv", 6, "nowhere/out.csv: there is no folder 'nowhere'; make it"),
        ("{run} mine.csv -o mine.csv --overwrite", 2, "mine.csv: is a file that the command reads; give another name"),
        ("{run} m*e.csv -o link.csv --overwrite", 2, "link.csv: is a file that the command reads; give another name"),
        ("{run} out.partial.csv -o out.csv", 2, "first written as out.partial.csv: is a file that the command reads"),
        ("runs/nope in.jsonl -o out.csv", 2, "runs/nope: no such folder"),
        ("first in.jsonl -o out.csv", 2, "first: no such folder. Did you mean 'runs/first'?"),
        ("unfinished in.jsonl -o out.csv", 2, "the run is not finished: it has no final/. Finish it with `hwopt run --resume`"),
        ("{folder} in.jsonl -o out.csv", 2, "has no plan.json; give one of its runs: run"),
        ("runs in.jsonl -o out.csv", 2, "runs: is not a run folder: it has no plan.json"),
        ("no_config in.jsonl -o out.csv", 2, "has no config.json"),
        ("no_plan in.jsonl -o out.csv", 2, "no_plan: is not a run folder: it has no plan.json"),
        ("{run} im.jsonl -o out.csv", 4, "Did you mean 'in.jsonl'?"),
        ("{run} mine.csv -o out.csv", 4, "has no column 'text'. Did you mean 'texts'?"),
        ("{run} blank.csv -o out.csv", 4, "column 'text' is empty in every row"),
        ("{run} twice.csv -o out.csv", 4, "has 2 columns named 'x'"),
        ("{run} in.jsonl -o out.csv --max-new-tokens 3", 2, "which generates no text. Omit these options"),
        ("{run} in.jsonl -o out.csv --set training.seed=3", 2, "the model is trained; only keys of [data] can be set"),
        ("{run} in.jsonl -o out.csv --temperature 0.5", 2, "--temperature needs --do-sample"),
    ],
)
def test_bad_input_ends_with_one_message(
    arguments: str,
    code: int,
    expected: str,
    classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "in.jsonl", 3)
    for name, text in {"mine": "texts\nred\n", "blank": "text,label\n,a\n\x20,b\n", "twice": "text,x,x\nred,1,2\n"}.items():
        (tmp_path / f"{name}.csv").write_text(text)
    (tmp_path / "link.csv").symlink_to("mine.csv")
    (tmp_path / "out.partial.csv").write_text("text\nred\n")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "job.toml").touch()  # of the user, beside the folder of the runs
    for name, missing in {"unfinished": "final", "no_config": "config.json", "no_plan": "plan.json"}.items():
        shutil.copytree(classifier, name, ignore=shutil.ignore_patterns(missing))
    assert run_command(["predict", *arguments.format(run=classifier, folder=classifier.parent).split()]) == code
    message = capsys.readouterr().err
    assert expected in " ".join(message.split())
    assert "Traceback" not in message
    assert not (tmp_path / "out.csv").exists()
    assert (tmp_path / "mine.csv").read_text() == "texts\nred\n"


def test_set_reads_another_column_and_encoding(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes("body;x\nred ä;1\n".encode("cp1252"))
    settings = ["data.text=body", "data.encoding=cp1252"]
    api.predict(classifier, str(tmp_path / "in.csv"), tmp_path / "out.csv", assignments=settings)
    assert (tmp_path / "out.csv").read_text(encoding="utf-8").startswith("body,x,predicted_label,predicted_probability\nred ä,1,")


def test_a_full_disk_is_a_storage_error(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_samples(tmp_path / "in.jsonl", 3)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "out.csv").write_text("mine\n")
    monkeypatch.setattr("hwopt.inference.output.CsvWriter.write", full)
    with pytest.raises(StorageError, match="No space left on device"):
        api.predict(classifier, str(source), tmp_path / "out.csv", overwrite=True)
    assert (tmp_path / "out.csv").read_text() == "mine\n"
    monkeypatch.undo()
    api.predict(classifier, str(source), tmp_path / "out.csv", overwrite=True)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 4
