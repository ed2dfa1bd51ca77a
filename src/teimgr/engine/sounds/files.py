"""Sound files of callers: format and length by the header, the samples, the mel spectrograms, each within limits.

A sound is decoded in blocks to one channel, the mean of all, at the model's sample rate. libsndfile decodes, through
`soundfile`; this module detects truncated files that it accepts.

Spectrograms are those of the library's feature extractor, but of windows at fixed instead of random places. A sound
that fits into a window is repeated and padded as by the extractor. Of a longer one, a model without fusion reads
consecutive windows, the last of which ends with the sound; a model with fusion reads the whole sound, shrunk, and
windows at its beginning, in its middle and at its end.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from teimgr.engine.images.inputs import FileTokenizer
from teimgr.engine.images.waiting import FileDecoder
from teimgr.engine.job import MediaFile, Sound
from teimgr.errors import InvalidInput
from teimgr.models.layout import Layout, SoundEncoder, SoundSteps
from teimgr.wire.gil import Rests

Spectrograms = NDArray[np.float32]
"""Spectrograms of a sound: [windows, 1, frames, mels]; with fusion [1, 1, frames, mels], or [1, 4, …] of a long one."""
_FRAMES_AT_ONCE = 512
_MIN_POWER = 1e-10


def windows_of(steps: SoundSteps, seconds: float) -> int:
    """Return the number of windows that a sound of this length is charged for."""
    return max(1, math.ceil(seconds * steps.rate / steps.window))


def prepare(samples: NDArray[np.float32], steps: SoundSteps) -> Spectrograms:
    """Compute the spectrograms of a sound."""
    filters = _filters(steps)
    if len(samples) <= steps.window:
        return _mels(_padded(samples, steps), steps, filters)[None, None]
    if steps.fuses:
        return _fused(_mels(samples, steps, filters), steps)
    last = len(samples) - steps.window
    places = [*range(0, last, steps.window), last]
    return np.stack([_mels(samples[at : at + steps.window], steps, filters)[None] for at in places])


def _padded(samples: NDArray[np.float32], steps: SoundSteps) -> NDArray[np.float32]:
    missing = steps.window - len(samples)
    if missing and steps.padding == "repeat":
        return np.resize(samples, steps.window)
    if missing and steps.padding == "repeatpad":
        samples = np.tile(samples, steps.window // len(samples))
    return np.pad(samples, (0, steps.window - len(samples)))


def _fused(mels: Spectrograms, steps: SoundSteps) -> Spectrograms:
    frames, total = steps.window // steps.hop + 1, len(mels)
    if total == frames:  # the sound is longer by less than a hop
        return mels[None, None]
    front, middle, back = (list(each) or [0] for each in np.array_split(np.arange(total - frames + 1), 3))
    places = (front[0], middle[len(middle) // 2], back[-1])
    return np.stack([_shrunk(mels, frames), *(mels[at : at + frames] for at in places)])[None]


def _shrunk(mels: Spectrograms, frames: int) -> Spectrograms:
    """Shrink to this many frames, interpolated linearly like torch's `interpolate`."""
    places = np.maximum((np.arange(frames, dtype=np.float32) + 0.5) * np.float32(len(mels) / frames) - 0.5, 0)
    before = places.astype(np.intp)
    part = (places - before)[:, None].astype(np.float32)
    behind = np.minimum(before + 1, len(mels) - 1)
    return np.asarray(mels[before] * (1 - part) + mels[behind] * part, np.float32)


def _mels(samples: NDArray[np.float32], steps: SoundSteps, filters: NDArray[np.float64]) -> Spectrograms:
    """In decibels, float32 [frames, mels]; some frames at a time, as each takes 16 kB."""
    half = steps.fft // 2
    padded = np.pad(samples, (half, half), mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, steps.fft)[:: steps.hop]
    shape = np.hanning(steps.fft + 1)[:-1]
    found = np.empty((len(frames), filters.shape[1]), np.float32)
    for at in range(0, len(frames), _FRAMES_AT_ONCE):
        spectrum = np.fft.rfft(frames[at : at + _FRAMES_AT_ONCE] * shape).astype(np.complex64)
        power = np.abs(spectrum, dtype=np.float64) ** 2
        found[at : at + _FRAMES_AT_ONCE] = 10 * np.log10(np.maximum(power @ filters, _MIN_POWER))
    return found


