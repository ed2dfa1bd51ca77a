"""Lowering: which architectures become steps, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.models import FAMILIES
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from teimgr.control.launch import nursery
from teimgr.engine.library_model import load_module
from teimgr.engine.native_forward.lowering import lower
from teimgr.engine.native_forward.program import CannotLowerError, ForwardProgram
from teimgr.engine.native_forward.trace import trace_forward
from teimgr.models.reading import read_layout

# The others have heads of 8 columns with a norm of their own, which no step takes:
# tests/engine/native_forward/test_kernel.py has them with wider heads.
WITH_STEPS = sorted(set(FAMILIES) - {"deberta_v2", "mpnet", "t5", "qwen3", "gemma3"})


def lowered(path: Path) -> ForwardProgram:
    module = load_module(read_layout(path), torch.device("cpu"))
    options = {"use_cache": False} if hasattr(module.config, "use_cache") else {}
    return lower(trace_forward(module, options))


@pytest.mark.parametrize("family", WITH_STEPS)
def test_an_architecture_becomes_steps(family: str, model_dir: Callable[..., Path]) -> None:
    program = lowered(model_dir(family))

    kinds = Counter(step.kind for step in program.steps)
    assert kinds["attend"] == 2  # layers
    assert kinds["activate"] == 0  # every activation is computed with a linear layer, or with a product
    assert program.width == 32


def test_the_layers_of_a_bert_are_fused(model_dir: Callable[..., Path]) -> None:
    layer = ("linear", "attend", "linear", "norm", "linear", "linear", "norm")

    program = lowered(model_dir("bert"))

    assert tuple(step.kind for step in program.steps) == ("embed", "norm", *layer, *layer)
    assert program.steps[2].width == 3 * 32  # queries, keys and values
    assert program.steps[6].activation == "gelu"
    assert len(program.linears) == 2 * 6


class Made(TorchDispatchMode):
    """Counts the tensors that are made of a range of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ranges += func is torch.ops.aten.arange.default
        return func(*args, **kwargs or {})


def test_what_places_look_like_is_made_once_for_all_layers() -> None:
    made = []
    for layers in (1, 4):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": layers}
        model = transformers.BertModel(transformers.BertConfig(**sizes, attn_implementation="sdpa")).eval()
        record = trace_forward(model, {})
        with Made() as counter:
            program = lower(record)
        assert Counter(step.kind for step in program.steps)["attend"] == layers
        made.append(counter.ranges)

    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("family", "reason"), [("t5", "attention of T5Attention"), ("mpnet", "matmul"), ("deberta_v2", "cannot be traced")]
)
def test_attention_with_a_bias_is_refused(family: str, reason: str, model_dir: Callable[..., Path]) -> None:
    with pytest.raises(CannotLowerError, match=reason):
        lowered(model_dir(family))


