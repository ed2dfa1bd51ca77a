"""Sparse models, late interaction, BGE-M3, static tables, token classifiers, adapters, graphs for ONNX, and what is not
text or not weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.fidelity import references
from tests.fidelity.figures import Matrix
from tests.support import plain_forwards
from tests.support.models import (
    MAX_LENGTH,
    build,
    build_classifier,
    build_m3,
    build_multi_vector,
    build_splade,
    build_static,
    edit,
    read,
    write,
)
from tests.support.models.encoders import build_routed_dense, build_routed_sparse
from tests.support.models.other_forms import Variant, build_adapter, move_to_gguf, move_to_onnx
from tests.support.models.own_code import build_jina_xlm, build_new_masked
from tests.support.models.single_families import build_jina_bert
from torch import Tensor

from bench.families import files
from bench.families.references import dense_by_task, elsewhere, none, plain, st_dense, token_ids
from bench.families.row import PLAIN, TRANSFORMERS, Reference, Row
from teimgr.engine.job import Input, Output
from teimgr.spec import Kind


def _sparse_row(key: str, family: str, hub: str, build: Callable[..., Any], **more: Any) -> Row:
    given: dict[str, Any] = {"reference": references.sparse} | more
    return Row(key, family, hub, files.built(build), kind=Kind.SPARSE, output=Output.SPARSE, **given)


def _sparse() -> Iterator[Row]:
    splade = partial(build_splade, "distilbert")
    yield _sparse_row(
        "splade-v3", "BERT", "naver/splade-v3, splade-cocondenser-ensembledistil", partial(build_splade, "bert")
    )
    yield _sparse_row("splade-distil", "DistilBERT", "naver/splade-v3-distilbert", splade)
    yield _sparse_row(
        "splade-sum", "BERT", "SPLADE models with pooling_strategy sum", partial(build_splade, "bert", strategy="sum")
    )
    yield _sparse_row(
        "splade-saved-now",
        "BERT",
        "sparse models saved by sentence-transformers 6",
        partial(build_splade, "bert", layout="saved"),
    )
    bare = partial(build_splade, "distilbert", layout="plain")
    yield _sparse_row(
        "splade-bare",
        "DistilBERT",
        "prithivida/Splade_PP_en_v1, naver/* at old revisions",
        bare,
        engine_options={"pooling": "splade"},
        note="pooling = splade",
    )
    v2 = "opensearch-project/opensearch-neural-sparse-encoding-v2-distill"
    yield _sparse_row("opensearch-v2-distill", "DistilBERT", v2, partial(build_splade, "distilbert", activation="relu"))
    yield _sparse_row(
        "granite-sparse", "RoBERTa", "ibm-granite/granite-embedding-30m-sparse", partial(build_splade, "roberta")
    )
    yield _sparse_row(
        "splade-modernbert", "ModernBERT", "ModernBERT SPLADE models", partial(build_splade, "modernbert")
    )
    yield _sparse_row(
        "splade-log1p", "BERT", "SPLADE models with log1p_relu", partial(build_splade, "bert", activation="log1p_relu")
    )
    for nested, hub in (
        (False, "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill, doc-v2-mini"),
        (True, "naver/splade-v3-doc"),
    ):
        for role in ("document", "query"):
            yield _sparse_row(
                f"sparse-router-{'nested' if nested else 'root'}-{role}",
                "Router: BERT and a table",
                f"{hub}, role {role}",
                partial(build_routed_sparse, nested=nested),
                asked={"prompt_name": role},
                reference=partial(_by_task, task=role),
            )
    relu = partial(build_routed_sparse, activation="relu")
    yield _sparse_row(
        "sparse-router-relu",
        "Router: BERT and a table",
        "opensearch-neural-sparse-encoding-doc-v2-distill",
        relu,
        asked={"prompt_name": "document"},
        reference=partial(_by_task, task="document"),
    )

    def gte(folder: Path) -> Reference:
        made: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
        build_routed_sparse(folder, make=lambda place: made.append(build_new_masked(place)))
        write(folder / "config.json", made[0][1])
        return plain(lambda ids: plain_forwards.new_splade(*made[0], ids)[None], "cls", MAX_LENGTH)

    hub = "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-gte"
    given: dict[str, Any] = {"asked": {"prompt_name": "document"}, "reference": None, "by": PLAIN}
    yield Row("sparse-router-gte", "Router: GTE and a table", hub, gte, Kind.SPARSE, output=Output.SPARSE, **given)


def _dense_routes() -> Iterator[Row]:
    for key, family, hub, way in (
        ("router-two", "Router: RoBERTa and BERT", "MongoDB/mdbr-leaf-ir-asym, mdbr-leaf-mt-asym", "two"),
        ("router-table", "Router: a table and BERT", "StaticEmbedding for queries, an encoder for documents", "table"),
        ("router-behind", "BERT and a Router", "a Dense for each role behind one encoder (Asym)", "behind"),
    ):
        for role in ("document", "query"):
            yield Row(
                f"{key}-{role}",
                family,
                f"{hub}, role {role}",
                files.built(partial(build_routed_dense, way=way)),
                reference=partial(dense_by_task, task=role),
                asked={"prompt_name": role},
            )


def _by_task(folder: Path, texts: Sequence[Input], task: str) -> list[Matrix]:
    """sentence-transformers' SparseEncoder with the route of a task, one text at a time."""
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(folder), device="cpu")
    encode = model.encode_query if task == "query" else model.encode_document
    found = encode(list(texts), convert_to_sparse_tensor=False, show_progress_bar=False, batch_size=1)
    return [np.asarray(row)[None, :] for row in found]