def _filters(steps: SoundSteps) -> NDArray[np.float64]:
    """Return the library's filters: torchaudio's kind for fusion, librosa's without, like the authors' own code."""
    from transformers.audio_utils import mel_filter_bank

    norm, scale = (None, "htk") if steps.fuses else ("slaney", "slaney")
    found = mel_filter_bank(
        num_frequency_bins=steps.fft // 2 + 1,
        num_mel_filters=steps.mels,
        min_frequency=steps.least_hz,
        max_frequency=steps.most_hz,
        sampling_rate=steps.rate,
        norm=norm,
        mel_scale=scale,
    )
    return np.asarray(found, np.float64)


MAX_SECONDS = 600
MAX_FILE_BYTES = 20 * 2**20
FORMATS = ("WAV", "FLAC", "OGG", "MP3")
_MAX_SAMPLES = MAX_SECONDS * 48_000 * 2  # of all channels; ten minutes in stereo
_RATES = (4_000, 192_000)
_MAX_CHANNELS = 8
_MAX_CHUNKS, _MAX_PAGES = 1000, 60_000  # of a WAV, and of an OGG, whose pages have at least 10 ms
_BLOCK_SAMPLES = 1 << 16
_LOUDEST = 1000  # full scale is 1
_LAST_PAGE = 4  # flag of an OGG page
_MAX_TAGS, _SHIFTS = 4, (21, 14, 7, 0)  # of ID3 before an MP3; the size has seven bits per byte
_UNKNOWN = 2**32 - 1  # size of a WAV's samples if it was written to a pipe
_WAY_OUT = "send WAV, FLAC, OGG (Vorbis, Opus) or MP3"
_KNOWN_OTHERS = (
    (b"RF64", "RF64"),
    (b"RIFX", "WAV of the other byte order"),
    (b"FORM", "AIFF"),
    (b".snd", "AU"),
    (b"\x1a\x45\xdf\xa3", "WebM or Matroska"),
    (b"#!AMR", "AMR"),
    (b"MThd", "MIDI"),
    (b"caff", "CAF"),
)


class Header(NamedTuple):
    """The header of a sound file: `frames` is the number of samples per channel."""

    format: str
    rate: int
    channels: int
    frames: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


class _QuietLibrary:
    """Drops what C libraries write to stderr meanwhile, in any number of threads at a time.

    libmpg123 writes a line for each broken frame of an MP3, so a caller could fill the log and rotate it away. Python's
    own output and `faulthandler` of a worker go to stdout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._kept: int | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._threads == 0:
                self._kept = _silenced_stderr()
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0 and self._kept is not None:
                os.dup2(self._kept, 2)
                os.close(self._kept)


def _silenced_stderr() -> int | None:
    """Lead descriptor 2 nowhere and return a copy of it; None, with nothing done, if it is closed or none is left."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            kept = os.dup(2)
            os.dup2(null, 2)
            return kept
        finally:
            os.close(null)
    return None


_QUIET_LIBRARY = _QuietLibrary()


def read_header(data: bytes) -> Header:
    """Return format and length of a sound file by its header.

    Raises:
        InvalidInput: its format is not allowed, it is empty, broken or cut, or too long.
    """
    if not data:
        raise InvalidInput("Input validation error: the sound is empty: it has no bytes")
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(
            f"Input validation error: the sound has {len(data):,} bytes, and {MAX_FILE_BYTES:,} are allowed: send it "
            "in parts, or compressed"
        )
    form = _format(data)
    _CHECKS[form](data)
    with _QUIET_LIBRARY, _opened(data, form) as file:
        header = Header(form, int(file.samplerate), int(file.channels), int(file.frames))
    _check(header)
    return header


def _check(header: Header) -> None:
    least, most = _RATES
    if not least <= header.rate <= most:
        raise InvalidInput(
            f"Input validation error: the sound has {header.rate:,} samples a second, and {least:,} to {most:,} are "
            "allowed: send it at another rate"
        )
    if not 1 <= header.channels <= _MAX_CHANNELS:
        raise InvalidInput(
            f"Input validation error: the sound has {header.channels} channels, and {_MAX_CHANNELS} are allowed: send "
            "it mixed down"
        )
    if header.frames < 1:
        raise InvalidInput("Input validation error: the sound is empty: it has 0 samples")
    if header.frames > MAX_SECONDS * header.rate or header.frames * header.channels > _MAX_SAMPLES:
        raise InvalidInput(
            f"Input validation error: the sound has {header.seconds:,.0f} s in {header.channels} channels of "
            f"{header.rate:,} samples a second, and {MAX_SECONDS} s are allowed, of {_MAX_SAMPLES:,} samples in all: "
            "send it in parts"
        )


