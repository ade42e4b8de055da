"""
Audio of unequal length
=======================

Recordings of unequal length: read from WAV files in two workers, turned into spectrograms, padded
to a batch.

A torch program with one line changed: `from headrace import DataLoader`.
"""

import pathlib
import random
import tempfile
import wave

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from headrace import DataLoader

RATE = 8000  # samples a second
WINDOW, HOP = 256, 128  # samples: frames of 32 ms, every 16 ms
SILENCE = -8.0  # log power of a silent frame, used as padding


class Recordings(Dataset):
    """A folder of mono 16-bit WAV files: log spectrograms [frames, frequencies], and whether the pitch rises."""

    def __init__(self, folder):
        self.files = sorted(folder.glob("*.wav"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with wave.open(str(self.files[index])) as recording:
            pressure = np.frombuffer(recording.readframes(-1), dtype="<i2") / np.float32(
                1 << 15
            )
        waves = torch.stft(
            torch.from_numpy(pressure),
            WINDOW,
            HOP,
            window=torch.hann_window(WINDOW),
            return_complex=True,
        )
        spectrogram = (
            (waves.abs() ** 2 / WINDOW).clamp_min(np.exp(SILENCE)).log().T.contiguous()
        )
        return spectrogram, int("rising" in self.files[index].name)


def record(folder, count):
    """Whistles of 0.2 to 1.5 seconds that rise or fall."""
    chance = random.Random(0)
    for number in range(count):
        rising, seconds = chance.random() < 0.5, chance.uniform(0.2, 1.5)
        low, high = chance.uniform(300, 900), chance.uniform(1500, 3000)  # Hz
        pitch = np.linspace(
            *((low, high) if rising else (high, low)), int(RATE * seconds)
        )
        pressure = 0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
        with wave.open(
            str(folder / f"{number:03d}-{'rising' if rising else 'falling'}.wav"), "wb"
        ) as recording:
            recording.setnchannels(1)
            recording.setsampwidth(2)
            recording.setframerate(RATE)
            recording.writeframes((pressure * (1 << 15)).astype("<i2").tobytes())


def padded(recordings):
    spectrograms, labels = zip(*recordings, strict=True)
    lengths = torch.tensor([len(each) for each in spectrograms])
    return (
        pad_sequence(spectrograms, batch_first=True, padding_value=SILENCE),
        lengths,
        torch.tensor(labels),
    )


def rises(spectrograms, lengths):
    """Whether the loudest frequency is higher at the end than at the beginning; frames after the end are padding."""
    loudest = spectrograms.argmax(dim=2)
    ends = loudest[torch.arange(len(lengths)), lengths - 1]
    return ends > loudest[:, 0]


def draw(spectrograms, lengths, labels):
    """Eight recordings of a batch; what is right of the line is padding."""
    figure, axes = plt.subplots(
        2, 4, figsize=(9, 4), sharex=True, sharey=True, layout="constrained"
    )
    for panel, spectrogram, length, label in zip(
        axes.flat, spectrograms, lengths, labels, strict=False
    ):
        height = RATE / 2000  # kHz
        panel.imshow(
            spectrogram.T,
            origin="lower",
            aspect="auto",
            extent=(0, len(spectrogram) * HOP / RATE, 0, height),
        )
        panel.axvline(length * HOP / RATE, color="white", linestyle=":")
        panel.set_title("rising" if label else "falling", fontsize=10)
    figure.supxlabel("seconds", fontsize=10)
    figure.supylabel("kHz", fontsize=10)
    plt.show()


def main(folder):
    record(folder, 200)
    loader = DataLoader(
        Recordings(folder), batch_size=50, num_workers=2, collate_fn=padded
    )
    right = 0
    for number, (spectrograms, lengths, labels) in enumerate(loader):
        seconds = lengths * HOP / RATE
        padding = 1 - lengths.sum() / spectrograms.shape[:2].numel()
        shape = f"{[*spectrograms.shape]} of {seconds.min():.1f} to {seconds.max():.1f} s"
        print(f"batch {number}: {shape}, {padding:.0%} padding")
        padding_mask = torch.arange(spectrograms.shape[1]) >= lengths.unsqueeze(1)
        assert (spectrograms[padding_mask] == SILENCE).all()
        right += (rises(spectrograms, lengths) == labels).sum().item()
    draw(spectrograms, lengths, labels)
    print(
        f"{right} of {len(loader.dataset)} whistles classified correctly as rising or falling"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(pathlib.Path(temporary))
