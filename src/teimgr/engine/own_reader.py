"""The first module of a model's own code (`Layout.reader`), as loaded by sentence-transformers. From the ids of our
tokenizer it computes hidden states, or the vector of a text if modules.json has no Pooling after it.

Its own tokenization is not used while serving. So the load compares it with ours on known texts: ids, truncation and
further inputs of the module. A difference refuses the model. So do results that differ between two loads, since
sentence-transformers draws random values for weights that the files lack, or between tasks of one route.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from teimgr.engine import gpu
from teimgr.engine.backbone import UnpackedTransformer
from teimgr.engine.batching.batch import Encoded
from teimgr.engine.library_model import check_weights, silence
from teimgr.engine.library_reference import library_options
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.engine.text.tokenizer_library import PROBES
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Layout

log = logging.getLogger(__name__)

_PROMPT = "query: "
_BLANK = " "
_TOLERANCE = 1e-4  # between hidden states of two loads, relative to the largest
_IDS, _MASK, _TYPES, _PROMPT_LENGTH = "input_ids", "attention_mask", "token_type_ids", "prompt_length"
# Results that sentence-transformers' Pooling reads, besides the mask.
_STATES, _FIRST_STATE, _WEIGHTS = "token_embeddings", "cls_token_embeddings", "token_weights_sum"
_VECTOR = "sentence_embedding"


class OwnReader(UnpackedTransformer):
    """A first module of the model's own code, with one forward per run of equal lengths."""

    why_unpacked = "its first module is code of the model's own"

    def _forward(self, **inputs: Any) -> Tensor:
        found: Tensor = self._module(**inputs).last_hidden_state
        return found if found.dim() == 2 else found.flatten(0, 1)


def load_own_reader(layout: Layout, device: torch.device) -> OwnReader:
    """Load the first module of `layout` in float32, twice, and compare the way in which it reads texts with ours.

    Raises:
        ModelLoadFailed: sentence-transformers is missing, the module fails, reads texts otherwise, or gives other
            results with each load.
    """
    assert layout.reader is not None
    name = layout.reader.code
    check_weights(layout)
    silence()
    tokenizer = TextTokenizer(layout, layout.max_length)
    try:
        states = _checked(layout, tokenizer, seed=0)[1]
        gc.collect()  # frees the first copy before the second is loaded
        module, again = _checked(layout, tokenizer, seed=1)
    except ModelLoadFailed:
        raise
    except Exception as error:  # of any type, from the model's own code
        if gpu.is_out_of_memory(error):
            raise
        raise ModelLoadFailed(f"{name} of modules.json fails: {type(error).__name__}: {error}") from error
    if _differ(states, again):
        raise ModelLoadFailed(
            f"{name} of modules.json gives other results with each load: weights that the files lack are drawn at "
            "random"
        )
    return OwnReader(module.to(device), 0, device)


@torch.inference_mode()
def _checked(layout: Layout, tokenizer: TextTokenizer, seed: int) -> tuple[_Features, list[Tensor]]:
    """The module, and its results for the known texts."""
    assert layout.reader is not None
    library = _loaded(layout, seed)
    options = TokenizeOptions(left=layout.truncate_left)
    encoded = [one for one in tokenizer.encode(PROBES, options) if isinstance(one, Encoded)]
    ids = [torch.from_numpy(one.ids).long()[None] for one in encoded]
    served: tuple[_Features, list[Tensor]] | None = None
    for task in _tasks(library, layout):
        given, prompt_length = _compared(library, layout, tokenizer, task)
        module = _Features(library, given, layout, task)
        results = [module(one).last_hidden_state for one in ids]
        name = f"{layout.reader.code} of modules.json"
        if prompt_length and _differ(results, [module(one, prompt_length).last_hidden_state for one in ids]):
            raise ModelLoadFailed(
                f"{name} treats the tokens of a prompt in another way ({_PROMPT_LENGTH}), which is not served: a "
                "Pooling with include_prompt = false in modules.json leaves them out"
            )
        served = served or (module, results)
        if _differ(served[1], results):
            raise ModelLoadFailed(
                f"{name} gives other results for the task {task!r} than for {served[0].task!r} in one route, which is "
                "not served"
            )
    assert served is not None
    return served


