"""Awkward sound files: each is read as it sounds, or refused with a reason and a way out."""

from __future__ import annotations

import io
import os
import resource
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from tests.support.models.dual_encoders import RATE, sound, sound_file

from teimgr.engine.job import Sound
from teimgr.engine.sounds import files
from teimgr.engine.sounds.files import MAX_SECONDS, SoundDecoder, decode, prepare, read_header
from teimgr.errors import InvalidInput
from teimgr.models.layout import SoundEncoder, SoundSteps

STEPS = SoundSteps(RATE, 10 * RATE, 480, 1024, 64, 50.0, 14_000.0, "repeatpad", False)
PLAIN = sound(3.0)
FORMS: dict[str, tuple[str, str]] = {
    "WAV, 16 bits": ("WAV", "PCM_16"),
    "WAV, 24 bits": ("WAV", "PCM_24"),
    "WAV, floats": ("WAV", "FLOAT"),
    "WAV, 8 bits": ("WAV", "PCM_U8"),
    "FLAC": ("FLAC", "PCM_16"),
    "Vorbis": ("OGG", "VORBIS"),
    "Opus": ("OGG", "OPUS"),
    "MP3": ("MP3", "MPEG_LAYER_III"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_each_format_is_read_whole(form: str) -> None:
    data = sound_file(PLAIN, *FORMS[form])
    header = read_header(data)
    assert (header.rate, header.channels) == (RATE, 1)
    found = decode(data, RATE)
    assert abs(len(found) - len(PLAIN)) <= 2 * 1152
    if form.startswith(("WAV", "FLAC")):
        assert np.abs(found - PLAIN).max() < 0.02


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("left", [2 / 3, 0.99])
def test_a_cut_file_is_refused(form: str, left: float) -> None:
    data = sound_file(PLAIN, *FORMS[form])
    with pytest.raises(InvalidInput, match="file is truncated or broken: send it whole"):
        decode(data[: int(len(data) * left)], RATE)


def _with_size(data: bytes, size: int) -> bytes:
    """A WAV whose header has that many bytes of samples."""
    at = data.index(b"data") + 4
    return data[:at] + size.to_bytes(4, "little") + data[at + 4 :]


def test_a_wav_that_was_written_to_a_pipe_is_read_to_its_end() -> None:
    whole = sound_file(PLAIN, "WAV", "PCM_16")
    assert (decode(_with_size(whole, 2**32 - 1), RATE) == decode(whole, RATE)).all()


def test_a_file_whose_header_has_no_length_is_refused_by_that() -> None:
    flac = bytearray(sound_file(PLAIN, "FLAC", "PCM_16"))
    flac[21:26] = bytes([flac[21] & 0xF0, 0, 0, 0, 0])
    for data, form in ((_with_size(sound_file(PLAIN, "WAV", "PCM_16"), 0), "WAV"), (bytes(flac), "FLAC")):
        with pytest.raises(InvalidInput, match=f"the header of the {form} file has no length"):
            read_header(data)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [48_000, 22_050])  # MPEG 1, and 2, whose side information is shorter
def test_an_mp3_is_whole_by_the_header_of_its_first_frame_alone(channels: int, rate: int) -> None:
    plain = sound_file(sound(1.0, rate=rate, channels=channels), "MP3", "MPEG_LAYER_III", rate)
    assert b"Info" in plain[:64] or b"Xing" in plain[:64]
    for text in (b"TXXX\0\0\0\x14\0\0\0Info: bootleg of 1999", b"APIC" + bytes(9_000)):
        size = bytes(len(text) >> shift & 0x7F for shift in (21, 14, 7, 0))
        file = b"ID3\x04\0\0" + size + text + plain
        assert read_header(file) == read_header(plain)
        with pytest.raises(InvalidInput, match="the MP3 file is truncated or broken"):
            read_header(file[:-200])


def test_44_1_khz_in_stereo_is_mixed_and_resampled() -> None:
    stereo = sound(2.0, 1, 44_100, 2)
    found = decode(sound_file(stereo, rate=44_100), RATE)
    expected = soxr.resample(stereo.mean(axis=1), 44_100, RATE)
    assert abs(len(found) - 2 * RATE) <= 1
    assert np.abs(found[: len(expected)] - expected[: len(found)]).max() < 1e-4


def test_ten_minutes_of_silence_in_a_small_file_are_judged_by_the_header() -> None:
    written = io.BytesIO()
    with soundfile.SoundFile(written, "w", RATE, 1, format="FLAC", subtype="PCM_16") as file:
        for _ in range(MAX_SECONDS + 1):
            file.write(np.zeros(RATE, np.int16))
    data = written.getvalue()
    assert len(data) < 120_000
    tracemalloc.start()
    with pytest.raises(InvalidInput, match=r"has 601 s in 1 channels .* and 600 s are allowed"):
        read_header(data)
    assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    tracemalloc.stop()


REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it has no bytes"),
    "0 samples": (sound_file(np.zeros(0, np.float32)), "it has 0 samples"),
    "a text": (b"RIFFle shuffle", "not a sound of an allowed format: send WAV"),
    "AIFF": (sound_file(PLAIN, "AIFF", "PCM_16"), "but AIFF: send WAV"),
    "AU": (sound_file(PLAIN, "AU", "PCM_16"), "but AU: send WAV"),
    "MP4": (b"\0\0\0\x20ftypM4A \0", "but MP4, M4A or AAC"),
    "too many channels": (sound_file(sound(0.1, channels=9)), "has 9 channels, and 8 are allowed"),
    "a rate of 1 kHz": (sound_file(sound(0.5, rate=1000), rate=1000), "has 1,000 samples a second"),
    "a WAV without samples": (sound_file(PLAIN)[:36], "truncated or broken"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_their_header(name: str) -> None:
    data, said = REFUSED[name]
    with pytest.raises(InvalidInput, match=said):
        read_header(data)


def test_samples_that_are_no_numbers_are_refused() -> None:
    broken = PLAIN.copy()
    broken[1000] = np.nan
    with pytest.raises(InvalidInput, match="not finite numbers"):
        decode(sound_file(broken), RATE)


def test_a_text_that_looks_like_a_path_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(sound_file(PLAIN))
    with pytest.raises(InvalidInput, match="not a sound of an allowed format"):
        read_header(str(tmp_path / "a.wav").encode())


@pytest.mark.parametrize("seconds", [0.001, 0.4, 10.0, 10.001, 25.0])
def test_windows_are_full_and_at_fixed_places(seconds: float) -> None:
    found = prepare(sound(seconds), STEPS)
    assert found.shape[1:] == (1, 1001, 64)
    assert len(found) == max(1, -(-int(seconds * RATE) // STEPS.window))
    assert (found == prepare(sound(seconds), STEPS)).all()


def test_no_more_seconds_are_decoded_at_a_time_than_are_allowed() -> None:
    """Three sounds of 400 s: one after the other."""
    at_once, most = 0, 0
    lock = threading.Lock()

    class Counting(SoundDecoder):
        def prepared(self, file: Sound) -> Any:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            found = np.zeros((1, 1, 1, 1), np.float32)
            with lock:
                at_once -= 1
            return found

    decoder = Counting(SoundEncoder(64, STEPS), 3)
    decoder.start()
    sounds = [Sound(data=b"", format="WAV", tokens=1, digest=b"", seconds=400.0) for _ in range(3)]
    for waiting in decoder.expect(sounds):
        waiting.take()
    decoder.close()
    assert most == 1


@pytest.mark.parametrize(("chunks", "is_read"), [(900, True), (1001, False)])
def test_a_wav_of_very_many_chunks_is_refused(chunks: int, is_read: bool) -> None:
    plain = sound_file(PLAIN)
    data = plain[:36] + b"JUNK\0\0\0\0" * chunks + plain[36:]
    if is_read:
        assert read_header(data).frames == len(PLAIN)
        return
    with pytest.raises(InvalidInput, match="truncated or broken"):
        read_header(data)


def test_an_ogg_of_very_many_pages_is_refused() -> None:
    page = b"OggS" + bytes(23)
    with pytest.raises(InvalidInput, match="truncated or broken"):
        files._check_ogg(page * 60_002 + page[:5] + bytes((4,)) + page[6:])
    files._check_ogg(page * 100 + page[:5] + bytes((4,)) + page[6:])


def test_broken_frames_of_an_mp3_write_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """libmpg123 writes a line for each; two threads decode at a time."""
    whole = sound_file(PLAIN, *FORMS["MP3"])
    broken = bytes(byte ^ 0xFF if at > 2000 and at % 400 == 0 else byte for at, byte in enumerate(whole))
    samples = []
    threads = [threading.Thread(target=lambda: samples.append(_decoded(broken))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    os.write(2, b"of others\n")
    assert len(samples) == 2
    assert capfd.readouterr().err == "of others\n"


def test_a_sound_is_decoded_where_no_descriptor_is_left() -> None:
    """The library opens no file: one that broken frames of an MP3 would need must not fail a sound."""
    whole = sound_file(PLAIN, *FORMS["MP3"])
    samples = len(decode(whole, RATE))
    free, (soft, hard) = os.dup(2), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(2)
        assert len(decode(whole, RATE)) == samples
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _decoded(data: bytes) -> int:
    try:
        return len(decode(data, RATE))
    except InvalidInput:
        return 0