def _late_row(key: str, family: str, hub: str, role: str, make: Callable[[Path], Any], **more: Any) -> Row:
    given: dict[str, Any] = {"reference": partial(references.multi_vector, role=role)} | more
    return Row(
        f"{key}-{role}",
        family,
        f"{hub}, role {role}",
        make,
        kind=Kind.MULTI_VECTOR,
        output=Output.MULTI_VECTOR,
        asked={"prompt_name": role},
        **given,
    )


def _late() -> Iterator[Row]:
    layouts: tuple[tuple[str, str, str, str, Literal["saved", "pylate", "stanford"], dict[str, Any]], ...] = (
        (
            "colbert-stanford",
            "BERT",
            "colbert-ir/colbertv2.0, answerdotai/answerai-colbert-small-v1",
            "bert",
            "stanford",
            {},
        ),
        (
            "colbert-pylate",
            "ModernBERT",
            "lightonai/GTE-ModernColBERT-v1, Reason-ModernColBERT",
            "modernbert",
            "pylate",
            {},
        ),
        (
            "colbert-edge",
            "ModernBERT",
            "mixedbread-ai/mxbai-edge-colbert-v0-17m (no expansion)",
            "modernbert",
            "pylate",
            {"expand": False},
        ),
        ("colbert-saved", "BERT", "MultiVectorEncoder of sentence-transformers 6", "bert", "saved", {}),
        ("colbert-xmod", "X-MOD", "antoinelouis/colbert-xm", "xmod", "pylate", {}),
        ("colbert-lfm2", "LFM2", "LiquidAI/LFM2-ColBERT-350M, causal", "lfm2", "pylate", {}),
    )
    for key, family, hub, architecture, layout, more in layouts:
        for role in ("query", "document"):
            make = files.built(partial(build_multi_vector, architecture, layout=layout, **more))
            yield _late_row(key, family, hub, role, make)


def _colbert(
    built: Callable[..., Any], forward: Callable[..., Tensor]
) -> Iterator[tuple[str, Callable[[Path], Reference]]]:
    """jina-colbert: a forward of its own, the marks and lengths of its files, and no document token skipped."""
    for role, mark, longest in (("query", "[QueryMarker]", 12), ("document", "[DocumentMarker]", 180)):

        def make(folder: Path, role: str = role, mark: str = mark, longest: int = longest) -> Reference:
            weights, config = built(folder, layout="colbert")
            return partial(
                _colbert_rows,
                forward=partial(forward, weights, config),
                weights=weights,
                role=role,
                mark=mark,
                longest=longest,
            )

        yield role, make


def _colbert_rows(
    folder: Path,
    texts: Sequence[Input],
    forward: Callable[[Tensor], Tensor],
    weights: dict[str, Tensor],
    role: str,
    mark: str,
    longest: int,
) -> list[Matrix]:
    import string

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    fill = next(tokenizer.token_to_id(name) for name in ("[MASK]", "<mask>") if tokenizer.token_to_id(name) is not None)
    skipped = {tokenizer.token_to_id(each) for each in string.punctuation}
    found = []
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer.encode(f"{mark} {text}").ids
            if role == "query":
                ids += [fill] * (longest - len(ids))
            rows = torch.nn.functional.normalize(forward(torch.tensor(ids)) @ weights["linear.weight"].T, dim=-1)
            kept = [at for at, each in enumerate(ids) if role == "query" or each not in skipped]
            found.append(rows[kept].numpy())
    return found


def _jina_colberts() -> Iterator[Row]:
    for key, family, hub, built, forward in (
        ("jina-colbert-v1", "JinaBERT v2", "jinaai/jina-colbert-v1-en", build_jina_bert, plain_forwards.jina_bert),
        (
            "jina-colbert-v2",
            "Jina XLM-RoBERTa (flash)",
            "jinaai/jina-colbert-v2",
            build_jina_xlm,
            plain_forwards.jina_xlm_roberta,
        ),
    ):
        for role, make in _colbert(built, forward):
            yield _late_row(key, family, hub, role, make, by=PLAIN, reference=None)


