"""The native forward against the model's own, for every instruction set of this CPU."""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine.plain_models import random_texts
from tests.support.native import LIBRARY, MULTIPLIES_BYTES, needs_int8, needs_native_forward
from torch import Tensor
from torch.nn import functional

from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.engine.core_load import HelperWaits
from teimgr.engine.heads.pooling import finish, pool
from teimgr.engine.native_forward.kernel import ForwardKernel, forward_kernel
from teimgr.engine.native_forward.lowering import lower
from teimgr.engine.native_forward.program import CannotLowerError, Columns, ForwardProgram, Step, Table
from teimgr.engine.native_forward.trace import trace_forward
from teimgr.engine.native_library import BFLOAT16_LEVEL, LEVELS

pytestmark = needs_native_forward
# Those that have a code of their own; attention alone has one for "baseline".
HERE = LEVELS[1 : LIBRARY.level + 1] if LIBRARY else ()
MULTIPLY_BFLOAT16 = [level for level in HERE if LEVELS.index(level) >= BFLOAT16_LEVEL]
VOCABULARY = 300
_WIDE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "intermediate_size": 208,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, transformers.PreTrainedConfig] = {
    "bert": transformers.BertConfig(**_WIDE, num_attention_heads=3, type_vocab_size=2),
    "modernbert": transformers.ModernBertConfig(
        **_WIDE, num_attention_heads=3, local_attention=16, global_attn_every_n_layers=2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    ),
    "qwen3": transformers.Qwen3Config(**_WIDE, **_HEADS),
    "gemma3": transformers.Gemma3TextConfig(
        **_WIDE, **_HEADS, sliding_window=12, use_bidirectional_attention=True, query_pre_attn_scalar=32
    ),
}  # fmt: skip
LENGTHS = (1, 2, 5, 6, 7, 13, 64, 65, 130, 300)


