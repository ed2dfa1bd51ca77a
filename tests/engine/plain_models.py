"""Models by their layout alone: no tokenizer, no engine, ids drawn at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tests.support.models import FAMILIES, MAX_LENGTH

from teimgr.engine.batching.batch import Encoded, pack
from teimgr.engine.heads import Rows
from teimgr.engine.job import Output
from teimgr.engine.model import Model
from teimgr.models.layout import Backbone, Layout
from teimgr.spec import Kind

# Several of one length, one token, and longer than any window.
LENGTHS = (9, 1, 4, 33, 9, 2, 4, 64, 9)
PAD, END = 1, 2
OFFSETS = {"roberta": 2, "xlm_roberta": 2, "camembert": 2}
CPU = torch.device("cpu")

Ids = NDArray[np.int32]


def layout_of(folder: Path, backbone: Backbone, kind: Kind, **parts: Any) -> Layout:
    """The layout of a transformer in `folder`; `parts` are those of its head."""
    known: dict[str, Any] = {"poolings": ("mean",), "projections": (), "position_offset": 0, "config": {}}
    return Layout(
        root=folder,
        transformer_dir=folder,
        weights_dir=folder,
        include_prompt=True,
        max_length=MAX_LENGTH,
        lower_case=False,
        kind=kind,
        backbone=backbone,
        **(known | parts),
    )


def save_headed(family: str, auto: Any, folder: Path, **settings: Any) -> Any:
    """Write a model with the head of an Auto class, without a tokenizer, and give it back."""
    torch.manual_seed(0)
    model = FAMILIES[family].headed(auto, 120, **settings).eval()
    model.save_pretrained(folder)
    return model


def random_texts(lengths: Sequence[int] = LENGTHS) -> list[Ids]:
    """Ids above the special ones, each text with its end."""
    random = np.random.default_rng(7)
    texts = [random.integers(5, 120, length).astype(np.int32) for length in lengths]
    for text in texts:
        text[-1] = END
    return texts


def run(model: Model, texts: Sequence[Ids | Encoded], output: Output) -> list[Any]:
    """What `model` gives for each text out of one batch, in the order of `texts`."""
    batch = pack([text if isinstance(text, Encoded) else Encoded(text) for text in texts])
    found = list(each(model.run(batch, [output])[output]))
    return [found[row] for row in np.argsort(batch.order)]


def each(rows: Rows) -> Iterator[Any]:
    """One text's part after the other: a vector, a matrix, or the indices and the values of a sparse one."""
    if rows.offsets is None:
        yield from rows.values.numpy()
        return
    for begin, stop in zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist(), strict=True):
        values = rows.values[begin:stop].float().numpy()
        if rows.indices is None:
            yield values
        else:
            kept = values != 0.0  # as the finisher leaves them out
            yield rows.indices[begin:stop].numpy()[kept], values[kept]


@torch.inference_mode()
def logits_of(model: transformers.PreTrainedModel, ids: Ids) -> torch.Tensor:
    """The result of transformers itself for one text."""
    return model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