def _lfm2_colbert() -> Iterator[Row]:
    """LFM2 with code of its own, in PyLate's layout without expansion; no token of a query is skipped."""
    code = "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"
    for role, mark, longest in (("query", "[Q] ", 12), ("document", "[D] ", 40)):

        def make(folder: Path, mark: str = mark, longest: int = longest) -> Reference:
            build_multi_vector("lfm2", folder, layout="pylate", expand=False, skip_words=())
            edit(folder / "config.json", architectures=["Lfm2BidirectionalModel"], auto_map={"AutoModel": code})
            weights, config = load_file(folder / "model.safetensors"), read(folder / "config.json")
            projection = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]

            def rows(folder: Path, texts: Sequence[Input]) -> list[Matrix]:
                ids = [token_ids(folder, f"{mark}{text}", longest) for text in texts]
                states = [plain_forwards.lfm2(weights, config, one) @ projection.T for one in ids]
                return [torch.nn.functional.normalize(one, dim=-1).numpy() for one in states]

            return rows

        yield _late_row("colbert-lfm2.5", "LFM2", "LiquidAI/LFM2.5-ColBERT-350M", role, make, by=PLAIN, reference=None)


def _m3_and_static() -> Iterator[Row]:
    m3 = files.built(build_m3)
    yield Row("bge-m3-dense", "XLM-RoBERTa", "BAAI/bge-m3", m3, reference=st_dense)
    definition = "FlagEmbedding's definition"
    yield Row(
        "bge-m3-sparse",
        "XLM-RoBERTa",
        "BAAI/bge-m3, sparse",
        m3,
        by=definition,
        reference=partial(references.m3, part="sparse"),
        output=Output.SPARSE,
    )
    yield Row(
        "bge-m3-multi",
        "XLM-RoBERTa",
        "BAAI/bge-m3, multi-vector",
        m3,
        by=definition,
        reference=partial(references.m3, part="multi"),
        output=Output.MULTI_VECTOR,
    )
    static = "sentence-transformers/static-retrieval-mrl-en-v1, static-similarity-mrl-multilingual-v1"
    yield Row("static-mrl", "static table", static, files.built(build_static), reference=references.dense)
    potion = "minishlab/potion-base-8M, potion-retrieval-32M, M2V_base_output"
    yield Row(
        "static-potion",
        "static table",
        potion,
        files.built(partial(build_static, layout="model2vec")),
        reference=references.dense,
    )
    mapped = partial(build_static, layout="model2vec", mapped=True)
    yield Row(
        "static-mapped",
        "static table",
        "Model2Vec with a mapped vocabulary",
        files.built(mapped),
        reference=references.dense,
    )
    bare = partial(build_static, layout="model2vec", normalize=False)
    yield Row(
        "static-no-norm",
        "static table",
        "Model2Vec with normalize false",
        files.built(bare),
        reference=references.dense,
    )


def _adapters() -> Iterator[Row]:
    def row(key: str, hub: str, variant: Variant, architecture: str = "bert", *, beside: bool = False) -> Row:
        def make(folder: Path) -> None:
            base = build(architecture, folder.parent / "base")
            build_adapter(base, folder, folder.parent / "merged", variant=variant)
            if beside:
                for name in ("config.json", "model.safetensors"):
                    shutil.copy(base / name, folder)

        reference = elsewhere("merged", references.dense)
        return Row(key, "PEFT adapter", hub, make, reference=reference, note="compared with the merged model")

    yield row("adapter-st", "adapters saved by sentence-transformers", "plain")
    yield row("adapter-rslora", "rank-stabilised LoRA", "rslora")
    yield row("adapter-dora", "DoRA", "dora")
    yield row("adapter-patterns", "ranks and alphas by pattern", "patterns")
    yield row("adapter-table", "LoRA of the table of tokens", "table")
    yield row("adapter-modules", "modules_to_save", "saved-whole")
    yield row("adapter-beside", "adapter files beside weights", "plain", beside=True)
    yield row("adapter-qwen3", "LoRA of Qwen3-Embedding", "plain", "qwen3")