@pytest.fixture(scope="module", params=sorted(MODELS))
def module(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = MODELS[request.param]
    more = {"add_pooling_layer": False} if request.param == "bert" else {}
    made = transformers.AutoModel.from_config(config, attn_implementation="sdpa", **more)
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(MODELS["bert"], add_pooling_layer=False).eval().requires_grad_(False)


def options(module: Any) -> dict[str, Any]:
    return {"use_cache": False} if module.config.model_type in ("qwen3", "gemma3_text") else {}


def texts_of(lengths: Sequence[int], **fields: Any) -> list[Encoded]:
    return [Encoded(ids, **fields) for ids in random_texts(lengths)]


def own(module: Any, text: Encoded) -> Tensor:
    """The model's own hidden states of one text, [length, H]."""
    inputs = {"input_ids": torch.from_numpy(text.ids.astype(np.int64))[None], **options(module)}
    if text.type_ids is not None:
        inputs["token_type_ids"] = torch.from_numpy(text.type_ids.astype(np.int64))[None]
    if text.keys is not None:
        inputs["attention_mask"] = (torch.arange(len(text.ids)) < text.keys).long()[None]
    with torch.inference_mode():
        hidden: Tensor = module(**inputs).last_hidden_state[0]
    return hidden


def skip_where_not_multiplied(dtype: torch.dtype) -> None:
    if dtype is torch.int8 and not MULTIPLIES_BYTES:
        pytest.skip("this CPU multiplies no bytes")


def run(kernel: ForwardKernel, batch: PackedBatch, threads: int = 1) -> list[Tensor]:
    """Hidden states by text, in the order of `pack`'s argument."""
    hidden = kernel(batch, batch.position_ids, threads)
    parts = hidden.split(np.diff(batch.cu_seqlens).tolist())
    return [parts[place] for place in np.argsort(batch.order)]


@pytest.mark.parametrize("level", HERE)
def test_float32_is_the_models_own_forward(module: Any, level: str) -> None:
    kernel = ForwardKernel(lower(trace_forward(module, options(module))), torch.float32, level=level)
    texts = texts_of(LENGTHS)

    for text, found in zip(texts, run(kernel, pack(texts)), strict=True):
        torch.testing.assert_close(found, own(module, text), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("level", HERE)
def test_weights_that_a_file_has_in_16_bits_are_kept_so_and_give_the_bits_of_float32(
    bert: Any, level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer of the second half has another number, and stays float32."""
    module = copy.deepcopy(bert)
    for parameter in module.encoder.parameters():
        parameter.data = parameter.data.to(dtype).float()
    module.encoder.layer[1].output.dense.weight.data[3, 5] = 1.0001
    program = lower(trace_forward(module, {}))
    halved = ForwardKernel(program, torch.float32, level=level)
    monkeypatch.setattr("teimgr.engine.native_forward.kernel.narrowest", lambda parts: torch.float32)
    whole = ForwardKernel(program, torch.float32, level=level)
    of_halves = sum(step.weights_size for step in halved._steps)
    assert 0.5 < of_halves / sum(step.weights_size for step in whole._steps) < 0.7

    for lengths in ((1,), (6,), (13,), (18,), (19,), (64,), (65,), (200,), LENGTHS):
        batch = pack(texts_of(lengths))
        for threads in (1, 2):
            for found, expected in zip(run(halved, batch, threads), run(whole, batch, threads), strict=True):
                assert torch.equal(found, expected), (lengths, threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("level", HERE)
def test_16_bits_that_are_not_multiplied_give_the_bits_of_float32_with_rounded_weights(
    bert: Any, level: str, dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16 and level in MULTIPLY_BFLOAT16:
        pytest.skip(f"{level} multiplies bfloat16")
    rounded = copy.deepcopy(bert)
    for layer in rounded.encoder.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = layer.weight.data.to(dtype).float()
    kept = ForwardKernel(lower(trace_forward(bert, {})), dtype, level=level)
    whole = ForwardKernel(lower(trace_forward(rounded, {})), torch.float32, level=level)
    assert kept.multiplies is torch.float32

    batch = pack(texts_of(LENGTHS))
    for found, expected in zip(run(kept, batch, 2), run(whole, batch, 2), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("level", MULTIPLY_BFLOAT16)
def test_bfloat16_is_close(module: Any, level: str) -> None:
    kernel = ForwardKernel(lower(trace_forward(module, options(module))), torch.bfloat16, level=level)
    texts = texts_of(LENGTHS)

    for text, found in zip(texts, run(kernel, pack(texts)), strict=True):
        cosine = torch.nn.functional.cosine_similarity(found, own(module, text), dim=1)
        assert float(cosine.min()) > 0.999


@needs_int8
@pytest.mark.parametrize("level", HERE)
def test_int8_is_near(module: Any, level: str) -> None:
    kernel = ForwardKernel(lower(trace_forward(module, options(module))), torch.int8, level=level)
    texts = texts_of(LENGTHS)

    for text, found in zip(texts, run(kernel, pack(texts)), strict=True):
        cosine = torch.nn.functional.cosine_similarity(found, own(module, text), dim=1)
        assert float(cosine.min()) > 0.99


@needs_int8
@pytest.mark.parametrize("level", HERE)
def test_sums_of_the_largest_bytes_do_not_saturate(level: str) -> None:
    """All products are the largest that there are."""
    width = 256
    weights = torch.ones(64, width)
    weights[1] = -1.0
    steps = (
        Step("embed", 0, width, tables=((torch.ones(2, width), "ids"),)),
        Step("linear", 1, 64, x=Columns(0, 0, width), weights=weights),
    )
    kernel = ForwardKernel(ForwardProgram(steps, 64), torch.int8, level=level)

    (found,) = run(kernel, pack([Encoded(np.array([0], np.int32))]))

    # Of sums in 16 bits four equal weights are 32 steps each, of others one is 127.
    torch.testing.assert_close(found[0], weights.sum(dim=1), atol=0.0, rtol=0.01)


@needs_int8
def test_a_number_that_is_not_finite_is_not_hidden_by_int8(bert: Any) -> None:
    broken = copy.deepcopy(bert)
    broken.embeddings.word_embeddings.weight[7] = float("nan")
    kernel = forward_kernel(broken, {}, torch.int8)[0]

    found, sound = run(kernel, pack([Encoded(np.array([3, 7, 5], np.int32)), Encoded(np.array([3, 4], np.int32))]))

    assert found.isnan().any()
    assert sound.isfinite().all()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_an_activation_of_every_number(activation: str, level: str) -> None:
    """Of NaN it is NaN: a fault must not become a plausible vector."""
    table = torch.cat([torch.linspace(-30, 30, 47), torch.tensor([torch.nan])]).reshape(3, 16)
    steps = (
        Step("embed", 0, 16, tables=((table, "ids"),)),
        Step("activate", 1, 16, x=Columns(0, 0, 16), activation=activation),
    )
    kernel = ForwardKernel(ForwardProgram(steps, 16), torch.float32, level=level)

    (found,) = run(kernel, pack([Encoded(np.arange(3, dtype=np.int32))]))

    expected = ACTIVATIONS[activation](table)
    assert int(expected.isnan().sum()) == 1
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_linear_layer_adds_its_own_input(dtype: torch.dtype) -> None:
    """h + W h: the same columns as bfloat16, or bytes, and as float32."""
    skip_where_not_multiplied(dtype)
    torch.manual_seed(0)
    table, weights = torch.randn(20, 64), torch.randn(64, 64) / 8
    steps = (
        Step("embed", 0, 64, tables=((table, "ids"),)),
        Step("linear", 1, 64, x=Columns(0, 0, 64), with_=Columns(0, 0, 64), weights=weights),
    )
    kernel = ForwardKernel(ForwardProgram(steps, 64), dtype)

    (found,) = run(kernel, pack([Encoded(np.arange(20, dtype=np.int32))]))

    expected = table + table @ weights.T
    assert float(functional.cosine_similarity(found, expected, dim=1).min()) > 0.999


@pytest.mark.skipif(sys.platform != "linux", reason="its threads are Linux's")
def test_a_forward_in_the_background_pauses_for_others_and_ends_beside_them(module: Any) -> None:
    """A forward that never ends stands for the others: the background keeps its share."""
    assert LIBRARY is not None
    kernel, batch = forward_kernel(module, options(module), torch.float32)[0], pack(texts_of((40, 40)))
    expected, library = kernel(batch, batch.position_ids, 1), ctypes.CDLL(LIBRARY.path)
    library.forward_begins(4096)  # more threads than there are cores
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(1, initializer=LIBRARY.to_background) as background:
            found = background.submit(kernel, batch, batch.position_ids, 1).result(60)
    finally:
        library.forward_ends(4096, 0)
    assert torch.equal(found, expected)
    assert time.monotonic() - began > 0.09  # its first pause, as long as any


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_text_has_the_same_result_alone_in_any_batch_and_with_any_threads(module: Any, dtype: torch.dtype) -> None:
    skip_where_not_multiplied(dtype)
    kernel = forward_kernel(module, options(module), dtype)[0]
    texts = texts_of((*LENGTHS, *[40] * 12))  # enough for groups of their own

    together = run(kernel, pack(texts))

    for text, found in zip(texts, together, strict=True):
        assert torch.equal(run(kernel, pack([text]))[0], found)
        assert torch.equal(run(kernel, pack([text]), threads=2)[0], found)  # threads share each step
    for found, again in zip(together, run(kernel, pack(texts), threads=2), strict=True):
        assert torch.equal(found, again)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("count", [4, 5, 7, 11])
def test_threads_divide_few_long_texts_evenly_with_the_same_bits(bert: Any, count: int, threads: int) -> None:
    """Of five long texts one thread of two would have three: the last one is shared step by step."""
    kernel = forward_kernel(bert, {}, torch.float32)[0]
    texts = texts_of([*[60] * count, 9, 30])

    for text, found in zip(texts, run(kernel, pack(texts), threads), strict=True):
        assert torch.equal(run(kernel, pack([text]))[0], found)


def test_token_types_and_masked_keys(bert: Any) -> None:
    kernel = forward_kernel(bert, {}, torch.float32)[0]
    lengths = (9, 4, 40)
    texts = [
        Encoded(ids, type_ids=(np.arange(len(ids)) > 3).astype(np.uint8), keys=max(1, len(ids) - 3))
        for ids in random_texts(lengths)
    ]

    for text, found in zip(texts, run(kernel, pack(texts)), strict=True):
        torch.testing.assert_close(found, own(bert, text), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_group_of_more_texts_than_tokens(bert: Any, threads: int) -> None:
    """Texts without tokens, of which the engine makes none."""
    kernel = forward_kernel(bert, {}, torch.float32)[0]
    ids = np.array([3, 7, 5], np.int64)
    begins = np.array([0] * 5000 + [3] * 5000, np.int32)
    alone = pack([Encoded(ids.astype(np.int32))])
    many = replace(alone, cu_seqlens=begins, order=np.arange(len(begins) - 1))

    assert many.texts == 9999
    assert torch.equal(kernel(many, many.position_ids, threads), kernel(alone, alone.position_ids, 1))


def test_small_batches_are_computed_by_one_thread_while_helpers_are_held_up(
    bert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = forward_kernel(bert, {}, torch.float32)[0]
    now, threads, forward = 100.0, list[int](), kernel._library.forward
    kernel._helper_waits = HelperWaits(lambda: now)

    def held_up(call: Any) -> Any:
        threads.append(call._obj.threads)
        status = forward(call)
        call._obj.waited = 5_000_000
        return status

    monkeypatch.setattr(kernel._library, "forward", held_up)
    for lengths in ((200, 200), (8,), (9,), (400, 200), (10,), (11,)):
        run(kernel, pack(texts_of(lengths)), threads=2)
    now += 1.1
    run(kernel, pack(texts_of((8,))), threads=2)

    assert threads == [2, 2, 2, 2, 1, 1, 2]  # the fourth is no small one


def test_tables_of_positions_grow_with_the_longest_text() -> None:
    torch.manual_seed(0)
    made = transformers.AutoModel.from_config(MODELS["qwen3"], attn_implementation="sdpa").eval().requires_grad_(False)
    kernel = forward_kernel(made, {"use_cache": False}, torch.float32)[0]
    short, long = texts_of([8, 1100])

    first = run(kernel, pack([short]))[0]
    torch.testing.assert_close(run(kernel, pack([long]))[0], own(made, long), atol=3e-4, rtol=1e-3)
    assert torch.equal(run(kernel, pack([short]))[0], first)


def live_tensors(*shape: int) -> list[Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Tensor and one.shape == shape]


def has_rows(kernel: ForwardKernel, step: Step, positions: int) -> bool:
    """Whether the library reads, bit for bit, the tables that the step would compute for itself."""
    by_address = {table.data_ptr(): table for table in kernel._sized.tables}
    read = [by_address[at] for at in kernel._sized.steps[step.key].tables if at is not None]
    wanted = [table.rows(positions) for table, _ in step.tables if isinstance(table, Table)]
    return len(wanted) == 2 and all(map(torch.equal, read, wanted))


@pytest.mark.parametrize(("name", "distinct"), [("qwen3", 2), ("modernbert", 4)])
def test_steps_share_equal_tables_of_positions(name: str, distinct: int) -> None:
    """Two for every kind of rotation, cosines and sines, however many layers: here 4 × 2 × 2 steps with two each."""
    config = copy.deepcopy(MODELS[name])
    config.num_hidden_layers = 4
    config.layer_types = None if name == "qwen3" else ["full_attention", "sliding_attention"] * 2
    torch.manual_seed(0)
    made = transformers.AutoModel.from_config(type(config)(**config.to_dict()), attn_implementation="sdpa").eval()
    made.requires_grad_(False)
    kernel, program = forward_kernel(made, options(made), torch.float32)
    steps = [step for step in program.steps if step.kind == "rotate"]
    assert len(steps) == 8

    for length, positions, former in ((8, 512, 0), (1100, 2048, 512)):
        run(kernel, pack(texts_of([length])))

        assert len(live_tensors(positions, steps[0].width)) == distinct
        assert not live_tensors(former, steps[0].width)
        assert all(has_rows(kernel, step, positions) for step in steps)


def test_smaller_tables_are_freed_when_the_last_call_that_reads_them_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    made = transformers.AutoModel.from_config(MODELS["qwen3"], attn_implementation="sdpa").eval().requires_grad_(False)
    kernel = forward_kernel(made, {"use_cache": False}, torch.float32)[0]
    short, long = (pack([text]) for text in texts_of([8, 1100]))
    expected = run(kernel, short)[0]
    small = weakref.ref(kernel._sized.tables[0])
    forward, seen = kernel._library.forward, list[bool]()

    def forward_while_another_call_needs_larger_tables(call: Any) -> Any:
        monkeypatch.undo()
        run(kernel, long)
        seen.append(small() is not None)
        return forward(call)

    monkeypatch.setattr(kernel._library, "forward", forward_while_another_call_needs_larger_tables)
    found = run(kernel, short)[0]

    assert seen == [True]
    assert torch.equal(found, expected)
    assert small() is None


@pytest.mark.parametrize("wrong", [VOCABULARY, 2_000_000_000, -1])
@pytest.mark.parametrize("field", ["ids", "positions", "type_ids"])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_index_that_no_table_has_is_refused(bert: Any, field: str, wrong: int, threads: int) -> None:
    """Without a read of foreign memory, and with it the end of the process."""
    kernel = forward_kernel(bert, {}, torch.float32)[0]
    texts = [Encoded(ids, type_ids=np.zeros(len(ids), np.uint8)) for ids in random_texts((9, 40))]
    batch = pack(texts)
    positions = batch.position_ids.copy()
    expected = kernel(batch, positions, threads)
    indices = {"ids": batch.ids, "positions": positions, "type_ids": batch.type_ids}[field]
    assert indices is not None
    at = indices.nonzero()[0][-1] if indices.any() else 3
    right, indices[at] = indices[at], wrong if field == "ids" or wrong != VOCABULARY else 2048

    with pytest.raises(IndexError, match="no row"):
        kernel(batch, positions, threads)

    indices[at] = right
    assert torch.equal(kernel(batch, positions, threads), expected)


@pytest.mark.parametrize("change", [lambda ids: ids.astype(np.int16), lambda ids: ids.repeat(2)[::2]])
@pytest.mark.parametrize("field", ["ids", "type_ids", "cu_seqlens", "kept"])
def test_arrays_that_are_not_what_the_library_reads_are_refused(bert: Any, field: str, change: Any) -> None:
    kernel = forward_kernel(bert, {}, torch.float32)[0]
    batch = pack([Encoded(ids, type_ids=np.zeros(len(ids), np.uint8)) for ids in random_texts((9, 40))])
    batch = replace(batch, kept=batch.cu_seqlens[:-1].astype(np.int64))

    with pytest.raises(ValueError, match="are not the batch"):
        kernel(replace(batch, **{field: change(getattr(batch, field))}), batch.position_ids, 1)


def test_a_number_of_threads_that_no_machine_has_is_refused(bert: Any) -> None:
    batch = pack([Encoded(ids) for ids in random_texts((600,))])

    with pytest.raises(RuntimeError, match="outside of what it is of"):
        forward_kernel(bert, {}, torch.float32)[0](batch, batch.position_ids, 1 << 30)


def test_a_negative_position_is_refused_by_tables_of_rotations() -> None:
    torch.manual_seed(0)
    made = transformers.AutoModel.from_config(MODELS["qwen3"], attn_implementation="sdpa").eval().requires_grad_(False)
    kernel = forward_kernel(made, {"use_cache": False}, torch.float32)[0]
    batch = pack(texts_of([8]))

    with pytest.raises(IndexError, match="no row"):
        kernel(batch, batch.position_ids - 1, 1)


@pytest.mark.parametrize("value", ["0", "attention"])
def test_the_environment_turns_it_off(value: str, bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEIMGR_NATIVE", value)

    with pytest.raises(CannotLowerError, match="environment"):
        forward_kernel(bert, {}, torch.float32)


def test_a_dtype_of_no_weights_is_refused(bert: Any) -> None:
    with pytest.raises(CannotLowerError, match="float64"):
        ForwardKernel(lower(trace_forward(bert, {})), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("level", HERE)
def test_the_kept_row_of_each_text_is_that_of_all_rows_bit_for_bit(level: str, dtype: torch.dtype, module: Any) -> None:
    """Beyond the last attention the others are not computed, be the texts many or one."""
    try:
        kernel = ForwardKernel(lower(trace_forward(module, options(module))), dtype, level=level)
    except CannotLowerError as refusal:
        pytest.skip(str(refusal))
    for lengths in (LENGTHS, (300,), (3, 4), (70,) * 40):
        batch = pack(texts_of(lengths))
        for kept in (batch.begins, batch.ends - 1):
            for threads in (1, 2):
                whole = kernel(batch, batch.position_ids, threads)
                own = kernel(replace(batch, kept=kept), batch.position_ids, threads)
                assert torch.equal(own, whole[torch.from_numpy(kept)])


def test_a_kept_row_outside_of_the_batch_is_refused(bert: Any) -> None:
    kernel = ForwardKernel(lower(trace_forward(bert, {})), torch.float32)
    batch = pack(texts_of([3, 80]))
    for kept in (np.array([0, 83]), np.array([-1, 5])):
        with pytest.raises(IndexError):
            kernel(replace(batch, kept=kept), batch.position_ids, 1)
    with pytest.raises(ValueError, match="kept"):
        kernel(replace(batch, kept=np.array([0])), batch.position_ids, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("lengths", [(1,), (13,), (300,), LENGTHS, (7,) * 90, (256,) * 9])
def test_vectors_are_those_of_the_steps_on_their_own_bit_for_bit(
    lengths: Sequence[int], dtype: torch.dtype, bert: Any
) -> None:
    """The mean of a text's rows, a row of it, and both scaled, as three calls give them."""
    skip_where_not_multiplied(dtype)
    kernel, _ = forward_kernel(bert, {}, dtype)
    batch = pack(texts_of(lengths))
    for threads in (1, 2):
        hidden = kernel(batch, batch.position_ids, threads)
        for kept in (None, batch.begins, batch.ends - 1):
            values, unit, are_finite = kernel.vectors(replace(batch, kept=kept), batch.position_ids, threads)
            expected = pool(hidden, batch, ["mean"]) if kept is None else hidden[torch.from_numpy(kept)]
            np.testing.assert_array_equal(values, expected.numpy())
            np.testing.assert_array_equal(unit, finish(expected.numpy(), None, normalize=True))
            assert are_finite


def test_vectors_tell_of_numbers_that_are_not_finite(bert: Any) -> None:
    broken = copy.deepcopy(bert)
    broken.embeddings.word_embeddings.weight[7] = float("inf")
    kernel, _ = forward_kernel(broken, {}, torch.float32)
    good, bad = Encoded(np.array([1, 2, 3], np.int32)), Encoded(np.array([1, 7], np.int32))

    for texts, expected in (([good], True), ([bad], False), ([good, bad], False)):
        batch = pack(texts)
        for kept in (None, batch.begins):
            found = kernel.vectors(replace(batch, kept=kept), batch.position_ids, 1)
            assert found.are_finite is expected or kept is not None
            assert np.isfinite(found.unit).all() == np.isfinite(found.values).all() == found.are_finite


def test_a_text_without_tokens_has_no_mean(bert: Any) -> None:
    kernel, _ = forward_kernel(bert, {}, torch.float32)
    batch = replace(pack(texts_of([3, 5])), cu_seqlens=np.array([0, 8, 8], np.int32))
    with pytest.raises(RuntimeError, match="outside"):
        kernel.vectors(batch, batch.position_ids, 1)
