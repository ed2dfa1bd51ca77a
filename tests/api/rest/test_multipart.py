from __future__ import annotations

import asyncio
import time

import pytest
from starlette.requests import Request

from teimgr.api.rest.files import read_file_form
from teimgr.errors import ValidationError

_PARAMETERS = ("; a=b", ";", ';"', '; a="\\"')


def _read(content_type: str, body: bytes) -> float:
    """Processor time until a form is refused."""

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def keep(data: bytes) -> None: ...

    headers = [(b"content-type", content_type.encode())]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    began = time.process_time()
    with pytest.raises(ValidationError, match="more than 64 parameters"):
        asyncio.run(read_file_form(request, "file", keep))
    return time.process_time() - began


@pytest.mark.parametrize("parameter", _PARAMETERS)
def test_a_content_type_of_many_parameters_is_refused_unparsed(parameter: str) -> None:
    header = "multipart/form-data; boundary=B" + parameter * (60_000 // len(parameter))
    assert min(_read(header, b"") for _ in range(3)) < 0.02


@pytest.mark.parametrize("parameter", _PARAMETERS)
def test_a_part_of_many_parameters_is_refused_unparsed(parameter: str) -> None:
    value = "form-data; name=a" + parameter * (4000 // len(parameter))
    body = f"--B\r\nContent-Disposition: {value}\r\n\r\n\r\n".encode() * 30 + b"--B--\r\n"
    assert min(_read("multipart/form-data; boundary=B", body) for _ in range(3)) < 0.02
