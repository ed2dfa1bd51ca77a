"""Results of sentence-transformers or transformers for a model's own files, the reference of a loaded model.

One text at a time, in float32, on the CPU, from the files as these libraries read them, without any part of this
engine. sentence-transformers is an optional package.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from teimgr.engine.job import Input, Output, Pair
from teimgr.models.gguf_head import GGUF
from teimgr.models.layout import Backbone, Layout
from teimgr.spec import Kind

Matrix = NDArray[np.float32]
Prompt = Mapping[str, str]
"""Arguments of `SentenceTransformer.encode`: at most one of `prompt_name` and `prompt`, and `task`."""
Compute = Callable[[Input, Prompt], Matrix]

SENTENCE_TRANSFORMERS, TRANSFORMERS = "sentence-transformers", "transformers"
_QUIET: dict[str, Any] = {"show_progress_bar": False, "batch_size": 1}
_POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda rows: rows[0],
    "mean": lambda rows: rows.mean(dim=0),
    "last_token": lambda rows: rows[-1],
    "max": lambda rows: rows.max(dim=0).values,
}


class _Kept(dict[str, Any]):
    """Options that keep code_revision: sentence-transformers pops it for the class of a module, and would then read the
    model's own class at another revision.
    """

    def pop(self, key: str, *default: Any) -> Any:
        return self.get(key, *default) if key == "code_revision" else super().pop(key, *default)


class NoReferenceError(Exception):
    """Neither library computes what this model is served for; the text is the reason."""


@dataclass(frozen=True, slots=True)
class LibraryReference:
    """A model in one library, with its name and version.

    `compute` returns `output` for one input, [rows, width]; scores are [labels].
    """

    library: str
    output: Output
    compute: Compute

    @property
    def name(self) -> str:
        return f"{self.library} {importlib.metadata.version(self.library)}"


def load_reference(layout: Layout) -> LibraryReference:
    """The model of a layout, loaded a second time, by the library that its files are made for.

    Raises:
        NoReferenceError: neither library can run it, or neither defines what it computes.
        Exception: of any kind, where the library cannot load it.
    """
    _refuse_what_libraries_read_otherwise(layout)
    if _has_modules(layout):
        return _by_modules(layout)
    return _bare(layout)


def _refuse_what_libraries_read_otherwise(layout: Layout) -> None:
    if layout.weight_names == GGUF:
        raise NoReferenceError("neither library loads a GGUF file alone; docs/models.md compares its kind")
    if layout.config_is_changed and not layout.trust_remote_code:
        raise NoReferenceError("its own code, which is known here, is not run without trust_remote_code")
    if layout.weight_names is not None and not layout.trust_remote_code:
        raise NoReferenceError("its weights have names that the library does not read")
    if layout.skips_unknown:
        raise NoReferenceError("Model2Vec leaves out unknown tokens, which sentence-transformers does not")
    if layout.end_token is not None:
        raise NoReferenceError(f"its authors put {layout.end_token} behind every text, which the library does not")
    if layout.scoring is not None and layout.scoring.template is not None and not _has_modules(layout):
        raise NoReferenceError("no library defines how its prompt is scored")


def _has_modules(layout: Layout) -> bool:
    return (layout.root / "modules.json").is_file()


def _by_modules(layout: Layout) -> LibraryReference:
    try:
        import sentence_transformers
    except ImportError:
        raise NoReferenceError(
            "sentence-transformers is not installed, which its modules.json is made for: "
            "pip install sentence-transformers"
        ) from None
    place, options = str(layout.root), library_options(layout)
    match layout.kind:
        case Kind.EMBEDDING:
            dense: Any = sentence_transformers.SentenceTransformer(place, **options)
            return LibraryReference(
                SENTENCE_TRANSFORMERS,
                Output.DENSE,
                lambda text, prompt: _matrix(dense.encode([text], normalize_embeddings=True, **prompt, **_QUIET)),
            )
        case Kind.SPARSE:
            sparse: Any = sentence_transformers.SparseEncoder(place, **options)
            return LibraryReference(
                SENTENCE_TRANSFORMERS,
                Output.SPARSE,
                lambda text, prompt: _matrix(
                    sparse.encode([text], convert_to_sparse_tensor=False, **prompt, **_QUIET)[0][None]
                ),
            )
        case Kind.MULTI_VECTOR:
            late: Any = sentence_transformers.MultiVectorEncoder(place, **options)
            return LibraryReference(
                SENTENCE_TRANSFORMERS,
                Output.MULTI_VECTOR,
                lambda text, _: _matrix(late.encode_document([text], convert_to_numpy=True, **_QUIET)[0]),
            )
        case Kind.RERANKER | Kind.CLASSIFIER:
            ranker: Any = sentence_transformers.CrossEncoder(place, **options)
            identity = torch.nn.Identity()
            return LibraryReference(
                SENTENCE_TRANSFORMERS,
                Output.SCORES,
                lambda pair, _: _matrix(ranker.predict([pair], activation_fn=identity, **_QUIET)).reshape(-1),
            )
        case _:
            return _bare(layout)


def library_options(layout: Layout) -> dict[str, Any]:
    """The arguments by which sentence-transformers loads the model of a layout, in float32 on the CPU."""
    safe = {"use_safetensors": True} if layout.safetensors_only else {}
    return {
        "device": "cpu",
        "trust_remote_code": layout.trust_remote_code,
        "local_files_only": True,
        "model_kwargs": _Kept({"dtype": torch.float32} | safe | _code(layout)),
        "config_kwargs": _code(layout),
        "processor_kwargs": _code(layout),
    }


def _code(layout: Layout) -> dict[str, Any]:
    """The library's argument `code_revision`, if the instance has one."""
    return {} if layout.code_revision is None else {"code_revision": layout.code_revision}


