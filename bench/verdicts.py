"""Whether a figure meets what was asked of it, and by how much it misses that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

NOT_MEASURED = "not measured"


class Form(Enum):
    """What a figure is: how it is written, and how a miss is."""

    TIMES = "times as fast"
    SHARE = "part of a whole"
    COSINE = "cosine"
    RATE = "a second"
    MS = "ms"
    SECONDS = "s"
    MB = "MB"

    def text(self, value: float) -> str:
        """A value in this form."""
        match self:
            case Form.TIMES:
                return f"{value:.2f} ×"
            case Form.SHARE:
                return f"{100 * value:.1f} %"
            case Form.COSINE:
                return f"{value:.5f}"
            case Form.RATE:
                return f"{value:,.0f}"
            case Form.MS:
                return f"{value:.1f} ms"
            case Form.SECONDS:
                return f"{value:.2f} s"
            case Form.MB:
                return f"{value:.0f} MB"

    def asked(self, value: float) -> str:
        """A value that was asked for, without digits that it does not have."""
        match self:
            case Form.TIMES:
                return f"{value:.3g} ×"
            case Form.SHARE:
                return f"{100 * value:.3g} %"
            case Form.COSINE:
                return f"{value:.5f}".rstrip("0")
            case Form.MS:
                return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"
            case Form.SECONDS:
                return f"{value:.2g} s"
            case Form.RATE | Form.MB:
                return self.text(value)

    def miss(self, measured: float, asked: float) -> str:
        """By how much: of shares in percentage points, of cosines as they are, else as a part of what was asked."""
        if self is Form.COSINE:
            return f"{abs(asked - measured):.5f}"
        if self is Form.SHARE:
            return f"{100 * abs(asked - measured):.1f} percentage points"
        percent = 100 * abs(measured - asked) / asked
        return f"{percent:.0f} %" if percent >= 1 else "less than 1 %"


@dataclass(frozen=True, slots=True)
class Value:
    """One measured figure and what was asked of it, None where nothing was; `label` tells several of a line apart, and
    `note` says how it was measured.
    """

    label: str
    measured: float
    asked: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of the table of targets: a value for each kind of texts, number of callers, or place it was measured.

    With `at_most` values are to be low. `why` is the key of a reason in `reasons`, for values that miss. `asked` is for
    a line without values; `unmeasured` is then why there are none.
    """

    figure: str
    form: Form
    values: Sequence[Value] = ()
    at_most: bool = False
    why: str = ""
    asked: str = ""
    unmeasured: str = ""
    notes: Sequence[str] = field(default=())

    @property
    def asked_text(self) -> str:
        """What was asked, once where it is the same of all values."""
        if self.asked:
            return self.asked
        asked = {value.label: value.asked for value in self.values if value.asked is not None}
        word = "at most " if self.at_most else "at least "
        if len(set(asked.values())) == 1:
            return word + self.form.asked(next(iter(asked.values())))
        return word + " / ".join(self.form.asked(each) for each in asked.values()) if asked else ""

    @property
    def misses(self) -> list[Value]:
        """The values that do not meet what was asked."""
        return [value for value in self.values if value.asked is not None and not self._meets(value, value.asked)]

    @property
    def verdict(self) -> str:
        """`met`, `missed by …` or `not measured`; empty where nothing was asked."""
        if not self.values:
            return NOT_MEASURED
        if all(value.asked is None for value in self.values):
            return ""
        if not self.misses:
            return "met"
        misses = [
            (value.label, self.form.miss(value.measured, value.asked))
            for value in self.misses
            if value.asked is not None
        ]
        if len(self.values) == 1:
            return f"missed by {misses[0][1]}"
        return "missed: " + ", ".join(f"{label} by {by}" for label, by in misses)

    def _meets(self, value: Value, asked: float) -> bool:
        return value.measured <= asked if self.at_most else value.measured >= asked


@dataclass(frozen=True, slots=True)
class Target:
    """A row of the table of targets as it was asked, and the lines that answer it."""

    what: str
    at_least: str
    lines: Sequence[Line]
