"""The texts that go before an input: named by the request, chosen at start, or the model's own default."""

from __future__ import annotations

from teimgr.errors import InvalidConfig, InvalidInput
from teimgr.layout import Layout


class Prompts:
    """The prompts of one model.

    Where a request names none, the prompt named at start counts, else the text given there, else the model's default.
    """

    def __init__(self, layout: Layout, default_name: str | None = None, default_text: str | None = None) -> None:
        """Raises InvalidConfig where the model has no prompt called `default_name`."""
        self._texts = dict(layout.prompts)
        if default_name is not None and default_name not in self._texts:
            raise InvalidConfig(self._missing(default_name))
        if default_name is None and default_text is not None:
            self._default = default_text
        else:
            self._default = self._texts.get(default_name or layout.default_prompt_name or "", "")

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name."""
        return tuple(self._texts)

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
