"""Readers of image files in child processes, whose stages are measured one by one; models and files of a run."""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.encoders import Bare, SentenceTransformers, Served, Task

NINTH = 9  # of ColPali's depth is measured: 3 of 27 layers of its image half, 2 of 18 of its language model
_CLIP_B32 = {"text": (512, 12, 8), "vision": (768, 12, 12)}  # hidden size, layers, heads

Stages = dict[str, Callable[[Any], Any]]
"""By name, in order: the first reads a batch of paths, each other one what the one before it gave."""


def staged(stages: Stages, paths: Sequence[str]) -> dict[str, float]:
    """Processor seconds of each stage for these files, one stage after the other."""
    spent: dict[str, float] = {}
    value: Any = paths
    for name, stage in stages.items():
        began = time.process_time()
        value = stage(value)
        spent[name] = time.process_time() - began
    return spent


def _opened(paths: Sequence[str]) -> list[Any]:
    from PIL import Image

    return [Image.open(path) for path in paths]


def _decoded(paths: Sequence[str]) -> list[Any]:
    return [image.convert("RGB") for image in _opened(paths)]


class SentenceTransformersImages(SentenceTransformers):
    """`SentenceTransformer.encode` of opened images, as its users call it."""

    def encode(self, texts: list[str]) -> Any:
        """Unit vectors of the files at these paths."""
        return super().encode(_opened(texts))


class TransformersImages:
    """transformers' own image processor and the forward of CLIP's image half, in batches."""

    kind = "CLIPModel"

    def __init__(self, task: Task) -> None:
        import torch

        library: Any = importlib.import_module("transformers")
        self.dtype, self._batch_size, self._torch = task.dtype, task.batch_size, torch
        self._model: Any = (
            getattr(library, self.kind).from_pretrained(task.model, dtype=getattr(torch, task.dtype)).eval()
        )
        self._processor: Any = self._load_processor(task.model)
        self.stages: Stages = {"decode": _decoded, "preprocess": self._preprocess, "forward": self._vectors}

    def encode(self, texts: list[str]) -> Any:
        """Of the files at these paths; of a page the vectors of its tokens one behind the other."""
        found = []
        for at in range(0, len(texts), self._batch_size):
            value: Any = texts[at : at + self._batch_size]
            for stage in self.stages.values():
                value = stage(value)
            found.append(value)
        return np.concatenate(found)

    def _load_processor(self, model: str) -> Any:
        library: Any = importlib.import_module("transformers")
        return library.AutoImageProcessor.from_pretrained(model, backend="pil")

    def _preprocess(self, images: Any) -> Any:
        return self._processor(images=images, return_tensors="pt")

    def _forward(self, inputs: Any) -> Any:
        return self._model.get_image_features(**inputs).pooler_output

    def _vectors(self, inputs: Any) -> Any:
        with self._torch.inference_mode():
            found = self._torch.nn.functional.normalize(self._forward(inputs).float(), dim=-1)
        return found.flatten(1).numpy()


class TransformersPages(TransformersImages):
    """transformers' own processor and forward of ColPali, in batches."""

    kind = "ColPaliForRetrieval"

    def _load_processor(self, model: str) -> Any:
        library: Any = importlib.import_module("transformers")
        return library.ColPaliProcessor.from_pretrained(model)

    def _preprocess(self, images: Any) -> Any:
        return self._processor.process_images(images=images)

    def _forward(self, inputs: Any) -> Any:
        return self._model(**inputs).embeddings


class EngineImages(Bare):
    """teimgr's engine in this process, without any server: images as one bulk job."""

    def __init__(self, task: Task) -> None:
        from teimgr.engine.images.files import decode
        from teimgr.engine.images.pixels import prepare

        super().__init__(task)
        model: Any = self._engine._runners[0]._model
        dual = self._engine.layout.dual
        assert dual is not None
        steps = dual.steps
        self.stages: Stages = {
            "decode": lambda paths: [decode(Path(path).read_bytes()) for path in paths],
            "preprocess": lambda images: [prepare(image, steps) for image in images],
            "forward": model.vectors,
        }

    def encode(self, texts: list[str]) -> Any:
        """Of the files at these paths; of a page the vectors of its tokens one behind the other."""
        return super().encode([self._engine.picture(Path(path).read_bytes()) for path in texts])


