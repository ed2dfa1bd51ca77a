"""Sounds, for models that embed texts and sounds into one space.

    files   a sound file: its format and length from the header, its samples, within limits, and their spectrograms, in
            windows at fixed places
    model   the sound half of a model, and both halves as one model

`engine.images` has the waiting files, the batches and their runner, so the extra `audio` includes Pillow. Models of
texts alone, or of images, import nothing of this.
"""
