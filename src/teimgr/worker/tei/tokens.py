"""`/tokenize` and `/decode`: the tokenizer alone, in the caller's thread, without the device and its queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from teimgr.errors import EmptyInput, InvalidInput
from teimgr.worker.tei.answers import to_json
from teimgr.worker.tei.fields import Body, InputIds, TokenizeInput, id_lists

if TYPE_CHECKING:  # it would bring torch along, which who only speaks the dialect can do without
    from teimgr.engine.engine import Engine


class TokenizerRequest(Body):
    """A body that asks the tokenizer."""

    def answer(self, engine: Engine, limit: int) -> bytes:
        """The JSON it is answered with; blocks while the tokenizer works.

        Raises:
            EmptyInput, InvalidInput, TokenizerFailed
        """
        raise NotImplementedError


class TokenizeRequest(TokenizerRequest):
    """`POST /tokenize`: the tokens of texts, untruncated."""

    inputs: TokenizeInput
    add_special_tokens: bool = True
    prompt_name: str | None = None

    def answer(self, engine: Engine, limit: int) -> bytes:
        """`[[{"id": 101, "text": "[CLS]", "special": true, "start": null, "stop": null}, …], …]`."""
        texts = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        if not texts:
            raise EmptyInput("`inputs` cannot be empty")
        _check_count(texts, limit)
        tokens = (engine.tokenize(text, self.add_special_tokens, self.prompt_name) for text in texts)
        return to_json([[asdict(token) for token in of_text] for of_text in tokens])


class DecodeRequest(TokenizerRequest):
    """`POST /decode`: the texts of token ids."""

    ids: InputIds
    skip_special_tokens: bool = True

    def answer(self, engine: Engine, limit: int) -> bytes:
        """`["what is deep learning?", …]`."""
        batch = id_lists(self.ids)
        _check_count(batch, limit)
        return to_json([engine.decode(ids, self.skip_special_tokens) for ids in batch])


def _check_count(batch: Sequence[object], limit: int) -> None:
    if len(batch) > limit:
        raise InvalidInput(f"batch size {len(batch)} > maximum allowed batch size {limit}")