class ServedImages(Served):
    """teimgr's daemon through `teimgr.v1.Arrow`, by teimgr's own client."""

    def encode(self, texts: list[str]) -> Any:
        """Vectors of the files at these paths, 32 in a call and two calls in flight."""
        import pyarrow as pa

        table = pa.table({"image": [Path(path).read_bytes() for path in texts]})
        found = self._client.infer(table, instance=self._instance, batch_rows=32)
        if found["error"].null_count < len(texts):
            raise RuntimeError(next(error for error in found["error"].to_pylist() if error))
        name = "dense" if "dense" in found.column_names else "multi_vector"
        column = found[name].combine_chunks()
        while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
            column = column.flatten()  # not `to_pylist`, whose half a second for 32 pages is a load beside the server
        return np.asarray(column, np.float32).reshape(len(texts), -1)


class Models(NamedTuple):
    """Folders. `narrow_colpali` has a quarter of the widths of `colpali`."""

    clip: Path
    colpali: Path
    narrow_colpali: Path


def models(folder: Path, *, is_tiny: bool, of_pages: bool = True) -> Models:
    """A CLIP and two ColPalis in `folder`, the large one of full widths where it is needed (`of_pages`)."""
    from tests.support.models.dual_encoders import build_clip, build_colpali

    clip = build_clip(folder / "clip", "sentence-transformers")
    colpali, narrow = (build_colpali(folder / name) for name in ("colpali", "narrow"))
    if not is_tiny:
        _as_clip_b32(clip)
        if of_pages:
            _as_colpali(colpali)
        _as_colpali(narrow, 4)
    return Models(clip, colpali, narrow)


def _as_clip_b32(folder: Path) -> None:
    """Give a CLIP the sizes of ViT-B/32, but for its vocabulary."""
    import torch

    library: Any = importlib.import_module("transformers")
    sizes = {
        part: {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
        | {"num_attention_heads": heads}
        for part, (hidden, layers, heads) in _CLIP_B32.items()
    }
    own = library.CLIPConfig.from_pretrained(folder)
    texts = own.text_config.to_dict() | sizes["text"] | {"projection_dim": 512}
    images = sizes["vision"] | {"image_size": 224, "patch_size": 32, "projection_dim": 512}
    torch.manual_seed(0)
    config = library.CLIPConfig(text_config=texts, vision_config=images, projection_dim=512)
    library.CLIPModel(config).save_pretrained(folder)
    library.CLIPImageProcessorPil().save_pretrained(folder)


def _as_colpali(folder: Path, divisor: int = 1) -> None:
    """Give a ColPali the widths of PaliGemma 3B, or this part of them, and a ninth of its depth."""
    import torch

    library: Any = importlib.import_module("transformers")
    processor = library.ColPaliProcessor.from_pretrained(folder)
    processor.image_processor.size = {"height": 448, "width": 448}
    processor.image_seq_length = processor.image_processor.image_seq_length = 1024
    own = library.ColPaliConfig.from_pretrained(folder).to_dict()
    seen = {"hidden_size": 1152 // divisor, "num_attention_heads": 16 // divisor}
    seen["intermediate_size"] = 4304 // divisor // 16 * 16  # whole rows of the native library, as 4,304 is
    width = 2048 // divisor
    seen |= {"num_hidden_layers": 27 // NINTH, "patch_size": 14, "image_size": 448, "projection_dim": width}
    texts = {"hidden_size": width, "intermediate_size": 8 * width, "num_attention_heads": 8, "num_key_value_heads": 1}
    texts |= {"num_hidden_layers": 18 // NINTH, "head_dim": 256 // divisor, "max_position_embeddings": 8192}
    whole = own["vlm_config"] | {"hidden_size": width, "projection_dim": width}
    whole |= {"vision_config": own["vlm_config"]["vision_config"] | seen}
    whole |= {"text_config": own["vlm_config"]["text_config"] | texts}
    torch.manual_seed(0)
    config = library.ColPaliConfig(vlm_config=whole, embedding_dim=128)
    library.ColPaliForRetrieval(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def photographs(folder: Path, count: int, sizes: Sequence[tuple[int, int]]) -> list[str]:
    """The paths of `count` JPEG files of these sizes in turn: slopes of colours with fine noise, of some 1.5 bits for
    each pixel, as photographs have.
    """
    from PIL import Image

    folder.mkdir()
    chance = np.random.default_rng(0)
    paths = []
    for number in range(count):
        width, height = sizes[number % len(sizes)]
        coarse = Image.fromarray(chance.integers(0, 256, (9, 12, 3), np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.int16) + chance.integers(-12, 13, (height, width, 1), np.int16)
        written = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(written, "JPEG", quality=85)
        paths.append(str(folder / f"{number:04}.jpg"))
        Path(paths[-1]).write_bytes(written.getvalue())
    return paths
