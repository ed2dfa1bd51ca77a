"""Models as files: resolved and fetched, read and validated, described as a `Layout`. The main modules:

layout             `Layout`, the description of a servable model, and its parts
reading            `read_layout`: from a model directory to its layout
json_files         tokenizer files and lengths; `bounded_json` reads the JSON itself
metadata           `ModelMetadata`: the files of a directory, each read once
modules            modules.json and the configurations of its modules
kinds              embedding, sparse, multi-vector, reranker or classifier
late_interaction   ColBERT models; scoring: classifiers, cross-encoders and causal rerankers

Of weight files only the heads are read. Models that cannot be served correctly are refused with the reason.
"""