def _differ(ones: list[Tensor], others: list[Tensor]) -> bool:
    pairs = zip(ones, others, strict=True)
    return not all((a - b).abs().max() <= _TOLERANCE * max(1.0, float(a.abs().max())) for a, b in pairs)


def _tasks(library: Any, layout: Layout) -> list[str | None]:
    """What sentence-transformers is asked for, of the texts that go through the module; None: without a task."""
    assert layout.reader is not None
    router = next((one for one in library.children() if hasattr(one, "sub_modules")), None)
    if router is None:
        return [None]
    route = layout.reader.route
    if route is None:  # the routes follow it
        return [None, *router.sub_modules]
    return [route, None] if router.default_route == route else [route]


def _loaded(layout: Layout, seed: int) -> Any:
    """The model as sentence-transformers loads it, on the host in float32."""
    assert layout.reader is not None
    try:
        import sentence_transformers
    except ImportError:
        raise ModelLoadFailed(
            f"the first module of modules.json is {layout.reader.code}, code in the model's own repository, which "
            "sentence-transformers loads, and that is not installed: pip install sentence-transformers"
        ) from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        library = sentence_transformers.SentenceTransformer(str(layout.root), **library_options(layout))
    return library.float().eval().requires_grad_(False)


def _compared(library: Any, layout: Layout, tokenizer: TextTokenizer, task: str | None) -> tuple[dict[str, Any], int]:
    """What the module is given beside ids and mask: the same for each text, token types of 0 among them; and the
    tokens of a prompt, where it is given their number.

    Raises:
        ModelLoadFailed: it reads a known text otherwise than `tokenizer`.
    """
    assert layout.reader is not None
    name = f"{layout.reader.code} of modules.json"
    constants: dict[str, Any] | None = None
    prompt_length = 0
    asked = {} if task is None else {"task": task}
    for text, prompt in _known_texts(layout):
        features = dict(library.preprocess([text], prompt=prompt or None, **asked))
        ids = _only_row(features.pop(_IDS, None), name)
        if not all(_only_row(features.pop(_MASK, None), name)):
            raise ModelLoadFailed(f"{name} leaves tokens of {text[:40]!r} out of its attention, which is not served")
        if (types := features.pop(_TYPES, None)) is not None and bool(types.any()):
            raise ModelLoadFailed(f"{name} gives the tokens of {text[:40]!r} types, which is not served")
        pooled_from = int(features.pop(_PROMPT_LENGTH, 0) or 0)
        if prompt and not layout.include_prompt and pooled_from != tokenizer.prompt_len(prompt):
            raise ModelLoadFailed(f"{name} pools a prompt, which include_prompt of its pooling leaves out")
        prompt_length = max(prompt_length, pooled_from)
        _compare_ids(ids, text, prompt, layout, tokenizer)
        given = features | ({} if types is None else {_TYPES: True})
        if any(isinstance(one, Tensor) for one in given.values()):
            named = next(key for key, one in given.items() if isinstance(one, Tensor))
            raise ModelLoadFailed(f"{name} reads {named!r} of a text beside its ids, which is not served")
        if constants is not None and given != constants:
            raise ModelLoadFailed(f"{name} reads more of a text than its ids, which is not served: {sorted(given)}")
        constants = given
    return constants or {}, prompt_length


def _compare_ids(ids: list[int], text: str, prompt: str, layout: Layout, tokenizer: TextTokenizer) -> None:
    """Raise ModelLoadFailed where the module's ids are not ours."""
    assert layout.reader is not None
    options = TokenizeOptions(prompt=prompt, left=layout.truncate_left)
    (found,) = tokenizer.encode([text], options)
    if not isinstance(found, Encoded):
        raise ModelLoadFailed(f"the tokenizer fails on {text[:40]!r}: {found.message}")
    ours = found.ids.tolist()
    if ids == ours:
        return
    name = f"{layout.reader.code} of modules.json"
    if len(ours) == layout.max_length < len(ids) == len(tokenizer.library.encode(prompt + text).ids):
        log.warning("%s does not cut long texts: they are cut to the %d tokens of the files", name, len(ours))
        return
    if len(ours) == layout.max_length != len(ids):
        raise ModelLoadFailed(
            f"{name} cuts a long text to {len(ids)} tokens, and by its files the model reads {layout.max_length}: "
            f"set max_seq_length in sentence_bert_config.json to {len(ids)}"
        )
    raise ModelLoadFailed(
        f"{name} makes other tokens of {(prompt + text)[:40]!r} than the tokenizer's files do, which is not served"
    )