def decode(data: bytes, rate: int) -> NDArray[np.float32]:
    """Return the samples of a file that `read_header` accepts: one channel, `rate` samples a second.

    Raises:
        InvalidInput: the file is cut or broken, or a sample is not a number.
    """
    with _QUIET_LIBRARY:
        return _decoded(data, read_header(data), rate)


def _decoded(data: bytes, header: Header, rate: int) -> NDArray[np.float32]:
    found = np.empty(-(-header.frames * rate // header.rate) + rate, np.float32)
    filled = 0
    for part in _resampled(_blocks(data, header), header, rate):
        if filled + len(part) > len(found):
            raise _broken(header.format)
        found[filled : filled + len(part)] = part
        filled += len(part)
    if not filled:
        raise InvalidInput("Input validation error: the sound is too short: it has no sample at the model's rate")
    if not np.abs(found[:filled]).max() <= _LOUDEST:  # also true for NaN
        raise InvalidInput(
            f"Input validation error: the sound has samples that are not finite numbers, or beyond {_LOUDEST:,} times "
            "full scale"
        )
    return found[:filled]


def _blocks(data: bytes, header: Header) -> Iterator[NDArray[np.float32]]:
    """The samples of all channels together, as many as the header promises."""
    step, left = max(1, _BLOCK_SAMPLES // header.channels), header.frames
    with _opened(data, header.format) as file:
        while left:
            try:
                block = file.read(min(step, left), dtype="float32", always_2d=True)
            except Exception as error:  # of any type; its text has an address
                raise _broken(header.format) from error
            if not len(block):
                raise _broken(header.format)
            left -= len(block)
            yield block[:, 0] if header.channels == 1 else block.mean(axis=1, dtype=np.float32)


def _resampled(blocks: Iterator[NDArray[np.float32]], header: Header, rate: int) -> Iterator[NDArray[np.float32]]:
    if header.rate == rate:
        yield from blocks
        return
    stream = soxr.ResampleStream(header.rate, rate, 1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.empty(0, np.float32), last=True)


def _format(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] in (b"fLaC", b"OggS"):
        return "FLAC" if data[:4] == b"fLaC" else "OGG"
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2):  # MPEG, layer III
        return "MP3"
    named = next((name for start, name in _KNOWN_OTHERS if data.startswith(start)), None)
    if named is None and data[4:8] == b"ftyp":
        named = "MP4, M4A or AAC"
    raise InvalidInput(
        "Input validation error: the bytes are not a sound of an allowed format"
        + (f", but {named}" if named else "")
        + f": {_WAY_OUT}"
    )


def _opened(data: bytes, form: str) -> Any:
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except Exception as error:  # of any type; its text has an address
        raise _broken(form) from error
    if file.format not in (form, f"{form}EX"):  # WAVEX has more channels
        file.close()
        raise _broken(form)
    return file


def _broken(form: str) -> InvalidInput:
    return InvalidInput(
        f"Input validation error: the sound cannot be decoded: the {form} file is truncated or broken: send it whole"
    )


def _without_length(form: str) -> InvalidInput:
    return InvalidInput(
        f"Input validation error: the header of the {form} file has no length, as of one that was written to a pipe: "
        "write it to a file first, and send that"
    )


def _check_wav(data: bytes) -> None:
    """Refuse a file with fewer bytes of samples than its header declares, of which libsndfile would read those; and one
    whose header declares none before bytes that follow, as some write it to a pipe.
    """
    at, parts = 12, 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"data":
            if at + 8 + size > len(data) and size != _UNKNOWN:
                raise _broken("WAV")
            if size == 0 and at + 8 < len(data):
                raise _without_length("WAV")
            return
        at, parts = at + 8 + size + size % 2, parts + 1
        if parts > _MAX_CHUNKS:
            break
    raise _broken("WAV")


def _check_ogg(data: bytes) -> None:
    """Refuse a file whose last page is not its stream's last; libsndfile would return the part that is there."""
    at, parts, serial, rest = 0, 0, data[14:18], Rests()
    while at + 27 <= len(data) and data[at : at + 4] == b"OggS":
        is_last = bool(data[at + 5] & _LAST_PAGE)
        lengths = data[at + 27 : at + 27 + data[at + 26]]
        end = at + 27 + data[at + 26] + sum(lengths)
        if data[at + 14 : at + 18] != serial or end > len(data) or len(lengths) != data[at + 26]:
            break  # further streams of the file are not read
        at, parts = end, parts + 1
        if is_last:
            if at == len(data):
                return
            break
        if parts > _MAX_PAGES:
            break
        rest()
    raise _broken("OGG")


def _check_mp3(data: bytes) -> None:
    """Refuse a file with fewer bytes than the Xing or Info header in its first frame declares."""
    first = 0
    for _ in range(_MAX_TAGS):
        if data[first : first + 3] != b"ID3":
            break
        first += 10 + sum(
            (byte & 0x7F) << shift for byte, shift in zip(data[first + 6 : first + 10], _SHIFTS, strict=False)
        )
    frame = data[first : first + 64]
    if len(frame) < 64:
        return
    is_first, is_mono = frame[1] & 0x18 == 0x18, frame[3] >> 6 == 3  # of MPEG 1
    at = 4 + (17 if is_mono else 32) if is_first else 4 + (9 if is_mono else 17)  # after the side information
    if frame[at : at + 4] not in (b"Xing", b"Info"):
        return
    flags = int.from_bytes(frame[at + 4 : at + 8], "big")
    has_bytes, place = bool(flags & 2), at + 8 + 4 * (flags & 1)
    if has_bytes and int.from_bytes(frame[place : place + 4], "big") > len(data) - first:
        raise _broken("MP3")


def _check_flac(data: bytes) -> None:
    """Refuse a file whose header has no length; libFLAC finds the end missing."""
    if len(data) > 26 and data[21] & 0x0F == 0 and data[22:26] == bytes(4):
        raise _without_length("FLAC")


_CHECKS: dict[str, Callable[[bytes], None]] = {
    "WAV": _check_wav,
    "FLAC": _check_flac,
    "OGG": _check_ogg,
    "MP3": _check_mp3,
}


class SoundTokenizer(FileTokenizer):
    """The tokenizer of a model of texts and sounds."""

    def __init__(self, layout: Layout, max_length: int) -> None:
        super().__init__(layout, max_length)
        assert layout.sound is not None
        self._sound = layout.sound

    def sound(self, data: bytes) -> Sound:
        """Make an input of the model from a sound file, by its header.

        Raises:
            InvalidInput: its format is not allowed, it is empty, broken at its beginning, or too long.
        """
        return read_sound(data, self._sound)

    def known_picture(self) -> MediaFile:
        """For self-tests."""
        return self.sound(known_file(self._sound.steps))


def read_sound(data: bytes, sound: SoundEncoder) -> Sound:
    """Like `SoundTokenizer.sound`."""
    header = read_header(data)
    tokens = windows_of(sound.steps, header.seconds) * sound.window_tokens
    digest = hashlib.sha256(data).digest()
    return Sound(data=data, format=header.format, tokens=tokens, digest=digest, seconds=header.seconds)


def known_samples(steps: SoundSteps, windows: float, seed: int) -> NDArray[np.float32]:
    """Return a rising tone with noise, which is the same at every load."""
    at = np.arange(int(windows * steps.window), dtype=np.float64) / steps.rate
    noise = np.random.default_rng(seed).standard_normal(len(at))
    return (0.5 * np.sin(2 * np.pi * (200 + 50 * at) * at) + 0.05 * noise).astype(np.float32)


def known_file(steps: SoundSteps) -> bytes:
    """Return a file that is the same at every load, longer than a window."""
    written = io.BytesIO()
    soundfile.write(written, known_samples(steps, 1.5, 0), steps.rate, format="WAV", subtype="PCM_16")
    return written.getvalue()


class SoundDecoder(FileDecoder):
    """Decodes sounds, at most `MAX_SECONDS` of them at a time."""

    most = MAX_SECONDS

    def __init__(self, sound: SoundEncoder, threads: int) -> None:
        super().__init__(threads)
        self._steps = sound.steps

    def size_of(self, file: Sound) -> int:
        """Return its seconds, rounded up."""
        return math.ceil(file.seconds)

    def prepared(self, file: Sound) -> Spectrograms:
        """Return its spectrograms; raises InvalidInput."""
        return prepare(decode(file.data, self._steps.rate), self._steps)
