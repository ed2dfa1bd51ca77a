"""Encoders as Sentence Transformers saves them: dense, sparse, late interaction, BGE-M3, look-up tables."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.models.families import FAMILIES, MAX_LENGTH, WIDTH, Family
from tests.support.models.files import edit, pad_and_truncate, read, with_marks, word_piece, write, write_modules
from tests.support.models.further import family_of
from torch import nn

TANH = "torch.nn.modules.activation.Tanh"
IDENTITY = "torch.nn.modules.linear.Identity"

_BOOLEANS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def build(
    family: str,
    folder: Path,
    *,
    pooling: str | None = None,
    include_prompt: bool = True,
    dense: tuple[int, str] | None = None,
    modules: tuple[str, ...] | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_length: int = MAX_LENGTH,
    seed: int = 0,
) -> Path:
    """Write an embedding model of `family` to `folder` in the layout of sentence-transformers 2 to 5.3.

    `pooling` is a name of sentence-transformers ("mean", "cls", "lasttoken", "max", "weightedmean", …) or several
    joined by "+"; `dense` is the output width and the activation's dotted name of a Dense module. `modules` are those
    behind the pooling, in order, where there is more to it: "Dense", "Dense:Tanh", "LayerNorm", "Normalize"; every
    Dense halves the width.
    """
    torch.manual_seed(seed)
    save_encoder(family, folder)
    write(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    named = (pooling or family_of(family).pooling).split("+")
    write(folder / "1_Pooling" / "config.json", _pooling(named, include_prompt))
    behind = modules if modules is not None else (*(["Dense"] if dense else []), "Normalize")
    names = [name.split(":")[0] for name in behind]
    width = WIDTH * len(named)
    for index, name in enumerate(behind, 2):
        place = folder / f"{index}_{names[index - 2]}"
        if name.startswith("Dense"):
            given = dense or (width // 2, TANH if name.endswith(":Tanh") else IDENTITY)
            write_dense(place, width, *given)
            width = given[0]
        elif name == "LayerNorm":
            write_layer_norm(place, width)
    write_modules(folder, *(f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", *names)))
    saved = {"prompts": prompts or {}, "default_prompt_name": default_prompt_name}
    write(folder / "config_sentence_transformers.json", saved)
    return folder


def build_embedding_gemma(folder: Path, *, seed: int = 0) -> Path:
    """Write a model laid out as EmbeddingGemma: two Dense modules, then Normalize, and its prompts."""
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    return build("gemma3", folder, modules=("Dense", "Dense", "Normalize"), prompts=prompts, seed=seed)


def save_encoder(family: str, folder: Path) -> None:
    """Write the bare transformer and its tokenizer to `folder`."""
    kind = family_of(family)
    tokenizer = kind.tokenizer()
    kind.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")


def write_dense(folder: Path, inputs: int, outputs: int, activation: str, bias: bool = True, **keys: Any) -> None:
    """Write a Dense module; `keys` are further ones of its config.json."""
    config = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
    write(folder / "config.json", config | keys)
    weights = {"linear.weight": torch.randn(outputs, inputs)}
    save_file(weights | ({"linear.bias": torch.randn(outputs)} if bias else {}), folder / "model.safetensors")


def write_layer_norm(folder: Path, width: int) -> None:
    """Write a LayerNorm module."""
    write(folder / "config.json", {"dimension": width})
    save_file({"norm.weight": torch.randn(width), "norm.bias": torch.randn(width)}, folder / "model.safetensors")


def _pooling(named: list[str], include_prompt: bool) -> dict[str, Any]:
    flags = {key: mode in named for mode, key in _BOOLEANS.items()}
    return {"word_embedding_dimension": WIDTH, **flags, "include_prompt": include_prompt}


def build_splade(
    family: str,
    folder: Path,
    *,
    layout: Literal["plain", "version-5", "saved"] = "version-5",
    strategy: str = "max",
    activation: str = "relu",
    max_length: int = MAX_LENGTH,
    seed: int = 0,
) -> Path:
    """Write a SPLADE model: as naver published them (a bare masked-LM), as SparseEncoder 5.0, or as it saves now."""
    torch.manual_seed(seed)
    kind = family_of(family)
    tokenizer = kind.tokenizer()
    tokenizer.model_max_length = max_length
    kind.headed(transformers.AutoModelForMaskedLM, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    if layout == "plain":
        return folder
    write(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "prompts": {}})
    lengths: dict[str, object] = {"max_seq_length": max_length, "do_lower_case": False}
    pooling: dict[str, object] = {"pooling_strategy": strategy, "activation_function": activation}
    modules = "sentence_transformers.sparse_encoder.models"
    first = f"{modules}.MLMTransformer"
    if layout == "saved":
        logits = {"text": {"method": "forward", "method_output_name": "logits"}}
        lengths |= {
            "transformer_task": "fill-mask",
            "modality_config": logits,
            "module_output_name": "token_embeddings",
        }
        modules = "sentence_transformers.sparse_encoder.modules.splade_pooling"
        first = "sentence_transformers.base.modules.transformer.Transformer"
        pooling["embedding_dimension"] = len(tokenizer)
    else:
        pooling["word_embedding_dimension"] = len(tokenizer)
    write(folder / "sentence_bert_config.json", lengths)
    write_modules(folder, first, f"{modules}.SpladePooling")
    write(folder / "1_SpladePooling" / "config.json", pooling)
    return folder


def build_routed_sparse(
    folder: Path,
    *,
    nested: bool = False,
    default_route: str | None = "document",
    activation: str = "log1p_relu",
    make: Callable[[Path], object] | None = None,
) -> Path:
    """opensearch-neural-sparse-encoding-doc-v3-*, with the transformer at the root, or `nested` as splade-v3-doc:
    SPLADE for documents, a weight of each token for queries. `make` writes another transformer than a BERT.
    """
    home = folder / "document_0_MLMTransformer" if nested else folder
    (make or (lambda place: build_splade("bert", place, layout="plain")))(home)
    lengths = {"max_seq_length": MAX_LENGTH, "do_lower_case": False}
    write(home / "sentence_bert_config.json", lengths)
    table = folder / "query_0_SparseStaticEmbedding"
    table.mkdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    tokenizer.model_max_length = 20
    tokenizer.save_pretrained(table)
    weights = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(7)) * 4
    weights[::3] = 0.0
    save_file({"weight": weights}, table / "model.safetensors", metadata={"format": "pt"})
    write(table / "config.json", {"frozen": True})
    pooling = {"pooling_strategy": "max", "activation_function": activation, "word_embedding_dimension": len(tokenizer)}
    write(folder / "document_1_SpladePooling" / "config.json", pooling)
    package = "sentence_transformers.sparse_encoder.models"
    document, query = "document_0_MLMTransformer" if nested else "", table.name
    router = {
        "types": {
            query: f"{package}.SparseStaticEmbedding",
            document: f"{package}.MLMTransformer",
            "document_1_SpladePooling": f"{package}.SpladePooling",
        },
        "structure": {"query": [query], "document": [document, "document_1_SpladePooling"]},
        "parameters": {"default_route": default_route, "allow_empty_key": True},
    }
    write(folder / "router_config.json", router)
    write_modules(folder, "sentence_transformers.models.Router")
    saved = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}, "default_prompt_name": None}
    write(folder / "config_sentence_transformers.json", saved)
    return folder


def build_routed_dense(
    folder: Path, way: str = "two", *, default_route: str | None = "document", saved: bool = True
) -> Path:
    """A dense model with a Router, as sentence-transformers saves it: queries through a smaller transformer and a Dense
    (`two`, as mdbr-leaf-ir-asym), through a table (`table`), or each role through a Dense of its own behind one
    transformer (`behind`); unless `saved` the last in the files of an Asym before sentence-transformers 5.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, StaticEmbedding
    from sentence_transformers.sentence_transformer.modules import Transformer as Reader

    torch.manual_seed(11)
    reader = Reader(str(build("bert", folder.parent / f"{folder.name}-documents")), max_seq_length=MAX_LENGTH)
    width = reader.get_embedding_dimension()
    if way == "behind":
        roles = {"query": [Dense(width, 24)], "document": [Dense(width, 24, bias=False)]}
        modules = [reader, Pooling(width, pooling_mode="mean"), Router(roles, default_route=default_route), Normalize()]
    else:
        documents = [reader, Pooling(width, pooling_mode="cls")]
        if way == "two":
            other = Reader(str(build("roberta", folder.parent / f"{folder.name}-queries")), max_seq_length=30)
            own = other.get_embedding_dimension()
            queries = [other, Pooling(own, pooling_mode="mean"), Dense(own, width)]
        else:
            queries = [StaticEmbedding(reader.tokenizer, embedding_dim=width)]
        modules = [Router.for_query_document(queries, documents, default_route=default_route), Normalize()]
    prompts = {"query": "search: ", "document": ""}
    SentenceTransformer(modules=modules, prompts=prompts, device="cpu").save_pretrained(str(folder))
    if not saved:
        home = folder / next(row["path"] for row in read(folder / "modules.json") if row["type"].endswith("Router"))
        router = read(home / "router_config.json")
        (home / "router_config.json").unlink()
        router["structure"] = {"query": router["structure"]["query"], "doc": router["structure"]["document"]}
        router["parameters"] = {"allow_empty_key": True}
        write(home / "config.json", router)
        rows = read(folder / "modules.json")
        rows = [{**row, "type": row["type"].replace("Router", "Asym")} for row in rows]
        write(folder / "modules.json", rows)
    return folder


