"""Images: decoded by Pillow, augmented by their place in the training, and made into the model's input by its processor.

Every random number of an augmentation is a function of (seed, epoch, sample), so a resumed run, another number of workers and
another split give the same pixels. torchvision draws from torch's global generator instead, and resizes tensors and Pillow images
differently: one library on every machine keeps the pixels equal between training, `hwopt predict` and `transformers.pipeline`.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hwopt.data.stores.token_store import ArrayFolder, fingerprint
from hwopt.errors import DataError, InputError
from hwopt.text import first_line, truncate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

Augmentation = Literal["crop", "flip"]
Content = str | bytes  # the path of an image, or the bytes of a file, as data sets of the hub hold images
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Range of the cropped area, as a fraction of the image, and of its width / height: those of torchvision's RandomResizedCrop,
from Szegedy et al. 2014 (arXiv:1409.4842)."""
ATTEMPTS = 10  # draws of a crop, of which one that is larger than the image is rejected
DAMAGED = (OSError, ValueError, SyntaxError, TypeError, ArithmeticError, LookupError)
"""What Pillow raises for truncated files and damaged headers."""


def require_pillow() -> None:
    """Raise InputError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise InputError("images need the package Pillow: pip install 'hwopt[images]'") from error


def opened(content: Content) -> Image:
    """The image in a file, or in the bytes of one; its pixels are not decoded yet. Raises ValueError with the reason."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(content, str) and not os.path.isfile(content):  # opening a pipe would wait for its other end
        raise ValueError("is not a regular file" if os.path.exists(content) else "does not exist")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
    except UnidentifiedImageError as error:
        raise ValueError("is not an image that Pillow can read") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"has too many pixels: {first_line(error)}") from error
    except DAMAGED as error:
        raise ValueError(f"cannot be read: {first_line(error)}") from error


def decoded(content: Content, channels: int) -> Image:
    """The pixels of an image, upright as its EXIF orientation says, in grey (1 channel) or RGB. Raises ValueError."""
    from PIL import ImageOps

    with opened(content) as image:
        try:
            return ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
        except DAMAGED as error:
            raise ValueError(f"is a damaged image: {first_line(error)}") from error


def random_crop(width: int, height: int, random: np.random.Generator) -> tuple[float, float, float, float]:
    """A random box (left, upper, right, lower) in an image, by the algorithm of torchvision's RandomResizedCrop."""
    low, high = (math.log(ratio) for ratio in RATIO)
    for _ in range(ATTEMPTS):
        area = width * height * random.uniform(*AREA)
        ratio = math.exp(random.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = int(random.integers(0, width - w + 1)), int(random.integers(0, height - h + 1))
            return left, upper, left + w, upper + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))  # the largest crop with an allowed ratio
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


@dataclass(frozen=True)
class ImageTransform:
    """Makes the model's input of an image: the image processor of transformers, after an augmentation in training."""

    processor: Any  # an image processor of transformers, with Pillow as its backend
    channels: int = 3
    augmentation: tuple[Augmentation, ...] = ()
    seed: int = 0

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of the input. Raises InputError if it depends on the image, or if there are other inputs."""
        from PIL import Image

        mode = "L" if self.channels == 1 else "RGB"
        try:
            found = [self.processor(Image.new(mode, size), return_tensors="np") for size in ((640, 480), (300, 500))]
        except (ValueError, TypeError, AttributeError) as error:  # a processor of another kind
            raise InputError(f"model: its {type(self.processor).__name__} fails: {first_line(error)}") from error
        if any(set(each) != {"pixel_values"} for each in found):
            raise InputError(f"model: its {type(self.processor).__name__} makes {sorted(found[0])}; expected pixel_values only")
        shapes = {tuple(each["pixel_values"].shape[1:]) for each in found}
        if len(shapes) > 1 or len(shape := shapes.pop()) != 3:
            raise InputError(
                f"model: its {type(self.processor).__name__} makes inputs of different sizes for images of different sizes. "
                "Choose a model whose processor resizes to one size"
            )
        return shape

    def __call__(self, content: Content, place: tuple[int, int] | None = None) -> np.ndarray:
        """The input (channels, height, width) in float32. `place`: (epoch, sample); augments. Raises ValueError."""
        import numpy as np

        image, options = decoded(content, self.channels), {}
        if place is not None:
            image = self.augmented(image, np.random.default_rng([self.seed, *place]))
            options = {"do_resize": False, "do_center_crop": False} if "crop" in self.augmentation else {}
        return np.ascontiguousarray(self.processor(image, return_tensors="np", **options)["pixel_values"][0], np.float32)

    def augmented(self, image: Image, random: np.random.Generator) -> Image:
        """`image`, cropped to the model's size and flipped at random."""
        from PIL import ImageOps

        if "crop" in self.augmentation:
            _, height, width = self.shape
            box = random_crop(image.width, image.height, random)
            image = image.resize((width, height), self.processor.resample, box=box)
        if "flip" in self.augmentation and random.random() < 0.5:
            image = ImageOps.mirror(image)
        return image

    @property
    def identity(self) -> list[Any]:
        """What the pixels depend on, as JSON types."""
        settings = self.processor.to_dict().items()
        plain = {key: value for key, value in settings if isinstance(value, str | int | float | list | dict)}
        return [plain, self.channels, list(self.augmentation)]


