"""The rehearsal of a load in the fork server, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from teimgr.control.launch import nursery

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