def _bare(layout: Layout) -> LibraryReference:
    """A model without modules.json, by the class of transformers that its kind needs."""
    import transformers

    if layout.late is not None or layout.m3 is not None or layout.has_routes or layout.projections:
        raise NoReferenceError("transformers has no module for what follows the transformer")
    names = {
        Backbone.ENCODER: "AutoModel",
        Backbone.MASKED_LM: "AutoModelForMaskedLM",
        Backbone.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
        Backbone.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    }
    read = _reader(layout)
    if layout.backbone not in names or read is None:
        raise NoReferenceError("transformers does not define what it computes")
    output, shape = read
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": layout.trust_remote_code} | _code(layout)
    tokenizer = transformers.AutoTokenizer.from_pretrained(layout.transformer_dir, **options)
    safe = True if layout.safetensors_only else None
    kind = getattr(transformers, names[layout.backbone])
    model = kind.from_pretrained(layout.weights_dir, dtype=torch.float32, use_safetensors=safe, **options).eval()

    def compute(one: Input, prompt: Prompt) -> Matrix:
        before = prompt.get("prompt", "")
        # Lists, because the library reads a single pair with an empty second text as one text.
        texts = ([before + one.first], [one.second]) if isinstance(one, Pair) else ([before + str(one)],)
        with torch.inference_mode():
            encoded = tokenizer(*texts, truncation=True, max_length=layout.max_length, return_tensors="pt")
            return _matrix(shape(model(**encoded)).float())

    return LibraryReference(TRANSFORMERS, output, compute)


def _reader(layout: Layout) -> tuple[Output, Callable[[Any], torch.Tensor]] | None:
    """The output that is compared, and how it is read from the library's results for one text."""
    match layout.kind:
        case Kind.EMBEDDING if len(layout.poolings) == 1 and layout.poolings[0] in _POOLED:
            pooled = _POOLED[layout.poolings[0]]
            return Output.DENSE, lambda found: torch.nn.functional.normalize(
                pooled(found.last_hidden_state[0])[None], dim=-1
            )
        case Kind.RERANKER | Kind.CLASSIFIER:
            return Output.SCORES, lambda found: found.logits[0]
        case Kind.TOKEN_CLASSIFIER:
            return Output.TOKENS, lambda found: found.logits[0]
        case _:
            return None


def _matrix(found: Any) -> Matrix:
    return np.asarray(found, dtype=np.float32)
