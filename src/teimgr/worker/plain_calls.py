"""The calls that need no device: what the model is, text to tokens, tokens to text."""

from __future__ import annotations

from collections.abc import Callable

from teimgr.pb.tei.v1 import tei_pb2
from teimgr.wire.frames import Method
from teimgr.worker import convert
from teimgr.worker.calls import Handler, MethodCall, Reply, within
from teimgr.worker.desk import Desk


class PlainCalls:
    """What a worker does with each of them; `handlers` is the table."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.handlers: dict[int, Handler] = {
            Method.INFO: self._info,
            Method.TOKENIZE: self._tokenize,
            Method.DECODE: self._decode,
        }

    def _info(self, call: MethodCall) -> None:
        call.reply(Reply(convert.info_response(self._desk.engine.info, self._desk.spec)))

    def _tokenize(self, call: MethodCall) -> None:
        """Absent flags are false here, unlike over HTTP."""
        message = convert.parse(tei_pb2.EncodeRequest, call.payload)
        prompt_name = message.prompt_name if message.HasField("prompt_name") else None

        def work() -> bytes:
            tokens = self._desk.engine.tokenize(message.inputs, message.add_special_tokens, prompt_name)
            return convert.encode_response(tokens)

        self._aside(call, work)

    def _decode(self, call: MethodCall) -> None:
        message = convert.parse(tei_pb2.DecodeRequest, call.payload)

        def work() -> bytes:
            text = self._desk.engine.decode(list(message.ids), message.skip_special_tokens)
            return tei_pb2.DecodeResponse(text=text).SerializeToString()

        self._aside(call, work)

    def _aside(self, call: MethodCall, work: Callable[[], bytes]) -> None:
        """Work of the tokenizer: it takes no permit in TEI and is never refused for being too much, so it waits."""
        call.may_wait = True

        async def run() -> None:
            payload = await self._desk.off_loop(work)
            self._desk.answer(call, Reply(within(payload, self._desk.spec.max_message_bytes)))

        self._desk.enter_async(call, run)
