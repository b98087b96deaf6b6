"""Images: folders of classes, decoding, augmentation by place, and the store that workers read."""

import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import ConvNextConfig, CvtConfig, ImageGPTConfig, Siglip2Config, ViTConfig

from hwopt.data.batches.collate import ImageCollate, StepDataset, cut_in_order
from hwopt.data.batches.step_batch import Step
from hwopt.data.sources.rows import ReadOptions
from hwopt.data.sources.tables import read_rows
from hwopt.data.stores.images import ImageStore, ImageTransform, image_store, new_processor, random_crop
from hwopt.errors import DataError, InputError

VIT = ViTConfig(image_size=16, patch_size=8)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def photos(folder: Path, *names: str) -> Path:
    """`folder` with a picture for each of `names`, all different."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(20 + number, 30, seed=number).save(path)
    return folder


def store_of(folder: Path, names: Sequence[str], make: ImageTransform, cache: Path) -> ImageStore:
    """The store of images whose labels are 0 for the first folder of `names` and 1 for the others."""
    labels = np.array([Path(name).parent != Path(names[0]).parent for name in names], np.int64)
    return image_store([str(folder / name) for name in names], labels, make, cache)


def transform(*augmentation: Any, seed: int = 0) -> ImageTransform:
    return ImageTransform(new_processor(VIT), 3, augmentation, seed)


def table_of(folder: Path, split: str | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_rows(str(folder), split, ReadOptions(strict=False, max_bad_rows=1)).table.to_pylist()
    return found


def test_label_of_an_image_is_the_folder_of_its_class(tmp_path: Path) -> None:
    photos(tmp_path, "dog/2.png", "cat/1.jpg", "cat/old/0.JPEG")
    assert table_of(tmp_path) == [
        {"image": os.path.join("cat", "1.jpg"), "label": "cat"},
        {"image": os.path.join("cat", "old", "0.JPEG"), "label": "cat"},
        {"image": os.path.join("dog", "2.png"), "label": "dog"},
    ]


def test_folder_of_the_training_split_is_read_by_default(tmp_path: Path) -> None:
    photos(tmp_path, "Train/cat/1.png", "Train/dog/1.png", "val/cat/2.png", "test/dog/3.png")
    assert [row["label"] for row in table_of(tmp_path)] == ["cat", "dog"]
    assert table_of(tmp_path, "val") == [{"image": os.path.join("cat", "2.png"), "label": "cat"}]
    with pytest.raises(DataError, match=r"has no folder 'vall'. Did you mean 'val'\? It has: Train, test, val"):
        table_of(tmp_path, "vall")
    with pytest.raises(DataError, match="has no folder 'val'. It has no folders$"):
        table_of(tmp_path / "val" / "cat", "val")


def test_one_image_and_a_folder_without_images_are_refused(tmp_path: Path) -> None:
    photos(tmp_path, "1.png")
    with pytest.raises(DataError, match="1.png: is one image; give a folder of images, or a table with their paths"):
        read_rows(str(tmp_path / "1.png"))
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="cat: is an empty folder"):
        read_rows(str(tmp_path / "empty" / "cat"))
    with pytest.raises(DataError, match="nor one with a folder of images per class"):
        read_rows(str(tmp_path / "empty"))


def test_other_files_are_bad_rows_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    photos(tmp_path, "cat/1.png", "dog/1.png")
    for name in ("notes.txt", ".DS_Store", "Thumbs.db"):
        (tmp_path / "cat" / name).write_text("x")
    rows = read_rows(str(tmp_path), None, ReadOptions(strict=False))
    assert rows.table.num_rows == 2
    assert rows.bad_rows.reasons == {3: f"is not an image, by its extension: {os.path.join('cat', 'notes.txt')!r}"}


def test_pixels_equal_those_of_the_processor(tmp_path: Path) -> None:
    picture(40, 30).save(tmp_path / "1.png")
    expected = new_processor(VIT)(picture(40, 30), return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(transform()(tmp_path / "1.png"), expected)


def test_image_is_turned_as_its_exif_orientation_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter
    file = io.BytesIO()
    picture(20, 30).save(file, "png", exif=exif)
    upright = io.BytesIO()
    picture(20, 30).transpose(Image.Transpose.ROTATE_270).save(upright, "png")
    np.testing.assert_array_equal(transform()(file.getvalue()), transform()(upright.getvalue()))


def test_augmentation_is_a_function_of_seed_epoch_and_sample(tmp_path: Path) -> None:
    photos(tmp_path, "1.png")
    make = transform("crop", "flip", seed=3)
    first = make(tmp_path / "1.png", (2, 5))
    np.random.default_rng(0).random(10)
    np.testing.assert_array_equal(make(tmp_path / "1.png", (2, 5)), first)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(make))(tmp_path / "1.png", (2, 5)), first)
    for other in (make(tmp_path / "1.png", (3, 5)), make(tmp_path / "1.png", (2, 6))):
        assert not np.array_equal(other, first)
    assert not np.array_equal(transform("crop", "flip", seed=4)(tmp_path / "1.png", (2, 5)), first)
    np.testing.assert_array_equal(make(tmp_path / "1.png"), transform()(tmp_path / "1.png"))


def test_flip_mirrors_about_half_of_the_images(tmp_path: Path) -> None:
    picture(16, 16).save(tmp_path / "1.png")
    make, plain = transform("flip"), transform()(tmp_path / "1.png")
    found = [make(tmp_path / "1.png", (0, sample)) for sample in range(60)]
    kept = sum(np.array_equal(each, plain) for each in found)
    mirrored = sum(np.array_equal(each, plain[:, :, ::-1]) for each in found)
    assert kept + mirrored == 60
    assert 15 <= mirrored <= 45


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 2**32))
def test_crop_lies_in_the_image(width: int, height: int, seed: int) -> None:
    left, upper, right, lower = random_crop(width, height, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height


@pytest.mark.parametrize("config", [VIT, ConvNextConfig(image_size=32), CvtConfig()], ids=lambda config: config.model_type)
def test_new_processor_makes_images_of_the_models_size(config: Any) -> None:
    size = getattr(config, "image_size", 384)
    assert ImageTransform(new_processor(config)).shape == (3, size, size)


def test_processor_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="makes .*spatial_shapes.*; expected pixel_values only"):
        _ = ImageTransform(new_processor(Siglip2Config())).shape
    with pytest.raises(InputError, match="fails: Clusters must be provided"):
        _ = ImageTransform(new_processor(ImageGPTConfig())).shape


def test_store_keeps_its_name_when_the_folder_is_moved_and_changes_it_with_the_pixels(tmp_path: Path) -> None:
    names = ("cat/1.png", "dog/2.png")
    first, moved = photos(tmp_path / "a", *names), photos(tmp_path / "b", *names)

    def name(folder: Path, *augmentation: Any) -> str:
        return store_of(folder, names, transform(*augmentation), tmp_path / "cache").folder.name

    assert name(first) == name(moved)
    assert name(first, "flip") != name(first)
    picture(90, 90).save(moved / "cat" / "1.png")
    assert name(first) != name(moved)


def test_image_that_cannot_be_opened_is_left_out(tmp_path: Path) -> None:
    names = ("cat/1.png", "cat/2.png", "dog/3.png", "dog/4.png")
    photos(tmp_path, *names)
    (tmp_path / "cat" / "2.png").write_bytes(b"no image")
    (tmp_path / "dog" / "4.png").unlink()
    store = store_of(tmp_path, names, transform(), tmp_path / "cache")
    assert store.meta["left_out"] == [
        [1, f"is not an image that Pillow can read: {tmp_path / 'cat' / '2.png'}"],
        [3, f"does not exist: {tmp_path / 'dog' / '4.png'}"],
    ]
    assert len(store) == 2
    assert store.array("labels").tolist() == [0, 1]
    np.testing.assert_array_equal(store.row(1)["pixel_values"], transform()(tmp_path / "dog/3.png"))


def test_truncated_image_is_named_when_it_is_decoded(tmp_path: Path) -> None:
    photos(tmp_path, "cat/1.jpg", "dog/2.jpg")
    picture(200, 200).save(tmp_path / "dog" / "2.jpg")
    raw = (tmp_path / "dog" / "2.jpg").read_bytes()
    (tmp_path / "dog" / "2.jpg").write_bytes(raw[: len(raw) // 2])
    store = store_of(tmp_path, ("cat/1.jpg", "dog/2.jpg"), transform(), tmp_path / "cache")
    with pytest.raises(DataError, match=r"2\.jpg: is a damaged image: .*truncated.*Replace or remove it"):
        store.row(1)


def test_step_batch_of_images_is_cut_into_micro_batches(tmp_path: Path) -> None:
    names = [f"cat/{number}.png" for number in range(5)]
    photos(tmp_path, *names)
    store = store_of(tmp_path, names, transform("flip"), tmp_path / "cache")
    store = pickle.loads(pickle.dumps(store))  # as a worker receives it
    assert isinstance(store, ImageStore)
    batch = StepDataset(store, ImageCollate(cut_in_order, 3, 0))[Step(0, 4, (4, 0, 3, 1, 2), 5)]
    assert batch.sizes == [(3, 1), (2, 1)]
    for rung, sizes in ((0, [3, 2]), (1, [2, 1, 1, 1])):
        parts = [micro for micro, _ in batch.micro_batches(rung)]
        assert [len(micro.targets) for micro in parts] == sizes
        pixels = np.concatenate([micro.inputs["pixel_values"].numpy() for micro in parts])
        expected = np.stack([store.row(index, 4)["pixel_values"] for index in (4, 0, 3, 1, 2)])
        np.testing.assert_array_equal(pixels, expected)
        assert all(set(micro.inputs) == {"pixel_values"} for micro in parts)
