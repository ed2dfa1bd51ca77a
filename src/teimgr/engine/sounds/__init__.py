"""Sounds of models that embed texts and sounds into one space.

    files         a sound file: its format and length from the header, and its samples, within limits
    spectrograms  what the model reads of samples, in windows at fixed places
    inputs        sounds beside texts: tokenizer, decoding ahead of a batch
    model         the sound half of a model, and both halves as one model

Waiting files, batches and their runner are those of images (`engine.images`), so that the extra `audio` has Pillow too.
Nothing of this is imported for a model of texts alone, or of images.
"""