TOKEN_WIDTH = 16
_ON_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}


def build_multi_vector(
    family: str,
    folder: Path,
    *,
    layout: Literal["saved", "pylate", "stanford"] = "saved",
    query_length: int = 12,
    document_length: int = 40,
    expand: bool = True,
    attend: bool = False,
    skip_words: tuple[str, ...] = tuple(string.punctuation),
    prompts: dict[str, str] | None = None,
    seed: int = 0,
) -> Path:
    """Write a late-interaction model of `family`; Stanford's layout is BERT's alone.

    `prompts` are those of sentence-transformers' own layout; PyLate's has the tokens "[Q] " and "[D] ", Stanford's
    the ordinary vocabulary entries [unused0] and [unused1].
    """
    torch.manual_seed(seed)
    if layout == "stanford":
        return _stanford(folder, query_length, document_length, attend)
    kind = family_of(family)
    tokenizer = kind.tokenizer()
    if layout == "pylate":
        with_marks(tokenizer, "[Q] ", "[D] ")
    kind.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    if layout == "pylate":
        return _pylate(folder, query_length, document_length, expand, attend, skip_words)
    expansion = {"strategy": "fixed", "attend": attend, "token": None, "length": query_length}
    lengths: dict[str, Any] = {"max_seq_length": 96, "do_lower_case": False, "document_length": document_length}
    lengths |= {"query_expansion": expansion} if expand else {"query_length": query_length}
    write(folder / "sentence_bert_config.json", lengths)
    write_dense(folder / "1_Dense", WIDTH, TOKEN_WIDTH, IDENTITY, bias=False, **_ON_TOKENS)
    write(folder / "2_MultiVectorMask" / "config.json", {"skiplist_words": list(skip_words)})
    write(folder / "3_Normalize" / "config.json", _ON_TOKENS)
    write_modules(
        folder,
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.base.modules.dense.Dense",
        "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
        "sentence_transformers.base.modules.normalize.Normalize",
    )
    write(
        folder / "config_sentence_transformers.json",
        {"model_type": "MultiVectorEncoder", "prompts": prompts or {}, "similarity_fn_name": "maxsim"},
    )
    return folder


