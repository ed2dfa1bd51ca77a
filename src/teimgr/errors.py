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
    MAX_INSTANCES_REACHED = 32
    PORT_ALLOCATION_FAILED = 33
    OVERLOADED = 34
    MESSAGE_TOO_LARGE = 35
    OUT_OF_DEVICE_MEMORY = 36
    BACKEND_UNAVAILABLE = 37
    TIMEOUT = 38
    CANCELLED = 39
    MODEL_LOAD_FAILED = 64
    INFERENCE_FAILED = 65
    INTERNAL_ERROR = 66
    MODEL_DOWNLOAD_FAILED = 67


class TeimgrError(Exception):
    """An error with a code and a message for the caller."""

    code: ClassVar[Code] = Code.INTERNAL_ERROR

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Refused(TeimgrError):
    """The caller's error; repeating the request changes nothing."""


class TryLater(TeimgrError):
    """The request is valid, but cannot be served now."""


class Broken(TeimgrError):
    """A failure on our side."""


class ValidationError(Refused):
    """A field breaks a rule; the message names the field and the limit."""

    code = Code.VALIDATION_ERROR

    def __init__(self, message: str) -> None:
        super().__init__(f"Validation error: {message}")


class EmptyInput(Refused):
    """The input has no text."""

    code = Code.EMPTY_INPUT

    def __init__(self, message: str = "Input validation error: `inputs` cannot be empty") -> None:
        super().__init__(message)


class InvalidInput(Refused):
    """A text or option of an inference call exceeds a limit of the model."""

    code = Code.INVALID_INPUT


class TokenizerFailed(Refused):
    """The tokenizer library failed on the text."""

    code = Code.TOKENIZER_ERROR


class WrongModelKind(Refused):
    """The model does not support the called method."""

    code = Code.WRONG_MODEL_KIND


class InvalidConfig(Refused):
    """A setting, a flag or a model file is invalid; the message names it."""

    code = Code.INVALID_CONFIG


class InvalidPort(Refused):
    """A port number out of range."""

    code = Code.INVALID_PORT


class InvalidInstanceName(Refused):
    """The name is not a letter or digit followed by up to 63 of `A-Z a-z 0-9 . _ -`."""

    code = Code.INVALID_INSTANCE_NAME

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Invalid instance name {name!r}: {reason}")


class InvalidGpuId(Refused):
    """The host has no such GPU."""

    code = Code.INVALID_GPU_ID

    def __init__(self, gpu_id: int, available: list[int], reason: str = "") -> None:
        tail = f" ({reason})" if reason else ""
        super().__init__(f"Invalid GPU ID {gpu_id}: Available GPUs: {available}{tail}")


class InstanceNotFound(Refused):
    """No instance has this name."""

    code = Code.INSTANCE_NOT_FOUND

    def __init__(self, name: str) -> None:
        super().__init__(f"Instance '{name}' not found")


class ModelNotFound(Refused):
    """The model is neither a local directory nor on the hub."""

    code = Code.MODEL_NOT_FOUND


class ModelGated(Refused):
    """The hub requires an accepted licence, or a token of an account that accepted it."""

    code = Code.MODEL_GATED


class ModelBusy(Refused):
    """A download or trial of the model is already running."""

    code = Code.MODEL_BUSY

    def __init__(self, model_id: str, doing: str) -> None:
        super().__init__(f"Model '{model_id}' is already {doing}")


class ModelInUse(Refused):
    """Instances use the model, so it cannot be deleted."""

    code = Code.MODEL_IN_USE

    def __init__(self, model_id: str, names: Sequence[str]) -> None:
        super().__init__(f"Model '{model_id}' is used by {', '.join(names)}; delete these instances first")


class InstanceExists(Refused):
    """An instance of this name exists."""

    code = Code.INSTANCE_EXISTS

    def __init__(self, name: str) -> None:
        super().__init__(f"Instance '{name}' already exists")


class AlreadyRunning(Refused):
    """Start of an instance that is running or starting."""

    code = Code.ALREADY_RUNNING

    def __init__(self, name: str, status: str) -> None:
        super().__init__(f"Instance '{name}' is already {status}")


