"""A model on a device: texts, pairs and ids in, vectors and scores out, without padding.

layout (beside this package), prompts    what the model's directory says
tokenizer_file, tokenizer_library        the tokenizers library, made safe and quick
shortening, truncation                   texts that are very long, or have too many tokens
roles, causal_text                       queries and documents; templates around pairs
loading, probe, fingerprint              from options to parts; the choices made by trying
job, kinds, intake, tokenizer            a call's inputs, checked, and tokenized on the first thread
shelf, queue, batch, runner              batches by length and lane, packed and run on the second
model: transformer, static, attention,   the forward of one packed row
linears, heads                           what is made of its hidden states
finisher, results                        results into jobs, delivered on the third
engine, proof                            the door to all of it, and how it knows that it is well
"""
