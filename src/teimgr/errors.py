"""All errors of teimgr: a code and a message each, in three groups.

    TeimgrError
    ├── Refused      the caller's error; repeating the request changes nothing
    ├── TryLater     the request is valid, but cannot be served now
    └── Broken       a failure on our side

HTTP and gRPC status codes are in `wire/status.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, unique
from pathlib import Path
from typing import ClassVar


@unique
class Code(IntEnum):
    """Stable error code; its number is sent in error frames."""

    VALIDATION_ERROR = 1
    EMPTY_INPUT = 2
    INVALID_INPUT = 3
    TOKENIZER_ERROR = 4
    WRONG_MODEL_KIND = 5
    INVALID_CONFIG = 6
    INVALID_PORT = 7
    INVALID_INSTANCE_NAME = 8
    INVALID_GPU_ID = 9
    INSTANCE_NOT_FOUND = 10
    MODEL_NOT_FOUND = 11
    INSTANCE_EXISTS = 12
    ALREADY_RUNNING = 13
    NOT_RUNNING = 14
    PORT_CONFLICT = 15
    UNIMPLEMENTED = 16
    MODEL_GATED = 17
    MODEL_BUSY = 18
    MODEL_IN_USE = 19
    AMBIGUOUS_INSTANCE = 20
    UPDATE_IN_PROGRESS = 23
    UPDATE_FAILED = 24
    UNAUTHENTICATED = 21
    FORBIDDEN = 22
    OBJECT_NOT_FOUND = 25
    OBJECT_IN_USE = 26
    STORAGE_QUOTA_EXCEEDED = 27
    SPACE_DIFFERS = 28
    MAX_INSTANCES_REACHED = 32
    PORT_ALLOCATION_FAILED = 33
    OVERLOADED = 34
    MESSAGE_TOO_LARGE = 35
    OUT_OF_DEVICE_MEMORY = 36
    BACKEND_UNAVAILABLE = 37
    TIMEOUT = 38
    CANCELLED = 39
    STATE_NOT_SAVED = 40
    STORAGE_FULL = 41
    NO_HOST = 42
    KILLED_FOR_MEMORY = 43
    TOKEN_RATE_EXCEEDED = 46
    DAILY_TOKENS_EXCEEDED = 47
    CONCURRENT_TOKENS_EXCEEDED = 48
    CALL_OVER_QUOTA = 49
    MODEL_LOAD_FAILED = 64
    INFERENCE_FAILED = 65
    INTERNAL_ERROR = 66
    MODEL_DOWNLOAD_FAILED = 67


_SHOWN_ID_CHARS = 80
# Of a message: it may quote a caller's text, which can be as large as a body.
MAX_MESSAGE_CHARS = 16_384
_BY_CODE: dict[int, type[TeimgrError]] = {}


class TeimgrError(Exception):
    """An error with a code and a message for the caller."""

    code: ClassVar[Code] = Code.INTERNAL_ERROR
    UNTOLD: ClassVar[float] = -1.0  # in place of `retry_after_s`: it depends on an operator
    retry_after_s: float | None = None  # when to try again, where that was estimated
    is_of_load: bool = False  # `retry_after_s` is what is left of a load, which other calls do not change
    input_index: int | None = None  # index of the input at fault, if the call has several

    def __init_subclass__(cls, code: Code | None = None) -> None:
        if code is not None:
            cls.code = code
            _BY_CODE[code] = cls

    def __init__(self, message: str) -> None:
        message = shortened(message)
        super().__init__(message)
        self.message = message

    def name_input(self, index: int) -> None:
        """Set the index of the input at fault."""
        self.input_index = index

    def try_after(self, seconds: float | None) -> None:
        """Say when to try again."""
        self.retry_after_s = seconds

    def try_after_load(self, seconds: float | None) -> None:
        """Set when to try again, by the time left of a load."""
        self.retry_after_s, self.is_of_load = seconds, True

    def reword(self, message: str) -> None:
        """Replace the message by a more detailed one."""
        self.message = shortened(message)


def shortened(message: str) -> str:
    """The message, cut to `MAX_MESSAGE_CHARS`."""
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 1]}…"


class Refused(TeimgrError):
    """The caller's error; repeating the request changes nothing."""


class TryLater(TeimgrError):
    """The request is valid, but cannot be served now."""


class Broken(TeimgrError):
    """A failure of the server."""