class NotRunning(Refused):
    """Stop of an instance that is stopped."""

    code = Code.NOT_RUNNING

    def __init__(self, name: str, status: str) -> None:
        super().__init__(f"Instance '{name}' is not running (status: {status})")


class UpdateInProgress(Refused):
    """Update of an instance whose previous update is still running."""

    code = Code.UPDATE_IN_PROGRESS

    def __init__(self, name: str) -> None:
        super().__init__(f"Instance '{name}' is being updated; ask again when that is done")


class UpdateFailed(Refused):
    """The workers of an update did not start; the instance was rolled back."""

    code = Code.UPDATE_FAILED


class PortConflict(Refused):
    """An explicit port is used by another instance, the daemon, or another process."""

    code = Code.PORT_CONFLICT

    def __init__(self, port: int, holder: str) -> None:
        super().__init__(f"Port {port} already in use by {holder}")


class Unsupported(Refused):
    """The method or option is not implemented."""

    code = Code.UNIMPLEMENTED


class AmbiguousInstance(Refused):
    """The call names no instance, and there is not exactly one."""

    code = Code.AMBIGUOUS_INSTANCE


class Unauthenticated(Refused):
    """Credentials are missing or invalid."""

    code = Code.UNAUTHENTICATED

    def __init__(self, reason: str) -> None:
        super().__init__(f"Authentication required: {reason}")


class Forbidden(Refused):
    """The authenticated caller lacks the right."""

    code = Code.FORBIDDEN


class MaxInstancesReached(TryLater):
    """`max_instances` is reached."""

    code = Code.MAX_INSTANCES_REACHED

    def __init__(self, limit: int) -> None:
        super().__init__(f"Maximum instance count ({limit}) reached")


class PortAllocationFailed(TryLater):
    """The configured range has no free port."""

    code = Code.PORT_ALLOCATION_FAILED

    def __init__(self, reason: str) -> None:
        super().__init__(f"Failed to allocate port: {reason}")


class Overloaded(TryLater):
    """A bounded queue is full."""

    code = Code.OVERLOADED

    def __init__(self, message: str = "Model is overloaded") -> None:
        super().__init__(message)


class TooLarge(TryLater):
    """A message exceeds its size limit; the text has both sizes."""

    code = Code.MESSAGE_TOO_LARGE


class OutOfDeviceMemory(TryLater):
    """A single text does not fit into the device's free memory."""

    code = Code.OUT_OF_DEVICE_MEMORY


class Unavailable(TryLater):
    """The instance exists but does not serve now."""

    code = Code.BACKEND_UNAVAILABLE


class DeadlineExceeded(TryLater):
    """The caller's deadline passed before the reply."""

    code = Code.TIMEOUT

    def __init__(self, message: str = "Request timeout") -> None:
        super().__init__(message)


class Cancelled(TryLater):
    """The caller cancelled or disconnected."""

    code = Code.CANCELLED


class ModelLoadFailed(Broken):
    """The model's files are present but cannot be loaded."""

    code = Code.MODEL_LOAD_FAILED


class ModelDownloadFailed(Broken):
    """The model's files could not be downloaded completely."""

    code = Code.MODEL_DOWNLOAD_FAILED

    def __init__(self, model_id: str, reason: str) -> None:
        super().__init__(f"Failed to download model '{model_id}': {reason}")


class InferenceFailed(Broken):
    """The forward pass failed, or its result has NaN or infinity."""

    code = Code.INFERENCE_FAILED


class Internal(Broken):
    """An unexpected error; details are in the log."""

    code = Code.INTERNAL_ERROR


def error_from_code(code: int, message: str) -> TeimgrError:
    """The exception for a code and message from another process; unknown codes (a newer peer) become `Internal`."""
    kind = _BY_CODE.get(code, Internal)
    error = kind.__new__(kind)
    TeimgrError.__init__(error, message)
    return error


def _leaves(kind: type[TeimgrError]) -> list[type[TeimgrError]]:
    below = kind.__subclasses__()
    return [kind] if not below else [leaf for sub in below for leaf in _leaves(sub)]


_BY_CODE: dict[int, type[TeimgrError]] = {kind.code: kind for kind in _leaves(TeimgrError)}