def _known_texts(layout: Layout) -> Iterator[tuple[str, str]]:
    """Texts with their prompts: one that is longer than the model reads, short ones, one of white space."""
    words = " ".join(PROBES).split()
    yield " ".join(words[at % len(words)] for at in range(layout.max_length + 1)), ""
    for text in (*PROBES, _BLANK):
        yield text, ""
    yield PROBES[0], _PROMPT


def _only_row(found: Any, name: str) -> list[int]:
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != 1:
        raise ModelLoadFailed(f"{name} gives no {_IDS} and {_MASK} of a text, which is not served")
    return [int(one) for one in found[0].tolist()]


class _Features(nn.Module):
    """The first module of `library`, or of a route, with the interface of a transformers model. It gets `given` with
    each text, and the task if it takes one.
    """

    def __init__(self, library: Any, given: dict[str, Any], layout: Layout, task: str | None) -> None:
        super().__init__()
        assert layout.reader is not None
        key, module = next(iter(library.named_children()))
        self.module = module if layout.reader.route is None else module.sub_modules[layout.reader.route][0]
        self.task = task
        self._pools = layout.pools_itself
        self._name = layout.reader.code
        taken = {*getattr(self.module, "forward_kwargs", ()), *((library.module_kwargs or {}).get(key) or ())}
        self._options = {} if task is None or "task" not in taken else {"task": task}
        self._has_types = _TYPES in given
        self._given = {key: value for key, value in given.items() if key != _TYPES}
        width = self(torch.zeros(1, 2, dtype=torch.int64)).last_hidden_state.shape[-1]
        wide = layout.config.get("intermediate_size")
        self.config = _Config(width, wide if isinstance(wide, int) else 4 * width, self._name)

    def get_input_embeddings(self) -> nn.Module:
        """Raises NotImplementedError always."""
        raise NotImplementedError

    def forward(
        self, input_ids: Tensor, prompt_length: int = 0, attention_mask: Tensor | None = None
    ) -> SimpleNamespace:
        """Raises ValueError where the module gives no vector for each token, or others than these to be pooled, or no
        vector for each text where it pools itself.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        features = {**self._given, _IDS: input_ids, _MASK: mask.clone()}
        if self._has_types:
            features[_TYPES] = torch.zeros_like(input_ids)
        if prompt_length:
            features[_PROMPT_LENGTH] = prompt_length
        found = self.module(features, **self._options)
        if self._pools:
            vectors = found.get(_VECTOR)
            if not isinstance(vectors, Tensor) or vectors.dim() != 2 or len(vectors) != len(input_ids):
                raise ValueError(
                    f"{self._name} gives no vector for each text ({_VECTOR}), and modules.json has no Pooling behind it"
                )
            return SimpleNamespace(last_hidden_state=vectors)
        states = found.get(_STATES)
        if not isinstance(states, Tensor) or states.shape[:-1] != input_ids.shape:
            raise ValueError(f"{self._name} gives no vector for each token ({_STATES}), which a Pooling reads")
        if not torch.equal(found.get(_MASK, mask).to(mask.dtype), mask):
            raise ValueError(f"{self._name} leaves tokens out of the pooling, which is not served")
        if found.get(_WEIGHTS) is not None:
            raise ValueError(f"{self._name} weighs tokens for the pooling ({_WEIGHTS}), which is not served")
        if (first := found.get(_FIRST_STATE)) is not None and not torch.equal(first, states[:, 0]):
            raise ValueError(f"{self._name} pools another vector than that of the first token, which is not served")
        return SimpleNamespace(last_hidden_state=states)


@dataclass
class _Config:
    """The parts of a transformers configuration that the engine reads."""

    hidden_size: int
    intermediate_size: int
    model_type: str
    _attn_implementation: str = "eager"

    def get_text_config(self) -> _Config:
        return self
