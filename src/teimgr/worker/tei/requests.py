"""The inference requests of TEI's own routes, one class per route."""

from __future__ import annotations

from functools import partial
from typing import Any

from teimgr.engine.job import InferOptions, Output, Pair
from teimgr.errors import EmptyInput
from teimgr.worker.kinds import need_reranker_http, output_per_token
from teimgr.worker.tei import answers
from teimgr.worker.tei.fields import U32, Body, Input, PredictInput, TruncationDirection, engine_inputs, text_lists
from teimgr.worker.tei.inference import Inference, InferenceRequest, Served


class Truncating(Body):
    """What happens to a text that is too long: null leaves it to the instance."""

    truncate: bool | None = None
    truncation_direction: TruncationDirection = "right"

    def options(self, served: Served, output: Output, **more: Any) -> InferOptions:
        """Options for `output`; `more` are other fields of `InferOptions`."""
        return InferOptions(
            outputs=frozenset({output}),
            truncate=served.spec.auto_truncate if self.truncate is None else self.truncate,
            truncation_left=self.truncation_direction.lower() == "left",
            **more,
        )


class EmbedAllRequest(InferenceRequest, Truncating):
    """`POST /embed_all`: a vector per token."""

    inputs: Input
    prompt_name: str | None = None

    def inference(self, served: Served) -> Inference:
        """Hidden states, or the token vectors that a late-interaction model makes of them."""
        output = output_per_token(served.model)
        return self._of_inputs(served, self.options(served, output, prompt_name=self.prompt_name), answers.per_token)

    def _of_inputs(self, served: Served, options: InferOptions, answer: answers.Answer) -> Inference:
        return Inference(engine_inputs(self.inputs), options, answer, served.spec.max_client_batch_size)


class EmbedSparseRequest(EmbedAllRequest):
    """`POST /embed_sparse`: the weights of vocabulary entries."""

    def inference(self, served: Served) -> Inference:
        """Sparse vectors."""
        options = self.options(served, Output.SPARSE, prompt_name=self.prompt_name)
        return self._of_inputs(served, options, answers.sparse)


class EmbedRequest(EmbedAllRequest):
    """`POST /embed`: a vector per input."""

    normalize: bool = True
    dimensions: U32 | None = None

    def inference(self, served: Served) -> Inference:
        """Dense vectors."""
        options = self.options(
            served,
            Output.DENSE,
            prompt_name=self.prompt_name,
            normalize=self.normalize,
            dimensions=self.dimensions,
        )
        return self._of_inputs(served, options, answers.vectors)


class PredictRequest(InferenceRequest, Truncating):
    """`POST /predict`: a score per label. A list of strings is one text or one pair, a list of such lists a batch."""

    inputs: PredictInput
    raw_scores: bool = False

    def inference(self, served: Served) -> Inference:
        """Scores, as a list per input where a batch was sent."""
        batch, is_batch = text_lists(self.inputs)
        options = self.options(served, Output.SCORES, raw_scores=self.raw_scores)
        answer = partial(answers.predictions, served.model.labels, is_batch)
        inputs = [texts[0] if len(texts) == 1 else Pair(*texts) for texts in batch]
        return Inference(inputs, options, answer, served.spec.max_client_batch_size)


class RerankRequest(InferenceRequest, Truncating):
    """`POST /rerank`: texts by how well they answer a query."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False

    def inference(self, served: Served) -> Inference:
        """A score per pair of query and text."""
        if not self.texts:
            raise EmptyInput("`texts` cannot be empty")
        need_reranker_http(served.model)
        options = self.options(served, Output.SCORES, raw_scores=self.raw_scores)
        answer = partial(answers.ranks, self.texts if self.return_text else None)
        inputs = [Pair(self.query, text) for text in self.texts]
        return Inference(inputs, options, answer, served.spec.max_client_batch_size)


class SimilarityInput(Body):
    """A sentence, and those it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Truncating):
    """How the sentences are embedded."""

    prompt_name: str | None = None


class SimilarityRequest(InferenceRequest):
    """`POST /similarity`: how near sentences are to one sentence."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None

    def inference(self, served: Served) -> Inference:
        """Dense vectors as the model gives them; what is told is the cosine of the first with each of the others."""
        if not self.inputs.sentences:
            raise EmptyInput("`inputs.sentences` cannot be empty")
        parameters = self.parameters or SimilarityParameters()
        options = parameters.options(served, Output.DENSE, prompt_name=parameters.prompt_name, normalize=False)
        inputs = [self.inputs.source_sentence, *self.inputs.sentences]
        return Inference(inputs, options, answers.similarities, served.spec.max_client_batch_size)


# What a request that names no task asks for.
REQUEST_OF_KIND: dict[str, type[InferenceRequest]] = {
    "embedding": EmbedRequest,
    "sparse": EmbedSparseRequest,
    "multi-vector": EmbedAllRequest,
    "reranker": RerankRequest,
    "classifier": PredictRequest,
}