class ValidationError(Refused, code=Code.VALIDATION_ERROR):
    """A field breaks a rule; the message names the field and the limit."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Validation error: {message}")


class EmptyInput(Refused, code=Code.EMPTY_INPUT):
    """The input has no text."""

    def __init__(self, message: str = "Input validation error: `inputs` cannot be empty") -> None:
        super().__init__(message)


class InvalidInput(Refused, code=Code.INVALID_INPUT):
    """A text or option of an inference call exceeds a limit of the model."""


class InputTooLong(InvalidInput):
    """An input has more tokens than the model takes, and may not be cut.

    `limit` is in tokens, `given` a number with its unit.
    """

    def __init__(self, message: str, limit: int, given: str) -> None:
        super().__init__(message)
        self.limit = limit
        self.given = given


class TokenizerFailed(Refused, code=Code.TOKENIZER_ERROR):
    """The tokenizer library failed on the text."""


class WrongModelKind(Refused, code=Code.WRONG_MODEL_KIND):
    """The model does not support the called method."""


class SpaceDiffers(Refused, code=Code.SPACE_DIFFERS):
    """The model's vectors are of another space than the request expects."""

    def __init__(self, instance: str, found: str, expected: str) -> None:
        super().__init__(
            f"The vectors of instance '{instance}' are of the space {found}, and the request expects {expected}: "
            "nothing was computed"
        )


class InvalidConfig(Refused, code=Code.INVALID_CONFIG):
    """A setting, a flag or a model file is invalid; the message names it."""


class InvalidPort(Refused, code=Code.INVALID_PORT):
    """A port number out of range."""


class InvalidInstanceName(Refused, code=Code.INVALID_INSTANCE_NAME):
    """The name is not a letter or digit followed by up to 63 of `A-Z a-z 0-9 . _ -`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Invalid instance name {name!r}: {reason}")


class InvalidGpuId(Refused, code=Code.INVALID_GPU_ID):
    """The host has no such GPU."""

    def __init__(self, gpu_id: int, available: list[int], reason: str = "") -> None:
        tail = f" ({reason})" if reason else ""
        super().__init__(f"Invalid GPU ID {gpu_id}: Available GPUs: {available}{tail}")


class InstanceNotFound(Refused, code=Code.INSTANCE_NOT_FOUND):
    """No instance has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Instance '{name}' not found")


class ModelNotFound(Refused, code=Code.MODEL_NOT_FOUND):
    """No such model: neither a local directory nor on the hub, or no running instance serves it."""


class ModelGated(Refused, code=Code.MODEL_GATED):
    """The hub requires an accepted licence, or a token of an account that accepted it."""


class ModelBusy(Refused, code=Code.MODEL_BUSY):
    """A download or trial of the model is already running."""

    def __init__(self, model_id: str, doing: str) -> None:
        super().__init__(f"Model '{model_id}' is already {doing}")


class ModelInUse(Refused, code=Code.MODEL_IN_USE):
    """Instances use the model, so it cannot be deleted."""

    def __init__(self, model_id: str, names: Sequence[str]) -> None:
        super().__init__(f"Model '{model_id}' is used by {', '.join(names)}; delete these instances first")


class InstanceExists(Refused, code=Code.INSTANCE_EXISTS):
    """An instance of this name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Instance '{name}' already exists")


class AlreadyRunning(Refused, code=Code.ALREADY_RUNNING):
    """The instance to start is running or starting already."""

    def __init__(self, name: str, status: str) -> None:
        super().__init__(f"Instance '{name}' is already {status}")


class NotRunning(Refused, code=Code.NOT_RUNNING):
    """The instance to stop is stopped already."""

    def __init__(self, name: str, status: str) -> None:
        super().__init__(f"Instance '{name}' is not running (status: {status})")


class UpdateInProgress(Refused, code=Code.UPDATE_IN_PROGRESS):
    """The previous update of the instance is still running."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Instance '{name}' is being updated; ask again when that is done")


class UpdateFailed(Refused, code=Code.UPDATE_FAILED):
    """The workers of an update, or the successor of a daemon, did not start: the previous ones keep serving."""


class PortConflict(Refused, code=Code.PORT_CONFLICT):
    """An explicit port, or the path of a Unix socket, is used by another instance, the daemon, or another process."""

    def __init__(self, port: int | Path, holder: str) -> None:
        super().__init__(f"{'Port' if isinstance(port, int) else 'Socket'} {port} already in use by {holder}")


class TooLarge(Refused, code=Code.MESSAGE_TOO_LARGE):
    """A message exceeds its size limit; the text has both sizes."""


class Unsupported(Refused, code=Code.UNIMPLEMENTED):
    """The method or option is not implemented."""


class AmbiguousInstance(Refused, code=Code.AMBIGUOUS_INSTANCE):
    """The call names no instance, and there is not exactly one."""


class Unauthenticated(Refused, code=Code.UNAUTHENTICATED):
    """Credentials are missing or invalid."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Authentication required: {reason}")


class Forbidden(Refused, code=Code.FORBIDDEN):
    """The authenticated caller lacks the right."""


class ObjectNotFound(Refused, code=Code.OBJECT_NOT_FOUND):
    """The caller has no file or batch of this id (those of others are not revealed), or the host does not exist."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"No such {kind}: {id[:_SHOWN_ID_CHARS]}")