def channels_of(config: Any) -> int:
    return int(getattr(config, "num_channels", None) or 3)


def load_processor(name: str, revision: str | None = None, key: str = "model.name") -> Any:
    """The image processor of a folder or hub name, with Pillow as its backend. Raises InputError if it cannot be loaded."""
    require_pillow()
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(name, revision=revision, backend="pil")
    except Exception as error:  # transformers, the hub client and the network each raise their own
        if isinstance(error, ImportError) and "Torchvision" in str(error):
            raise InputError(
                f"{key}: this version of transformers needs torchvision to load {name!r}: pip install torchvision"
            ) from error
        raise InputError(
            f"{key}: cannot load an image processor from {name!r} ({type(error).__name__}: {truncate(first_line(error), 160)}). "
            "Give a model with a preprocessor_config.json"
        ) from error


def new_processor(config: Any) -> Any:
    """The default image processor of the architecture, at the image size of `config`. Raises InputError if it has none."""
    require_pillow()
    from transformers.models.auto import image_processing_auto as auto

    names = auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type, {})
    made = auto.get_image_processor_class_from_name(names["pil"]) if "pil" in names else None
    if made is None:
        raise InputError(f"model.config: transformers has no image processor for {config.model_type!r} that uses Pillow")
    try:
        default = made()
        size = getattr(config, "image_size", None)
        if size is None:
            return default
        height, width = size if isinstance(size, list | tuple) else (size, size)
        exact = {"height": height, "width": width}
        if default.size.shortest_edge:
            return made(size={"shortest_edge": min(height, width)}, crop_size=exact)
        return made(size=exact, crop_size=exact, do_center_crop=False)
    except (ValueError, TypeError, AttributeError) as error:  # a processor of another kind
        raise InputError(
            f"model.config: cannot make an image processor for {config.model_type!r}: {first_line(error)}"
        ) from error


FORMAT = 1


class ImageStore(ArrayFolder):
    """Images of one part of the data, with what makes the model's input of them. The arrays:

    * `content`: uint8, the paths of all images, or their bytes, concatenated; meta["embedded"] says which
    * `offsets`: int64 (samples + 1,), the start of each one
    * `labels`: int64 (samples,)
    """

    def __init__(self, folder: Path, transform: ImageTransform | None = None) -> None:
        super().__init__(folder)
        self.transform = transform

    @property
    def lengths(self) -> NDArray[np.int32]:
        """1 for each image: all have one size."""
        import numpy as np

        return np.ones(len(self), np.int32)

    counts = lengths

    def content(self, index: int) -> Content:
        offsets = self.array("offsets")
        raw = self.array("content")[offsets[index] : offsets[index + 1]].tobytes()
        return raw if self.meta["embedded"] else os.fsdecode(raw)

    def row(self, index: int, epoch: int = 0) -> dict[str, NDArray[Any]]:
        """ "pixel_values" (channels, height, width) float32, and "row_labels" (). Raises DataError for a damaged file."""
        assert self.transform is not None, "image_store() gives it"
        content = self.content(index)
        try:
            pixels = self.transform(content, (epoch, index))
        except ValueError as error:
            name = f"image {index + 1:,} of the table" if isinstance(content, bytes) else content
            raise DataError(f"{name}: {error}. Replace or remove it, then start the run again") from error
        return {"pixel_values": pixels, "row_labels": self.array("labels")[index, ...]}


def image_store(images: Sequence[Content], labels: NDArray[np.int64], transform: ImageTransform, cache: Path) -> ImageStore:
    """The store of `images` with the numbers `labels`; from the cache, or written now.

    meta["left_out"] has the images that cannot be opened. Only their headers are read: a damaged image shows when it is decoded.
    """
    import numpy as np

    identity = [identity_of(content) for content in images]
    key = fingerprint([FORMAT, *transform.identity], identity, labels.tolist())
    embedded = any(isinstance(content, bytes) for content in images)
    where = "embedded" if embedded else fingerprint(list(images))

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        good, left_out = [], []
        for sample, content in enumerate(images):
            try:
                opened(content).close()
                good.append(sample)
            except ValueError as error:
                left_out.append([sample, str(error) if isinstance(content, bytes) else f"{error}: {content}"])
        raw = [content if isinstance(content, bytes) else os.fsencode(content) for content in images]
        arrays = {
            "content": np.frombuffer(b"".join(raw[sample] for sample in good), np.uint8),
            "offsets": np.cumsum([0, *(len(raw[sample]) for sample in good)], dtype=np.int64),
            "labels": labels[good],
        }
        meta = {"labels_per_token": False, "embedded": embedded, "samples": len(good), "left_out": left_out}
        return arrays, meta

    store = ImageStore.cached(cache / "images" / where / key, make)
    store.transform = transform
    return store


def identity_of(content: Content) -> str:
    """What identifies an image: its name, its folder's name and its size in bytes, which a copied folder keeps."""
    if isinstance(content, bytes):
        return fingerprint([content.hex()])
    path = Path(content)
    try:
        size = path.stat().st_size
    except OSError:  # it is left out
        size = -1
    return f"{path.parent.name}/{path.name}:{size}"
