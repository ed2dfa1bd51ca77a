"""What shows each claim of issue 28: its rows by number, what is claimed, rows of the catalogue, and tests.

W1 to W8 were served and silently wrong, R1 to R15 refused; those with a word for a number are of all models. A test's
name is `folder/file::function` below `tests/`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One row: `keys` are rows of the catalogue, exact or refused with a reason; `tests` are tests of the suite."""

    number: str
    words: str
    keys: tuple[str, ...]
    tests: tuple[str, ...]


_OWN = "models/test_own_code.py::"
_KEYS = "models/test_kinds.py::"
_LIBRARY = "engine/test_library_comparison.py::"
_LOADS = "end_to_end/test_failed_loads.py::"

CLAIMS = (
    Claim(
        "W1",
        "gte-Qwen2, stella 1.5B, GritLM, LLM2Vec: attention in both directions, the end token, code known by its files",
        ("gte-qwen2-1.5b", "gte-qwen2-7b", "gte-qwen2-causal", "stella-1.5b", "gritlm", "llm2vec-llama"),
        (
            f"{_OWN}test_a_decoder_attends_as_its_own_code_does",
            f"{_OWN}test_the_end_token_of_gte_qwens_own_tokenizer_is_behind_every_text_within_the_length",
            f"{_OWN}test_code_is_never_known_by_the_name_of_its_class",
            "models/test_gritlm.py::test_no_token_of_an_instruction_is_pooled",
        ),
    ),
    Claim(
        "W2",
        "nomic-embed-text up to its own length, past the trained one",
        ("nomic-v1", "nomic-v1.5", "nomic-coderank", "nomic-arctic-long"),
        (f"{_OWN}test_nomic_bert_of_the_hub_is_exact_up_to_its_own_length",),
    ),
    Claim(
        "W3",
        "truncate_dim of the files",
        ("files-truncate-dim",),
        (f"{_KEYS}test_dimensions_of_the_files_are_the_default_and_a_request_may_ask_for_more",),
    ),
    Claim(
        "W4",
        "weights that no module takes refuse the model",
        ("refused-relative-positions", "refused-unknown-weight"),
        (
            "engine/test_library_model.py::test_a_weight_that_no_module_takes_refuses_the_model",
            "engine/test_library_model.py::test_voyages_linear_layer_is_not_dropped",
            f"{_KEYS}test_a_value_that_changes_vectors_is_refused_by_name",
        ),
    ),
    Claim(
        "W5",
        "NomicBERT's old keys",
        ("nomic-rotary-base", "nomic-v1.5-both-keys", "nomic-gelu"),
        (
            f"{_OWN}test_nomic_bert_of_the_hub_is_exact_up_to_its_own_length",
            f"{_OWN}test_a_setting_of_nomic_bert_that_the_library_does_not_have_is_refused",
        ),
    ),
    Claim(
        "W6",
        "an adapter beside weights is merged",
        ("adapter-beside",),
        ("engine/weights/test_adapters.py::test_an_adapter_beside_weights_is_merged_into_the_model_that_it_names",),
    ),
    Claim(
        "W7",
        "use_bidirectional_attention of Qwen3",
        ("qwen3-bidirectional",),
        (f"{_OWN}test_a_decoder_attends_as_its_own_code_does",),
    ),
    Claim(
        "W8",
        "models of images are refused as what they are",
        ("refused-qwen3-vl", "refused-embeddinggemma2"),
        (f"{_KEYS}test_a_model_of_images_or_sound_is_refused_as_what_it_is",),
    ),
    Claim(
        "R1",
        "GTE new-impl",
        ("gte-multilingual", "gte-large-en-v1.5", "stella-400m", "gte-arctic-m-v2", "rerank-gte-multilingual"),
        (
            f"{_OWN}test_alibabas_new_impl_is_exact_as_the_librarys_gte",
            f"{_OWN}test_alibabas_reranker_is_exact",
            f"{_OWN}test_a_setting_of_new_impl_that_the_library_does_not_have_is_refused",
        ),
    ),
    Claim(
        "R2",
        "JinaBERT v2",
        ("jina-v2-base", "jina-v2-small", "jina-v2-code", "rerank-jina-v1", "jina-colbert-v1-query"),
        (
            "engine/own_models/test_jina_bert.py::test_embeddings_are_exact",
            "engine/own_models/test_jina_bert.py::test_long_texts_are_exact",
            "engine/own_models/test_jina_bert.py::test_jina_reranker_v1_is_exact",
            "engine/own_models/test_jina_bert.py::test_jina_colbert_v1_is_exact",
        ),
    ),
    Claim(
        "R3",
        "models with routes, sparse and dense",
        (
            *("sparse-router-root-query", "sparse-router-root-document", "sparse-router-nested-query"),
            *("sparse-router-relu", "sparse-router-gte", "router-two-query", "router-table-query"),
            "router-behind-query",
        ),
        (
            "models/test_dense_routes.py::test_vectors_of_both_roles_are_those_of_sentence_transformers",
            "models/test_routes.py::test_queries_and_documents_are_those_of_sentence_transformers",
            "models/test_routes.py::test_both_roles_of_a_text_in_one_batch",
            "models/test_routes.py::test_other_routes_are_refused_by_name",
        ),
    ),
    Claim(
        "R4",
        "nomic-embed-text-v2-moe",
        ("nomic-v2-moe",),
        ("engine/own_models/test_nomic_bert_moe.py::test_embeddings_are_exact",),
    ),
    Claim(
        "R5",
        "llama_bidirec",
        ("llama-nemotron", "rerank-nemotron"),
        (
            f"{_OWN}test_a_decoder_attends_as_its_own_code_does",
            "models/test_nemotron.py::test_scores_are_those_of_the_pooled_states_divided_by_the_temperature",
        ),
    ),
    Claim(
        "R6",
        "voyage-4-nano, pplx-embed",
        ("voyage-4-nano", "pplx-embed"),
        (
            "models/test_bidirectional_qwen3.py::test_the_linear_layer_of_voyage_is_behind_the_mean",
            "models/test_bidirectional_qwen3.py::test_vectors_of_pplx_are_integers",
        ),
    ),
    Claim(
        "R7",
        "jina v3, v5, reranker v2, colbert v2",
        (
            "jina-v3-retrieval-query",
            "jina-v5-small-query",
            "jina-v5-nano-query",
            "rerank-jina-v2",
            "jina-colbert-v2-query",
        ),
        (
            f"{_OWN}test_jina_embeddings_v3_is_exact_for_every_task",
            f"{_OWN}test_jinas_xlm_roberta_is_exact",
            f"{_OWN}test_jina_reranker_v2_is_exact",
            f"{_OWN}test_jina_colbert_v2_is_exact",
            "models/test_jina_v5.py::test_every_task_is_exact",
        ),
    ),
    Claim(
        "R8",
        "rerankers that are language models",
        (
            "rerank-qwen3-card",
            "rerank-qwen2-prompt",
            "rerank-gemma-prompt",
            "rerank-mono-t5",
            "rerank-jina-v3",
            "rerank-jina-v3.5",
        ),
        (
            "engine/test_model.py::test_a_language_model_scores_by_the_prompt_of_its_authors",
            "models/test_scoring.py::test_the_card_of_qwen3_reranker_is_followed",
            "models/test_monot5.py::test_scores_are_the_probability_of_true",
            "worker/test_scores.py::test_scores_are_those_of_its_authors_code",
            "worker/test_scores.py::test_a_long_list_is_divided_as_its_authors_do",
            "models/test_scoring.py::test_jina_reranker_v3_5_is_refused_by_name",
        ),
    ),
    Claim(
        "R9",
        "cross-encoders of modules",
        ("rerank-modules-modernbert", "rerank-modules-bert"),
        ("engine/test_model.py::test_a_cross_encoder_of_modules_scores_pairs",),
    ),
    Claim(
        "R10",
        "PyLate before 5, LFM2.5, bilingual-embedding, labels without names, chat templates, T5Gemma, DPR",
        (
            *("colbert-lfm2.5-query", "colbert-lfm2.5-document"),
            *("colbert-pylate-query", "lfm2.5-embedding", "bilingual", "classify-unnamed", "rerank-qwen3-seqcls-chat"),
            *("t5gemma", "t5gemma-whole", "dpr-question"),
        ),
        (
            "models/test_late_interaction.py::test_pylate_before_sentence_transformers_5_names_no_kind_of_model",
            f"{_OWN}test_lfm2_whose_tokens_see_all_others_is_exact",
            f"{_OWN}test_bilingual_embedding_is_xlm_roberta",
            f"{_OWN}test_dpr_is_the_first_token_of_a_bert",
            "models/test_scoring.py::test_labels_without_names_are_numbered_as_the_library_does",
            "engine/test_model.py::test_a_reranker_with_a_chat_template_scores_by_it",
            "engine/test_library_model.py::test_of_t5gemmas_files_with_a_decoder_the_encoder_is_loaded",
        ),
    ),
    Claim(
        "R11",
        "PEFT adapters",
        ("adapter-st", "adapter-rslora", "adapter-dora", "adapter-patterns", "adapter-table", "adapter-qwen3"),
        (
            "engine/weights/test_adapters.py::test_an_adapter_saved_by_sentence_transformers_is_merged",
            "engine/weights/test_adapters.py::test_a_bare_adapter_of_a_model_in_the_cache_has_its_tokenizer",
            "engine/weights/test_adapters.py::test_an_adapter_that_cannot_be_merged_is_refused_by_name",
        ),
    ),
    Claim(
        "R12",
        "repositories with ONNX alone",
        ("onnx-xenova", "onnx-root", "onnx-external", "onnx-classifier"),
        (
            "engine/weights/test_onnx.py::test_an_export_is_the_model_that_it_was_made_of",
            "engine/weights/test_onnx.py::test_a_graph_that_is_no_plain_export_is_refused",
        ),
    ),
    Claim(
        "R13",
        "token classifiers; GLiNER by name",
        ("tokens-bert", "tokens-distilbert", "tokens-xlmr", "tokens-deberta", "tokens-modernbert", "refused-gliner"),
        (
            "worker/test_scores.py::test_entities_are_those_of_transformers",
            "worker/test_scores.py::test_a_text_that_is_too_long_has_the_entities_of_what_was_kept",
            "worker/test_scores.py::test_a_gliner_is_refused_by_name",
        ),
    ),
    Claim(
        "R14",
        "GGUF of Qwen3; other GGUF and quantised checkpoints by name",
        ("gguf-f32", "gguf-f16", "gguf-q8_0", "gguf-q4_0", "refused-gguf"),
        (
            "engine/weights/test_own.py::test_a_file_is_the_model_that_it_was_made_of",
            "engine/weights/test_own.py::test_weights_are_those_that_transformers_reads",
            "models/test_gguf_head.py::test_metadata_that_are_not_served_are_named",
            "models/test_gguf_head.py::test_hostile_heads_are_refused_before_anything_is_made_of_them",
            "models/test_directory.py::test_a_directory_of_llama_cpps_files_is_refused_by_name",
            "models/test_directory.py::test_a_repository_of_llama_cpps_files_is_refused_by_name",
            "engine/test_loading.py::test_a_gguf_file_is_not_read_beside_safetensors_and_refused_alone",
            f"{_KEYS}test_a_value_that_changes_vectors_is_refused_by_name",
        ),
    ),
    Claim(
        "R15",
        "tokenizers of SentencePiece alone",
        ("pieces-xlmr", "pieces-t5", "pieces-camembert"),
        (
            "engine/text/test_tokenizer_library.py::test_xlm_roberta_has_the_ids_of_fairseq",
            "engine/text/test_tokenizer_library.py::test_a_tokenizer_that_cuts_otherwise_is_refused",
            "engine/text/test_tokenizer_library.py::test_without_the_extra_the_hint_names_it",
        ),
    ),
    Claim(
        "rule",
        "every key of a model's files is honoured, harmless, a warning or a refusal; strict_model_files makes a "
        "warning a refusal",
        ("files-saved-now", "files-lower-case", "files-position-ids"),
        (
            f"{_KEYS}test_an_unknown_key_that_is_switched_on_is_a_warning_and_a_refusal_where_strict",
            f"{_KEYS}test_an_unknown_key_that_is_switched_off_is_none",
            f"{_KEYS}test_a_layout_as_its_library_saves_it_has_no_warning",
            f"{_KEYS}test_a_file_that_modules_json_names_and_that_is_missing_is_named",
            f"{_KEYS}test_what_the_tokenizers_two_files_say_differently_is_a_warning",
            f"{_KEYS}test_without_a_tokenizer_class_the_librarys_for_the_model_type_counts",
        ),
    ),
    Claim(
        "verified",
        "models check compares with sentence-transformers or transformers and names it",
        (),
        (
            f"{_LIBRARY}test_an_embedder_is_verified_with_a_long_text_a_prompt_and_a_blank_one",
            f"{_LIBRARY}test_a_text_of_white_space_alone_is_compared",
            f"{_LIBRARY}test_scores_sparse_vectors_and_labels_of_tokens_are_compared",
            f"{_LIBRARY}test_without_sentence_transformers_it_says_so",
        ),
    ),
    Claim(
        "TEI",
        "a pooling that compose files of TEI give a reranker is a warning",
        (),
        ("models/test_kinds.py::test_a_pooling_that_means_nothing_is_a_warning",),
    ),
    Claim(
        "roles",
        "routes by role on every surface that has one",
        ("router-behind-query", "router-behind-document"),
        (
            "worker/dialects/test_roles.py::test_prompt_name_and_is_query_choose_the_way",
            "worker/dialects/test_roles.py::test_scores_compare_a_query_with_documents",
        ),
    ),
    Claim(
        "entities",
        "token classifiers in each dialect that has such a route",
        ("tokens-bert",),
        (
            "worker/dialects/test_tei.py::test_a_token_classifier_predicts_entities",
            "worker/dialects/test_tei.py::test_what_a_token_classifier_is_not_asked",
            "worker/dialects/test_vllm.py::test_a_token_classifier_pools_a_probability_per_label_and_token",
        ),
    ),
    Claim(
        "files",
        "one list of files for download, completeness, trial and loading",
        ("files-dense-bin", "files-transformer-bin", "files-bin-shards", "files-0-transformer-bin", "files-links"),
        (
            "models/test_directory.py::test_a_model_is_downloaded_whole_and_found_offline",
            "models/test_directory.py::test_a_module_folder_may_be_a_link_within_the_models_cache",
            "models/test_directory.py::test_shards_of_pickled_weights_are_read_together",
        ),
    ),
    Claim(
        "loads",
        "a load that cannot succeed ends, and create --wait with it",
        (),
        (
            f"{_LOADS}test_a_broken_model_fails_at_once_with_the_cause",
            f"{_LOADS}test_a_hub_that_refuses_the_token_is_named",
            f"{_LOADS}test_a_cache_that_is_no_folder_is_named",
            "models/test_json_files.py::test_a_size_that_config_json_leaves_out_is_that_of_its_class_by_its_own_name",
        ),
    ),
    Claim(
        "§3",
        "code that is trusted",
        (
            *("trusted-model", "trusted-module", "trusted-module-new", "trusted-first", "trusted-first-old"),
            *("trusted-first-pooled", "trusted-router-document", "trusted-router-query"),
        ),
        (
            "end_to_end/test_trusted_code.py::test_trusted_code_runs_and_gives_what_it_computes",
            "engine/test_backbone.py::test_tables_that_own_code_makes_hold_their_values_and_layers_their_attributes",
            "engine/test_own_reader.py::test_it_gives_what_sentence_transformers_gives",
            "engine/test_own_reader.py::test_what_it_does_otherwise_is_refused_by_name",
            "engine/test_own_reader.py::test_it_may_give_the_vector_of_a_text_itself",
            "engine/test_own_reader.py::test_it_may_stand_in_a_route_or_before_a_router",
            "end_to_end/test_trusted_code.py::test_a_first_module_loads_the_code_at_the_pinned_revision",
            "end_to_end/test_trusted_code.py::test_a_trial_compares_with_the_code_at_the_same_revision",
            "end_to_end/test_trusted_code.py::test_a_revision_that_the_code_lacks_is_named",
        ),
    ),
)
