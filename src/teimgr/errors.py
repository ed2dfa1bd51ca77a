"""Every failure teimgr can name, as one tree.

    TeimgrError
    ├── Refused                the caller can mend it
    │   ├── ValidationError        VALIDATION_ERROR
    │   ├── EmptyInput             EMPTY_INPUT
    │   ├── InvalidInput           INVALID_INPUT
    │   ├── TokenizerFailed        TOKENIZER_ERROR
    │   ├── WrongModelKind         WRONG_MODEL_KIND
    │   ├── InvalidConfig          INVALID_CONFIG
    │   ├── InvalidPort            INVALID_PORT
    │   ├── InvalidInstanceName    INVALID_INSTANCE_NAME
    │   ├── InvalidGpuId           INVALID_GPU_ID
    │   ├── InstanceNotFound       INSTANCE_NOT_FOUND
    │   ├── ModelNotFound          MODEL_NOT_FOUND
    │   ├── ModelGated             MODEL_GATED
    │   ├── ModelBusy              MODEL_BUSY
    │   ├── ModelInUse             MODEL_IN_USE
    │   ├── InstanceExists         INSTANCE_EXISTS
    │   ├── AlreadyRunning         ALREADY_RUNNING
    │   ├── NotRunning             NOT_RUNNING
    │   ├── UpdateInProgress       UPDATE_IN_PROGRESS
    │   ├── UpdateFailed           UPDATE_FAILED
    │   ├── PortConflict           PORT_CONFLICT
    │   ├── Unsupported            UNIMPLEMENTED
    │   ├── AmbiguousInstance      AMBIGUOUS_INSTANCE
    │   ├── Unauthenticated        UNAUTHENTICATED
    │   └── Forbidden              FORBIDDEN
    ├── TryLater                nothing is wrong with the request
    │   ├── MaxInstancesReached    MAX_INSTANCES_REACHED
    │   ├── PortAllocationFailed   PORT_ALLOCATION_FAILED
    │   ├── Overloaded             OVERLOADED
    │   ├── TooLarge               MESSAGE_TOO_LARGE
    │   ├── OutOfDeviceMemory      OUT_OF_DEVICE_MEMORY
    │   ├── Unavailable            BACKEND_UNAVAILABLE
    │   ├── DeadlineExceeded       TIMEOUT
    │   └── Cancelled              CANCELLED
    └── Broken                  our side failed
        ├── ModelLoadFailed        MODEL_LOAD_FAILED
        ├── ModelDownloadFailed    MODEL_DOWNLOAD_FAILED
        ├── InferenceFailed        INFERENCE_FAILED
        └── Internal               INTERNAL_ERROR

Nothing here knows HTTP or gRPC: `wire/status.py` holds the one table that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, unique
from typing import ClassVar


@unique
class Code(IntEnum):
    """The stable name of a failure; the number is what an error frame carries."""

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
    """A failure with a code and a sentence for the caller."""

    code: ClassVar[Code] = Code.INTERNAL_ERROR

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Refused(TeimgrError):
    """The request cannot be served as it is; sending it again changes nothing."""


class TryLater(TeimgrError):
    """The request is fine; the moment is not."""


class Broken(TeimgrError):
    """Something on our side failed."""


class ValidationError(Refused):
    """A field breaks a rule; the message names the field and the limit."""

    code = Code.VALIDATION_ERROR

    def __init__(self, message: str) -> None:
        super().__init__(f"Validation error: {message}")


class EmptyInput(Refused):
    """There is no text to work on."""

    code = Code.EMPTY_INPUT

    def __init__(self, message: str = "Input validation error: `inputs` cannot be empty") -> None:
        super().__init__(message)


class InvalidInput(Refused):
    """A text or an option of an inference call breaks a limit of the model."""

    code = Code.INVALID_INPUT


class TokenizerFailed(Refused):
    """The tokenizer library refused the text."""

    code = Code.TOKENIZER_ERROR


class WrongModelKind(Refused):
    """The model does not do what the call asks for."""

    code = Code.WRONG_MODEL_KIND


class InvalidConfig(Refused):
    """A setting, a flag or a model file is wrong; the message says which and why."""

    code = Code.INVALID_CONFIG


class InvalidPort(Refused):
    """A port number outside what may be bound."""

    code = Code.INVALID_PORT


class InvalidInstanceName(Refused):
    """The name is not a letter or digit followed by up to 63 of `A-Z a-z 0-9 . _ -`."""

    code = Code.INVALID_INSTANCE_NAME

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Invalid instance name {name!r}: {reason}")


class InvalidGpuId(Refused):
    """No such GPU on this host."""

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
    """The model is neither a local directory nor to be had from the hub."""

    code = Code.MODEL_NOT_FOUND


class ModelGated(Refused):
    """The hub has the model and asks for a licence to be accepted first, or for a token that has done so."""

    code = Code.MODEL_GATED


class ModelBusy(Refused):
    """The model is being downloaded or tried already."""

    code = Code.MODEL_BUSY

    def __init__(self, model_id: str, doing: str) -> None:
        super().__init__(f"Model '{model_id}' is already {doing}")


class ModelInUse(Refused):
    """Instances want the model, so it cannot be deleted."""

    code = Code.MODEL_IN_USE

    def __init__(self, model_id: str, names: Sequence[str]) -> None:
        super().__init__(f"Model '{model_id}' is used by {', '.join(names)}; delete these instances first")


class InstanceExists(Refused):
    """The name is taken."""

    code = Code.INSTANCE_EXISTS

    def __init__(self, name: str) -> None:
        super().__init__(f"Instance '{name}' already exists")


class AlreadyRunning(Refused):
    """A start was asked of an instance that is wanted running."""

    code = Code.ALREADY_RUNNING

    def __init__(self, name: str, status: str) -> None:
        super().__init__(f"Instance '{name}' is already {status}")


class NotRunning(Refused):
    """A stop was asked of an instance that is stopped."""

    code = Code.NOT_RUNNING

    def __init__(self, name: str, status: str) -> None:
        super().__init__(f"Instance '{name}' is not running (status: {status})")


class UpdateInProgress(Refused):
    """An instance is changed while the change before is still under way."""

    code = Code.UPDATE_IN_PROGRESS

    def __init__(self, name: str) -> None:
        super().__init__(f"Instance '{name}' is being updated; ask again when that is done")


class UpdateFailed(Refused):
    """The workers of a change did not come up; the instance is as it was before."""

    code = Code.UPDATE_FAILED


class PortConflict(Refused):
    """An explicit port is taken by another instance, by the daemon, or by a stranger."""

    code = Code.PORT_CONFLICT

    def __init__(self, port: int, holder: str) -> None:
        super().__init__(f"Port {port} already in use by {holder}")


class Unsupported(Refused):
    """The call exists in the contract and is not served."""

    code = Code.UNIMPLEMENTED


class AmbiguousInstance(Refused):
    """The call names no instance, and there is not exactly one to choose."""

    code = Code.AMBIGUOUS_INSTANCE


class Unauthenticated(Refused):
    """The caller has not shown who he is, or shows what is not accepted."""

    code = Code.UNAUTHENTICATED

    def __init__(self, reason: str) -> None:
        super().__init__(f"Authentication required: {reason}")


class Forbidden(Refused):
    """The caller is known and may not do this."""

    code = Code.FORBIDDEN


class MaxInstancesReached(TryLater):
    """`max_instances` is used up."""

    code = Code.MAX_INSTANCES_REACHED

    def __init__(self, limit: int) -> None:
        super().__init__(f"Maximum instance count ({limit}) reached")


class PortAllocationFailed(TryLater):
    """No free port in the configured range."""

    code = Code.PORT_ALLOCATION_FAILED

    def __init__(self, reason: str) -> None:
        super().__init__(f"Failed to allocate port: {reason}")


class Overloaded(TryLater):
    """A bounded queue is full."""

    code = Code.OVERLOADED

    def __init__(self, message: str = "Model is overloaded") -> None:
        super().__init__(message)


class TooLarge(TryLater):
    """A message is over its size limit; the text names both sizes."""

    code = Code.MESSAGE_TOO_LARGE


class OutOfDeviceMemory(TryLater):
    """One text alone does not fit the device's free memory."""

    code = Code.OUT_OF_DEVICE_MEMORY


