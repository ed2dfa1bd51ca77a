"""Models as files: resolved and fetched, read and validated, described as a `Layout`. The main modules:

layout             `Layout`, the description of a servable model, and its parts
reading            `read_layout`: from a model directory to its layout
json_files         tokenizer files, lengths; the JSON itself is read by `teimgr.models.bounded_json`
metadata           `ModelMetadata`: the files of a directory, each read once
modules            modules.json and the configurations of its modules
kinds              embedding, sparse, multi-vector, reranker or classifier
late_interaction   ColBERT models; scoring: classifiers, cross-encoders and causal rerankers

Only the heads of weight files are read. Models that cannot be served correctly are refused here, with the reason.
"""
