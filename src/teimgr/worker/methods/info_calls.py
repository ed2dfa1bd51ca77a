"""The methods of `tei.v1.Info` and `tei.v1.Tokenize`, which need no device."""

from __future__ import annotations

from collections.abc import Callable

from teimgr import __version__
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.worker.calls import CallReply, MethodCall, within
from teimgr.worker.dispatcher import Dispatcher

# TEI's types of the kinds that score; it calls every other model an embedding model.
_MODEL_TYPES = {"classifier": tei_pb2.MODEL_TYPE_CLASSIFIER, "reranker": tei_pb2.MODEL_TYPE_RERANKER}


def info(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`Info`: the model and the limits."""
    model, spec = dispatcher.engine.info, dispatcher.spec
    response = tei_pb2.InfoResponse(
        version=__version__,
        model_id=model.model_id,
        model_sha=model.model_sha,
        model_dtype=model.dtype,
        model_type=_MODEL_TYPES.get(model.kind, tei_pb2.MODEL_TYPE_EMBEDDING),
        max_concurrent_requests=spec.max_concurrent_requests,
        max_input_length=model.max_input_length,
        max_batch_tokens=model.max_batch_tokens,
        max_batch_requests=spec.max_batch_requests,
        max_client_batch_size=spec.max_client_batch_size,
        tokenization_workers=model.tokenization_workers,
    )
    call.reply(CallReply(response.SerializeToString()))


def tokenize(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`Tokenize`; absent flags are false here, unlike over HTTP. Special tokens have no offsets."""
    message = call.message(tei_pb2.EncodeRequest)
    prompt_name = message.prompt_name if message.HasField("prompt_name") else None

    def encoded() -> bytes:
        response = tei_pb2.EncodeResponse()
        for token in dispatcher.engine.tokenize(message.inputs, message.add_special_tokens, prompt_name):
            response.tokens.add(id=token.id, text=token.text, special=token.special, start=token.start, stop=token.stop)
        return response.SerializeToString()

    _off_loop(dispatcher, call, encoded)


def decode(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`Decode`: the text of token ids."""
    message = call.message(tei_pb2.DecodeRequest)

    def decoded() -> bytes:
        text = dispatcher.engine.decode(list(message.ids), message.skip_special_tokens)
        return tei_pb2.DecodeResponse(text=text).SerializeToString()

    _off_loop(dispatcher, call, decoded)


def _off_loop(dispatcher: Dispatcher, call: MethodCall, work: Callable[[], bytes]) -> None:
    """Tokenizer work takes no permit in TEI and is never refused for being too much, so it waits here."""
    call.may_wait = True

    async def answer() -> None:
        payload = await dispatcher.off_loop(work)
        dispatcher.answer(call, CallReply(within(payload, dispatcher.spec.max_message_bytes)))

    dispatcher.admit_async(call, answer)