class Unavailable(TryLater):
    """The instance is known and does not serve now."""

    code = Code.BACKEND_UNAVAILABLE


class DeadlineExceeded(TryLater):
    """The caller's deadline passed before the answer was there."""

    code = Code.TIMEOUT

    def __init__(self, message: str = "Request timeout") -> None:
        super().__init__(message)


class Cancelled(TryLater):
    """The caller went away."""

    code = Code.CANCELLED


class ModelLoadFailed(Broken):
    """The model's files are there and cannot be turned into a serving engine."""

    code = Code.MODEL_LOAD_FAILED


class ModelDownloadFailed(Broken):
    """The model's files could not be fetched whole."""

    code = Code.MODEL_DOWNLOAD_FAILED

    def __init__(self, model_id: str, reason: str) -> None:
        super().__init__(f"Failed to download model '{model_id}': {reason}")


class InferenceFailed(Broken):
    """The forward failed, or gave a vector with NaN or infinity in it."""

    code = Code.INFERENCE_FAILED


class Internal(Broken):
    """A defect of ours; details are in the log."""

    code = Code.INTERNAL_ERROR


def error_from_code(code: int, message: str) -> TeimgrError:
    """The exception another process meant: same code, same text.

    Unknown numbers (a newer peer) become `Internal`.
    """
    kind = _BY_CODE.get(code, Internal)
    error = kind.__new__(kind)
    TeimgrError.__init__(error, message)
    return error


def _leaves(kind: type[TeimgrError]) -> list[type[TeimgrError]]:
    below = kind.__subclasses__()
    return [kind] if not below else [leaf for sub in below for leaf in _leaves(sub)]


_BY_CODE: dict[int, type[TeimgrError]] = {kind.code: kind for kind in _leaves(TeimgrError)}
