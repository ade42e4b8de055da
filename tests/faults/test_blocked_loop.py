"""A process that is stopped does not block its loop."""

import logging
import os
import subprocess

import headrace as hr

STOP = 0.3  # seconds: the length of each stop


class Computing(hr.AsyncDataset):
    def __len__(self):
        return 600

    async def aget(self, index):
        return sum(number * number for number in range(1000))


def test_a_stopped_process_is_no_cause_of_a_warning(script):
    def program():
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("headrace").addHandler(handler)
        commands = f"for i in 1 2; do kill -STOP {os.getpid()}; sleep {STOP}; kill -CONT {os.getpid()}; done"
        with hr.DataLoader(Computing(), batch_size=10, placement="thread") as loader:
            stopping = None
            while stopping is None or stopping.poll() is None:  # user code computes on the loop when it is stopped
                for _ in loader:
                    stopping = stopping or subprocess.Popen(["sh", "-c", commands])
        print(stopping.returncode, messages)

    assert script(program).stdout == "0 []\n"