class ObjectInUse(Refused, code=Code.OBJECT_IN_USE):
    """The state of a file or batch does not allow the change."""


class QuotaExceeded(Refused, code=Code.STORAGE_QUOTA_EXCEEDED):
    """A limit on stored bytes or on the number of files or batches is reached; the text names the setting."""


class StorageFull(TryLater, code=Code.STORAGE_FULL):
    """The disk has no room for a file."""


class MaxInstancesReached(TryLater, code=Code.MAX_INSTANCES_REACHED):
    """`max_instances` is reached."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"Maximum instance count ({limit}) reached")


class PortAllocationFailed(TryLater, code=Code.PORT_ALLOCATION_FAILED):
    """The configured range has no free port."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Failed to allocate port: {reason}")


class Overloaded(TryLater, code=Code.OVERLOADED):
    """A bounded queue is full, or the call would wait in it for longer than its caller will."""

    def __init__(self, message: str = "Model is overloaded", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TenantQuotaReached(TryLater):
    """A quota of the caller's key does not allow the call now."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TokenRateExceeded(TenantQuotaReached, code=Code.TOKEN_RATE_EXCEEDED):
    """The key has used its tokens a second."""


class DailyTokensExceeded(TenantQuotaReached, code=Code.DAILY_TOKENS_EXCEEDED):
    """The key has used its tokens of the day, which begins at midnight in UTC."""


class ConcurrentTokensExceeded(TenantQuotaReached, code=Code.CONCURRENT_TOKENS_EXCEEDED):
    """Too many tokens of the key are in flight."""


class CallOverQuota(Refused, code=Code.CALL_OVER_QUOTA):
    """The call alone has more tokens than a quota of the caller's key: it is never admitted."""


class OutOfDeviceMemory(TryLater, code=Code.OUT_OF_DEVICE_MEMORY):
    """The model, or a single text, does not fit into the device's free memory."""


class KilledForMemory(TryLater, code=Code.KILLED_FOR_MEMORY):
    """The kernel killed the worker, as the memory of its host or cgroup was used up; it is tried again later."""


class Unavailable(TryLater, code=Code.BACKEND_UNAVAILABLE):
    """The instance exists but does not serve now."""


class Replaced(Unavailable):
    """The daemon is being replaced, and carries out no more commands; the next one does."""

    def __init__(self) -> None:
        super().__init__("the daemon is being replaced; send it again")
        self.try_after(2.0)


class Stopped(Unavailable):
    """The instance was stopped by a user: no attempt succeeds until it is started again."""


class NotLoaded(Unavailable):
    """The model of `instance` is loaded on demand, and is not loaded now: a call may ask for it, and wait."""

    def __init__(self, message: str, instance: str) -> None:
        super().__init__(message)
        self.instance = instance


class Returning(NotLoaded):
    """No worker of `instance` takes calls now, and one is expected soon: a call may wait for it."""


class FailedToLoad(Unavailable):
    """The instance failed: an attempt succeeds only after an operator's help or a late retry."""


class DeviceFailed(Unavailable):
    """The device reported a fault that lasts: no forward succeeds before another process has replaced this one."""


class Unreachable(Unavailable):
    """No connection to the server, or it was lost; `address` is the server's."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason


class NoHost(TryLater, code=Code.NO_HOST):
    """No host of the cluster takes the worker: none meets its requirements, or it was not placed in time."""


class StateNotSaved(TryLater, code=Code.STATE_NOT_SAVED):
    """The state file cannot be written, so the change was not made."""


class DeadlineExceeded(TryLater, code=Code.TIMEOUT):
    """The caller's deadline passed before the reply."""

    def __init__(self, message: str = "Request timeout") -> None:
        super().__init__(message)


class Cancelled(TryLater, code=Code.CANCELLED):
    """The caller cancelled or disconnected."""


class ModelLoadFailed(Broken, code=Code.MODEL_LOAD_FAILED):
    """The model cannot be loaded: its files are missing, broken, or of an unsupported kind."""


class ModelDownloadFailed(Broken, code=Code.MODEL_DOWNLOAD_FAILED):
    """The model's files could not be downloaded completely."""

    def __init__(self, model_id: str, reason: str) -> None:
        super().__init__(f"Failed to download model '{model_id}': {reason}")


class InferenceFailed(Broken, code=Code.INFERENCE_FAILED):
    """The forward pass failed, or its result has NaN or infinity."""


class Internal(Broken, code=Code.INTERNAL_ERROR):
    """An unexpected error; details are in the log."""


def error_from_code(
    code: int, message: str, *, input_index: int | None = None, retry_after_s: float | None = None
) -> TeimgrError:
    """The exception for a code and message from another process; unknown codes (a newer peer) become `Internal`."""
    kind = _BY_CODE.get(code, Internal)
    error = kind.__new__(kind)
    TeimgrError.__init__(error, message)
    error.input_index, error.retry_after_s = input_index, retry_after_s
    return error
