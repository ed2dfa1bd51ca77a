"""The bodies of the model registry's routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from teimgr.control.registry.registry import TrialWish
from teimgr.control.registry.view import ModelStatus
from teimgr.front.schemas import Text
from teimgr.settings import U32

ModelId = Annotated[Text, Field(min_length=1, description="id on the model hub, or a local directory")]
Revision = Annotated[Text, Field(min_length=1, description="branch, tag or commit on the hub")]


class Strict(BaseModel):
    """No unknown field, no text where a number is meant."""

    model_config = ConfigDict(strict=True, extra="forbid")


class AddModel(Strict):
    """What POST /models takes."""

    model_id: ModelId
    revision: Revision | None = None


class DownloadModel(Strict):
    """What a download may be told; an absent body is an empty one."""

    revision: Revision | None = None
    update: bool = Field(False, description="ask the hub also where the model is here: the branch may have moved")


class LoadModel(Strict):
    """What a trial may be told; an absent body is an empty one."""

    gpu_id: int | None = Field(None, ge=0, le=U32, description="index of the GPU; absent: the freest one")
    device: Literal["auto", "cpu"] = Field("auto", description="cpu: not on a GPU, even if there is one")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="element type")
    revision: Revision | None = None
    trust_remote_code: bool = Field(False, description="run code of the model's own repository")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.gpu_id is not None and self.device == "cpu":
            raise ValueError("gpu_id and device 'cpu' exclude each other")
        return self

    def wish(self) -> TrialWish:
        """The trial that is asked for."""
        values = self.model_dump(exclude={"device"})
        return TrialWish(on_cpu=self.device == "cpu", **values)


class ModelFileInfo(BaseModel):
    """One file of a model."""

    path: str
    size_bytes: int


class ModelCommit(BaseModel):
    """One commit of a model in the hub's cache."""

    commit: str
    refs: list[str]
    size_bytes: int
    complete: bool


class DownloadProgress(BaseModel):
    """How far a download is; what is not known yet is absent."""

    phase: Literal["waiting", "listing", "fetching", "done"]
    bytes_done: int
    bytes_total: int | None = None
    files_done: int
    files_total: int | None = None
    rate_bytes_per_s: float | None = None
    eta_s: float | None = None


class Verification(BaseModel):
    """What the last passed trial measured; what could not be measured is absent. Sizes are bytes, times seconds."""

    device: str
    gpu_id: int | None = None
    dtype: str
    kind: str
    dimension: int
    max_input_length: int
    batching: str
    start_s: float
    load_s: float
    peak_rss_bytes: int | None = None
    private_bytes: int | None = None
    device_bytes: int | None = None
    texts_per_s: float
    tokens_per_s: float


class ModelInfo(BaseModel):
    """One model. A key without a value is absent."""

    model_id: str
    status: ModelStatus
    downloaded: bool = Field(description="a worker finds all it needs on this host")
    added_at: str
    cache_path: str | None = None
    cache_size_bytes: int | None = Field(None, description="of the files of this commit")
    last_verified: str | None = Field(None, description="when a trial last passed")
    verification_error: str | None = Field(None, description="why the last trial failed; a pass clears it")
    verification: Verification | None = None
    metadata: dict[str, Any] | None = Field(None, description="some facts of config.json")
    revision: str | None = Field(None, description="what was asked for last; absent: main")
    commit: str | None = None
    commits: list[ModelCommit] | None = Field(None, description="all that the cache has, the newest first")
    files: list[ModelFileInfo] | None = None
    used_by: list[str] = Field(description="instances that want it")
    gated: bool | None = Field(None, description="the hub asks for its licence to be accepted")
    progress: DownloadProgress | None = Field(None, description="while it is being downloaded")
    download_error: str | None = Field(None, description="why the last download since the daemon's start failed")