def _onnx() -> Iterator[Row]:
    def row(key: str, hub: str, architecture: str, **layout: Any) -> Row:
        def make(folder: Path) -> None:
            shutil.copytree(build(architecture, folder.parent / "plain"), folder)
            move_to_onnx(folder, **layout)

        reference = elsewhere("plain", references.dense)
        return Row(key, "ONNX", hub, make, reference=reference, note="compared with the model that was exported")

    yield row("onnx-xenova", "Xenova/all-MiniLM-L6-v2, onnx-community/*", "bert")
    yield row("onnx-root", "Qdrant/all-MiniLM-L6-v2-onnx", "distilbert", name="model.onnx")
    yield row("onnx-external", "onnx-community/*-ONNX with model.onnx_data", "modernbert", external=True)

    def classifier(folder: Path) -> None:
        shutil.copytree(build_classifier("bert", folder.parent / "plain"), folder)
        move_to_onnx(folder)

    reference = elsewhere("plain", partial(references.classes, activation="softmax"))
    yield Row(
        "onnx-classifier",
        "ONNX",
        "Xenova/toxic-bert",
        classifier,
        Kind.CLASSIFIER,
        TRANSFORMERS,
        reference,
        Output.SCORES,
    )


def _gguf() -> Iterator[Row]:
    """Compared with the layout in safetensors, whose weights are those that transformers' reader makes of the file."""

    def made(folder: Path, form: str) -> None:
        from transformers import AutoModel
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        plain = build("qwen3_128", folder.parent / "plain")
        move_to_gguf(shutil.copytree(plain, folder), form)
        model, file = AutoModel.from_pretrained(plain), str(folder / "model.gguf")
        read = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
        save_file(read, plain / "model.safetensors", metadata={"format": "pt"})

    for form in ("F32", "F16", "Q8_0", "Q4_0"):
        hub, note = f"Qwen3-Embedding in GGUF of {form}", "compared with what transformers reads of the file"
        reference = elsewhere("plain", references.dense)
        yield Row(f"gguf-{form.lower()}", "GGUF", hub, partial(made, form=form), reference=reference, note=note)


def _refused() -> Iterator[Row]:
    """Of another kind than text, or without weights that can be read: refused, by name."""

    def files_of(config: dict[str, Any], *names: str) -> Callable[[Path], None]:
        def make(folder: Path) -> None:
            build("bert", folder)
            (folder / "model.safetensors").unlink()
            for path in [*folder.glob("*_*/"), folder / "modules.json"]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            write(folder / "config.json", config)
            for name in names:
                (folder / name).write_bytes(b"\0" * 64)

        return make

    vl = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    yield Row(
        "refused-qwen3-vl", "Qwen3-VL", "Qwen/Qwen3-VL-2B-Instruct", files_of(vl, "model.safetensors"), reference=none
    )
    senses = {
        "model_type": "embedding_gemma2",
        "architectures": ["EmbeddingGemma2Model"],
        "audio_config": {"hidden_size": 32},
    }
    hub = "EmbeddingGemma 2 of texts and sounds alone"
    yield Row("refused-embeddinggemma2", "EmbeddingGemma2", hub, files_of(senses, "model.safetensors"), reference=none)
    duo = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32}
    duo_files = files_of(duo, "model.safetensors")
    hub = "castorini/duot5-base-msmarco (documents in pairs), T5 that writes text"
    yield Row("refused-duot5", "T5", hub, duo_files, kind=Kind.RERANKER, reference=none)
    entities = files_of({"model_type": "bert"}, "pytorch_model.bin", "gliner_config.json")
    hub = "urchade/gliner_medium-v2.1"
    yield Row("refused-gliner", "GLiNER", hub, entities, kind=Kind.CLASSIFIER, reference=none)

    def gguf(folder: Path) -> None:
        move_to_gguf(build("qwen3_128", folder), changes={"general.architecture": "nomic-bert"})
        (folder / "README.md").write_text("---\nbase_model: nomic-ai/nomic-embed-text-v1.5\n---\n")

    hub = "nomic-ai/nomic-embed-text-v1.5-GGUF"
    yield Row("refused-gguf", "GGUF", hub, gguf, reference=none)

    def relative(folder: Path) -> None:
        build("bert", folder)
        edit(folder / "config.json", position_embedding_type="relative_key_query")

    def unknown_weight(folder: Path) -> None:
        build("bert", folder)
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, "encoder.gate.weight": torch.ones(4, 4)}, folder / "model.safetensors")

    hub = "BERT with position_embedding_type = relative_key_query"
    yield Row("refused-relative-positions", "BERT", hub, relative, reference=none)
    hub = "weights of a layer that the library's class does not have"
    yield Row("refused-unknown-weight", "BERT", hub, unknown_weight, reference=none)


ROWS = (
    *_sparse(),
    *_dense_routes(),
    *_late(),
    *_jina_colberts(),
    *_lfm2_colbert(),
    *_m3_and_static(),
    *_adapters(),
    *_onnx(),
    *_gguf(),
    *_refused(),
)