def _pylate(
    folder: Path, query_length: int, document_length: int, expand: bool, attend: bool, skip_words: tuple[str, ...]
) -> Path:
    write(folder / "sentence_bert_config.json", {"max_seq_length": 96, "do_lower_case": False})
    write_dense(folder / "1_Dense", WIDTH, TOKEN_WIDTH, IDENTITY, bias=False)
    write_modules(folder, "sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")
    write(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "ColBERT",
            "prompts": {},
            "similarity_fn_name": "MaxSim",
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": query_length,
            "document_length": document_length,
            "do_query_expansion": expand,
            "attend_to_expansion_tokens": attend,
            "skiplist_words": list(skip_words),
        },
    )
    return folder


def _stanford(folder: Path, query_length: int, document_length: int, attend: bool) -> Path:
    """One file of weights: the encoder's under "bert.", and the projection's beside them."""
    family = Family(word_piece(unused=4), FAMILIES["bert"].config)
    tokenizer = family.tokenizer()
    family.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn(TOKEN_WIDTH, WIDTH)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", architectures=["HF_ColBERT"])
    write(
        folder / "artifact.metadata",
        {
            "query_token_id": "[unused0]",
            "doc_token_id": "[unused1]",
            "query_maxlen": query_length,
            "doc_maxlen": document_length,
            "mask_punctuation": True,
            "attend_to_mask_tokens": attend,
            "dim": TOKEN_WIDTH,
        },
    )
    return folder


def build_m3(folder: Path, *, multi_vector_width: int = WIDTH, seed: int = 0) -> Path:
    """Write a BGE-M3: an XLM-RoBERTa that pools its first token, and its authors' two linear layers beside it."""
    build("xlm_roberta", folder, pooling="cls", seed=seed)
    torch.save(nn.Linear(WIDTH, 1).state_dict(), folder / "sparse_linear.pt")
    torch.save(nn.Linear(WIDTH, multi_vector_width).state_dict(), folder / "colbert_linear.pt")
    return folder


def build_static(
    folder: Path,
    *,
    layout: Literal["sentence-transformers", "model2vec"] = "sentence-transformers",
    normalize: bool = True,
    mapped: bool = False,
    seed: int = 0,
) -> Path:
    """Write a static embedding model; `mapped` as Model2Vec's quantised vocabularies, with a weight per token.

    `normalize` is Model2Vec's config.json's.
    """
    torch.manual_seed(seed)
    tokenizer = word_piece()()
    size = len(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "sentence-transformers":
        place = folder / "0_StaticEmbedding"
        place.mkdir()
        save_file({"embedding.weight": torch.randn(size, WIDTH)}, place / "model.safetensors")
        tokenizer.backend_tokenizer.save(str(place / "tokenizer.json"))
        kind = "sentence_transformers.models.StaticEmbedding"
        write(folder / "modules.json", [{"idx": 0, "name": "0", "path": place.name, "type": kind}])
        write(folder / "config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": None})
        return folder
    weights = {"embeddings": torch.randn(size // 2 if mapped else size, WIDTH)}
    if mapped:
        weights |= {"mapping": torch.arange(size) // 2 % (size // 2), "weights": torch.rand(size)}
    save_file(weights, folder / "model.safetensors")
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    write(folder / "config.json", {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": normalize})
    write_modules(folder, "sentence_transformers.models.StaticEmbedding", "sentence_transformers.models.Normalize")
    return folder
