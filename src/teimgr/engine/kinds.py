"""What a model of some kind can be asked for, and in which words it refuses the rest; the words are TEI's own."""

from __future__ import annotations

from teimgr.engine.job import InferOptions, Output
from teimgr.errors import InvalidInput, WrongModelKind
from teimgr.spec import ModelInfo

_NO_EMBEDDING = "Model is not an embedding model"
_LACKING = {
    Output.DENSE: _NO_EMBEDDING,
    Output.TOKENS: _NO_EMBEDDING,
    Output.SPARSE: "Model is not an embedding model with SPLADE pooling",
    Output.MULTI_VECTOR: "Model is not a late-interaction (multi-vector) model",
    Output.SCORES: "Model is not a classifier model",
}


def check(info: ModelInfo, options: InferOptions) -> None:
    """See that the model can give what `options` ask for.

    Raises:
        WrongModelKind: it lacks an output, or cannot normalise it.
        InvalidInput: bad `dimensions` of a dense vector, or nothing is asked for.
    """
    if not options.outputs:
        raise InvalidInput("Input validation error: at least one output must be asked for")
    for output in Output:
        if output in options.outputs and output.value not in info.outputs:
            raise WrongModelKind(f"Backend error: {_lacking(info, output)}")
    if Output.DENSE in options.outputs:
        _check_dense(info, options)


def _lacking(info: ModelInfo, output: Output) -> str:
    if info.kind == "sparse" and output is Output.TOKENS:
        return "`embed_all` is not available for SPLADE models"
    if info.kind == "multi-vector" and output is Output.DENSE:
        return "Model is not an embedding model with one vector per text"
    return _LACKING[output]


def _check_dense(info: ModelInfo, options: InferOptions) -> None:
    if info.kind == "sparse" and options.normalize:
        raise WrongModelKind("Backend error: `normalize` is not available for SPLADE models")
    dimensions = options.dimensions
    if dimensions is not None and dimensions < 1:
        raise InvalidInput("Input validation error: `dimensions` should be positive")
    if dimensions is not None and dimensions > info.dimension:
        raise InvalidInput(
            "Input validation error: `dimensions` should be smaller than the maximum embedding dimension."
        )
