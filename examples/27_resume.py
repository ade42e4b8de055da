"""
Killed, and resumed
===================

Training that is killed twice and resumed: each sample counts once, and the losses are those of a
run without a kill.

::

    python examples/27_resume.py

It starts itself as a child process. The first child is ended by SIGKILL, so that the second has to
go back to the last checkpoint; that one is ended by SIGTERM, to which it answers with a checkpoint.
The rest is trained here, and compared with an uninterrupted run.
"""

import pathlib
import signal
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch

import headrace as hr

SAMPLES, BATCH, EPOCHS, EVERY = 400, 8, 3, 10


def write_samples(folder):
    """One object for each sample: a point, and its value under a linear function."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for number in range(SAMPLES):
        x = random.random(4, dtype=np.float32)
        (folder / f"{number:04d}.bin").write_bytes(
            np.append(x, x @ [1, -2, 3, 0.5]).astype(np.float32).tobytes()
        )


def decode(sample):
    """Number, input and target, with random noise on the input."""
    point = torch.frombuffer(bytearray(sample.data), dtype=torch.float32)
    return (
        int(pathlib.Path(sample.key).stem),
        point[:4] + 0.01 * torch.randn(4),
        point[4:],
    )


def save(path, state):
    """Write a checkpoint; a kill leaves the old one or the new one, never a part."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    new.replace(path)


def train(folder, checkpoint, stop=()):
    """Train until the end, or until `stop` is filled; gives the history before the first and after each step."""
    torch.manual_seed(0)
    objects = hr.ObjectDataset(folder.as_uri(), suffix=".bin")
    loader = hr.DataLoader(objects, BATCH, shuffle=True, seed=0, transform=decode)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    first = 0
    history = []  # of each step: epoch, numbers of the samples, loss
    parts = {"loader": loader, "model": model, "optimizer": optimizer}
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first, history = saved["epoch"], saved["history"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    yield history
    with loader:
        for epoch in range(first, EPOCHS):
            for numbers, x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history.append((epoch, numbers.tolist(), loss.item()))
                last = bool(stop)
                if last or len(history) % EVERY == 0:
                    states = {name: part.state_dict() for name, part in parts.items()}
                    save(checkpoint, {"epoch": epoch, "history": history, **states})
                yield history
                if last:
                    return


def child(folder, checkpoint):
    """Train, and print the number of steps after each one."""
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    for history in train(pathlib.Path(folder), pathlib.Path(checkpoint), stop):
        print(len(history), flush=True)


def train_and_kill(folder, checkpoint, number, at):
    """Train in a child process, and send it a signal when it has done `at` steps; gives its first and last step."""
    with subprocess.Popen(
        [sys.executable, sys.argv[0], folder, checkpoint],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        first = int(next(process.stdout))
        for line in process.stdout:
            steps = int(line)
            if steps == at:
                process.send_signal(number)
    print(f"trained from step {first} to {steps}, then {number.name}")
    return first, steps


def draw(losses, ranges):
    """The losses of each process over its steps, and those of the uninterrupted run below them."""
    _, panel = plt.subplots(figsize=(9, 4), layout="constrained")
    panel.plot(losses, lw=5, color="#d8dee6", label="without a kill")
    for (first, last), how in zip(ranges, ("SIGKILL", "SIGTERM", "the end"), strict=True):
        (line,) = panel.plot(
            range(first, last),
            losses[first:last],
            lw=1.2,
            label=f"steps {first} to {last}, then {how}",
        )
        panel.axvline(first, color=line.get_color(), lw=0.8, linestyle=":")
    panel.set(xlabel="step", ylabel="loss", yscale="log")
    panel.legend(frameon=False)
    plt.show()


def main():
    with tempfile.TemporaryDirectory() as name:
        folder, checkpoint = (
            pathlib.Path(name, "samples"),
            pathlib.Path(name, "killed.pt"),
        )
        write_samples(folder)
        killed = train_and_kill(folder, checkpoint, signal.SIGKILL, at=27)
        terminated = train_and_kill(folder, checkpoint, signal.SIGTERM, at=83)
        training = train(folder, checkpoint)
        first = len(next(training))
        *_, resumed = training
        print(f"trained from step {first} to {len(resumed)}, the end")
        *_, whole = train(folder, pathlib.Path(name, "whole.pt"))
    for epoch in range(EPOCHS):
        seen = [number for of, numbers, _ in resumed if of == epoch for number in numbers]
        assert sorted(seen) == list(range(SAMPLES))
    print(f"each of {SAMPLES} samples was seen once in each of {EPOCHS} epochs")
    assert resumed == whole
    print(
        f"all {len(whole)} losses are those of an uninterrupted run, from {whole[0][2]:.4f} to {whole[-1][2]:.4f}"
    )
    draw([loss for *_, loss in whole], [killed, terminated, (first, len(whole))])


if __name__ == "__main__":
    torch.set_num_threads(1)  # the sums of several threads may differ in the last bit
    child(*sys.argv[1:]) if len(sys.argv) > 1 else main()
