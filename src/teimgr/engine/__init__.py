"""A model on a device: texts, pairs and ids in, vectors and scores out, without padding.

loading                        load a model from `EngineOptions`
fidelity_gate                  the choice of dtype and batching, verified on known inputs
engine                         the public interface: submit, tokenize, self-test, statistics, close
job                            a call's inputs, options and results
intake                         first thread: jobs are tokenized
tokenizer, truncation,         prompts, limits, the tokenizers library; truncation; role prefixes and chat templates
templates
queue, batch, runner           second thread: batches by length and lane, packed into one row and started on the device
model, backbone, attention     the forward of a packed row; linear layers prepacked for oneDNN
heads                          results from hidden states
finisher                       third thread: results are written into jobs, which are delivered
"""
