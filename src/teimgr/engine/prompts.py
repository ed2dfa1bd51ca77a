"""The texts that go before an input: named by the request, chosen at start, or the model's own default.

On late-interaction models their names are the two roles, whether or not a text belongs to them.
"""

from __future__ import annotations

from teimgr.engine.job import InferOptions
from teimgr.engine.templates import DOCUMENT, QUERY
from teimgr.engine.tokenizer import TokenizeOptions
from teimgr.errors import InvalidConfig, InvalidInput
from teimgr.model_files import Layout


class Prompts:
    """The prompts of one model.

    Where a request names none, the prompt named at start counts, else the text given there, else the model's default.
    """

    def __init__(self, layout: Layout, default_name: str | None = None, default_text: str | None = None) -> None:
        """Raises InvalidConfig where the model has no prompt called `default_name`."""
        self._roles = layout.late is not None
        self._texts = dict(layout.prompts)
        if self._roles:
            self._texts = {name: layout.prompts.get(name, "") for name in (QUERY, DOCUMENT)}
        if default_name is not None and default_name not in self._texts:
            raise InvalidConfig(self._missing(default_name))
        if default_name is None and default_text is not None:
            self._default = default_text
        else:
            own = DOCUMENT if self._roles else layout.default_prompt_name or ""
            self._default = self._texts.get(default_name or own, "")
        self._default_query = default_name == QUERY

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name."""
        return tuple(self._texts)

    def reading(self, options: InferOptions) -> TokenizeOptions:
        """How a job with these options wants its inputs read.

        Raises:
            InvalidInput: the model has no prompt of that name.
        """
        query = self._default_query if options.prompt_name is None else options.prompt_name == QUERY
        text = self.text(options.prompt_name)
        return TokenizeOptions(options.truncate, options.truncation_left, text, self._roles and query)

    def text(self, name: str | None) -> str:
        """What goes before the input, "" for nothing.

        Raises:
            InvalidInput: the model has no prompt of that name.
        """
        if name is None:
            return self._default
        if name in self._texts:
            return self._texts[name]
        raise InvalidInput(f"Input validation error: {self._missing(name)}")

    def _missing(self, name: str) -> str:
        if not self._texts:
            return (
                f"`default-prompt-name` is set to `{name}` but no prompts were found in the "
                "Sentence Transformers configuration"
            )
        known = ", ".join(f'"{known}"' for known in self._texts)
        return (
            f"`default-prompt-name` is set to `{name}` but it was not found in the Sentence Transformers prompts. "
            f"Available prompts: [{known}]"
        )
