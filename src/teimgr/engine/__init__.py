"""A model on a device: texts, pairs and ids in, vectors and scores out, without padding.

A call, in its order:
engine                   the public interface: submit, tokenize, self-test, statistics, close
job                      a call's inputs, options and results
intake                   first thread: jobs are tokenized, and charged to their keys (`Charging` in batching/queue)
text/                    prompts, templates, truncation, the tokenizers library, WordPiece in C
batching/                the queue by lane, tenant and length, and the packed batch
runner,                  second thread: starts batches on the device, and queries between steps of bulk work; CPU
core_load                threads by the load of the host's workers
model, backbone          the forward of a packed row: on CPUs by one call of the C library if possible, else by the
                         model's own code, on CPUs with linear layers prepacked for oneDNN
attention                attention within the texts of a packed row; biases and positions that depend on a text's length
heads/, token_pooling    results from hidden states
finisher, host_copies    third thread: results are copied to the host, written into jobs and delivered
known_results            results that are kept, or computed once for equal inputs
images/, sounds/         decoding and preparing files ahead of their batch

A load:
loading, model_choice    load a model from `EngineOptions`
library_model,           models of transformers; first modules of a model's own code; routes by role; own copies of code
own_reader,              that transformers does not have
own_models/
weights/                 adapters, GGUF, ONNX, own formats of models, copies on the host
fidelity/                the choice of dtype and batching: candidates, their speed, comparison with a reference
space                    the fingerprint of everything that determines a model's vectors
kept_files               files that one load keeps for the next
library_comparison,      comparison of a loaded model with sentence-transformers or transformers
library_reference

Devices:
native/,                 the C library, and its loading
native_library
attention_kernel,        only attention by it; a model's forward recorded and lowered to a list of its steps, which the
native_forward/          fork server does once in advance (`rehearse` in native_forward/lowering)
gpu, gpu_choice,         differences on a GPU: dtypes and layouts, kernels and graphs
gpu_kernels/
"""