class Custom(nn.Module):
    """The signature and configuration of a transformers encoder around one function of its embeddings."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.config: Any = transformers.BertConfig(hidden_size=16, vocab_size=50, attn_implementation="eager")
        self.table = nn.Embedding(50, 16)
        self.linear = nn.Linear(16, 16)
        self.run = run
        self.requires_grad_(False)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        hidden = self.run(self.linear(self.table(input_ids)), position_ids)
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=hidden)


@pytest.mark.parametrize(
    ("run", "activation"),
    [
        (lambda x, _: x * torch.sigmoid(x), "silu"),
        (lambda x, _: x * torch.sigmoid(1.702 * x), "quick_gelu"),
        (lambda x, _: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))), "gelu_tanh"),
        (lambda x, _: functional.relu(x), "relu"),
    ],
)
def test_an_activation_written_out_is_recognised(run: Callable[[Tensor, Tensor], Tensor], activation: str) -> None:
    program = lower(trace_forward(Custom(run), {}))

    assert [(step.kind, step.activation) for step in program.steps] == [("embed", "none"), ("linear", activation)]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x, _: x.cumsum(1), "cumsum"),
        (lambda x, _: torch.sin(x) * x, "sin"),
        (lambda x, _: functional.silu(1.5 * x), "unknown elementwise function"),
        (lambda x, _: x + torch.arange(x.shape[1])[None, :, None], "differs between tokens"),
        (lambda x, _: x.flip(2), "flip"),
        (lambda x, _: torch.cat([x[..., 8:], x[..., :8]], -1), "not consecutive"),
        (lambda x, positions: x * positions.unsqueeze(-1), "turned where rows are needed"),
        (lambda x, _: x[..., :8], "not that of the last step"),
        (lambda x, _: x if x.sum() > 0 else -x, "cannot be traced"),
    ],
)
def test_what_no_step_computes_is_refused(run: Callable[[Tensor, Tensor], Tensor], reason: str) -> None:
    with pytest.raises(CannotLowerError, match=reason):
        lower(trace_forward(Custom(run), {}))


def test_an_operator_that_a_handler_cannot_take_is_refused_and_logged_with_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(CannotLowerError, match="used in another way"):
        lower(trace_forward(Custom(lambda x, _: functional.linear(x, x[0])), {}))

    assert [(each.levelname, each.exc_info is not None) for each in caplog.records] == [("WARNING", True)]


@pytest.mark.parametrize("index", [lambda positions: positions // 100, torch.zeros_like], ids=["of positions", "given"])
def test_an_embedding_by_one_number_is_a_constant_row(index: Callable[[Tensor], Tensor]) -> None:
    other = torch.randn(3, 16)

    program = lower(trace_forward(Custom(lambda x, positions: x + functional.embedding(index(positions), other)), {}))

    assert [step.kind for step in program.steps] == ["embed", "linear", "add"]
    assert program.steps[-1].bias is not None
    assert torch.equal(program.steps[-1].bias, other[0])


@pytest.mark.parametrize("index", [lambda positions: positions + 1, lambda positions: positions.flip(1)])
def test_an_embedding_by_changed_positions_is_refused(index: Callable[[Tensor], Tensor]) -> None:
    table = nn.Embedding(50, 16)

    with pytest.raises(CannotLowerError, match="embedding by something computed"):
        lower(trace_forward(Custom(lambda x, positions: x + table(index(positions))), {}))


def test_tracing_leaves_the_models_attention_as_it_was(model_dir: Callable[..., Path]) -> None:
    module = load_module(read_layout(model_dir("bert")), torch.device("cpu"))

    trace_forward(module, {})

    assert module.config._attn_implementation == "sdpa"


FIRST_LOAD = """
import json, os, re._compiler
from teimgr.control.launch import nursery

failed = nursery.preload(nursery.PRELOAD)
nursery.make_tables()
nursery.find_entry(nursery.ENTRY)
failed += nursery.call_ahead(nursery.PRELOAD)
threads, compiled, compile = len(os.listdir("/proc/self/task")), [], re._compiler.compile
re._compiler.compile = lambda pattern, flags=0: compiled.append(str(pattern)) or compile(pattern, flags)

from transformers import BertConfig, BertModel
from teimgr.engine.native_forward.trace import trace_forward
from teimgr.engine.native_forward.lowering import lower
from teimgr.models.directory import needed

assert needed(["model.safetensors", "onnx/model.onnx"]) == ["model.safetensors"]
model = BertModel(BertConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                             num_attention_heads=4, attn_implementation="sdpa")).eval()
lower(trace_forward(model, {}))
print(json.dumps([failed, threads, compiled]))
"""


def test_a_load_after_it_compiles_no_pattern_any_more() -> None:
    environ = os.environ | nursery.ONE_THREAD

    said = subprocess.check_output([sys.executable, "-c", FIRST_LOAD], env=environ, text=True)

    assert json.loads(said) == [[], 1, []]
