"""A model on a device: texts, pairs and ids in, vectors and scores out, without padding.

A call, in its order:
engine                   the public interface: submit, tokenize, self-test, statistics, close
job                      a call's inputs, options and results
intake, charging         first thread: jobs are tokenized, and charged to their keys
text/                    prompts, templates, truncation, the tokenizers library, WordPiece in C
batching/                the queue by lane, tenant and length, and the packed batch
runner,                  second thread: batches are started on the device; queries between steps of bulk; CPU threads
core_load                by the load of the host's workers
model, backbone          the forward of a packed row: on CPUs one call of the C library is tried first, else the model's
                         own code runs, on CPUs with linear layers prepacked for oneDNN
attention, rotary        attention within the texts of a packed row; biases and positions that depend on a text's length
heads/, token_pooling    results from hidden states
finisher, host_copies    third thread: results are copied to the host, written into jobs and delivered
known_results            results that are kept, or computed once for equal inputs
images/, sounds/         files decoded and prepared, ahead of their batch

A load:
loading, model_choice    load a model from `EngineOptions`
library_model,           models of transformers; first modules of a model's own code; routes by role; own copies of code
own_reader,              that transformers does not have
own_models/
weights/                 adapters, GGUF, ONNX, files of a model's own, copies on the host
fidelity/                the choice of dtype and batching: candidates, their speed, their results beside a reference
space                    the fingerprint of what decides what a vector means
kept_files               files that one load keeps for the next
rehearsal                what a first load does once for all later ones, done ahead in the fork server
library_comparison,      a loaded model beside sentence-transformers or transformers
library_reference

Devices:
native/,                 the C library, and its loading
native_library
attention_kernel,        attention by it alone; a model's own forward recorded and lowered to a list of its steps
native_forward/
gpu, gpu_choice,         what is otherwise on a GPU: dtypes and layouts, kernels and graphs
gpu_kernels/
"""
