"""A model on a device: text in, vectors out, without padding.

layout, tokenizer_file, prompts      what the model's directory says
loading, probe                       from options to parts; the choices made by trying
job, intake, tokenizer               a call's texts, tokenized on the first thread
shelf, queue, batch, runner          batches by length and lane, packed and run on the second
embedder: model, attention, linears  the forward of one packed row
pooling, heads                       one vector per text
finisher                             results into jobs, delivered on the third
engine                               the door to all of it
"""
