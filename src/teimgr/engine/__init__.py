"""A model on a device: texts, pairs and ids in, vectors and scores out, without padding.

loading                        load a model from `EngineOptions`
rehearsal                      what a first load does once for all later ones, done ahead in the fork server
fidelity_gate                  the choice of dtype and batching, verified on known inputs
reference_cache                what a load is compared with, kept in files for the next load of the model
engine                         the public interface: submit, tokenize, self-test, statistics, close
job                            a call's inputs, options and results
intake                         first thread: jobs are tokenized
tokenizer, truncation,         prompts, limits, the tokenizers library; truncation; role prefixes and chat templates
templates
queue, fair_share,             second thread: batches by lane, tenant and length, packed into one row and started on the
length_buckets, batch, runner  device
images, sounds                 files decoded and prepared, ahead of their batch
known_results, space           results that are kept or computed once; the fingerprint of a space
core_load                      CPU threads of a batch, by the load of the host's other workers
helper_waits                   one thread for small batches while other processes hold up its helpers
model, backbone                the forward of a packed row: on CPUs one call of the C library is tried first, else the
                               model's own code runs, on CPUs with linear layers prepacked for oneDNN
own_reader                     the first module of a model's own code, run in place of a transformer
forward_trace, lowering,       how a model's own forward becomes a list of steps: the record of its operators, its
lowered_values,                interpretation, fusions of steps and bytes (int8)
forward_program
forward_kernel,                the C library of native/: found and loaded, the list of steps run by it, weights packed
packed_weights,                for it, attention alone
attention_kernel,
native_library
attention                      attention within the texts of a packed row, where the model's own code runs
gpu, gpu_choice, gpu_fusion,   what is otherwise on a GPU: dtypes, fused layers and their kernel, attention, graphs, the
norm_kernel, varlen_kernel,    proof that batches fit, copies between host and device
forward_graphs, host_weights,
budget_proof,
pinned_ring, host_copies
heads                          results from hidden states
finisher                       third thread: results are written into jobs, which are delivered
"""
