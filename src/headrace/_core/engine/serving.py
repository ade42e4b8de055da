"""The worker: the main function of a process that makes one batch after the other, on its main thread.

It makes batches of samples that were fetched elsewhere, or reads a torch dataset. It has no event loop.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headrace._core.batches import BatchPlan, HostBatch, RawBatch
from headrace._core.descriptors import Reserve, shortage
from headrace._core.engine.stepping import Chunk, StepsTask
from headrace._core.engine.worker_tasks import AssembleTask, Make, ReadTask, to_wire
from headrace._core.failure import Failure, Stage
from headrace._core.messages import Started, StepsAnswer, Unread
from headrace._core.pool.children import OPEN, ApplySteps, StartSession, Steps
from headrace._core.transport.channel import BlockingChannel, Connection, Disconnected
from headrace._core.transport.log_records import send_no_more_by, send_records_by
from headrace._core.transport.pickling import picklable_error
from headrace.collate import collate_into


def accept(connection: Connection) -> Connection | None:
    """The connection of a session that is requested; None at the end of `connection`.

    OSError if its descriptors could not be received; the consumer sees it closed.
    """
    message, descriptors, _, _ = socket.recv_fds(connection.descriptors, len(OPEN), 2)
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if len(sockets) < 2:
        for each in sockets:
            each.close()
        if message:
            raise shortage("open a session in a process of the loader")
        return None
    return Connection(*sockets)


@dataclass(frozen=True, slots=True)
class WorkerMain:
    """The main function of worker number `worker`, of `workers`.

    Attributes:
        task: what the process does in all sessions; None if each session brings its own.
    """

    worker: int
    workers: int
    task: AssembleTask | None = None

    @property
    def name(self) -> str:
        return f"headrace-worker-{self.worker}"

    def __call__(self, connection: Connection, control: socket.socket | None, prepare: Callable[[], None]) -> None:
        worker = Worker(self, connection)
        worker.begin(prepare)
        worker.run()


class Worker:
    def __init__(self, main: WorkerMain, connection: Connection) -> None:
        self._place = main.worker, main.workers
        self._connection = connection
        self._reserve = Reserve(2)  # for a session's connection
        self._selector = selectors.DefaultSelector()
        self._sessions: list[ServedSession] = []  # in the order in which they were opened
        self._broken: BaseException | None = None
        self._task = main.task
        self._number: int | None = None  # of the pickle that the task is from
        self._failed: BaseException | None = None  # why the task could not start

    def begin(self, prepare: Callable[[], None]) -> None:
        """Prepare the process, and start the task that it has, if there is one."""
        try:
            prepare()
        except BaseException as error:  # a setting cannot be applied: the error answers each plan
            self._broken = error
        if self._task is not None and self._broken is None:
            self._start(self._task)

    def run(self) -> None:
        """Serve sessions until the other end closes the connection."""
        for end in (self._connection.frames, self._connection.descriptors):
            self._selector.register(end, selectors.EVENT_READ)
        over = False
        while self._sessions or not over:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if ready & {self._connection.frames, self._connection.descriptors} and not self._accept():
                over = True
                self._selector.unregister(self._connection.frames)
                self._selector.unregister(self._connection.descriptors)
            # One after the other: an epoch that was left is read to the end of its plans before the next one.
            for session in [session for session in self._sessions if session.channel_end in ready]:
                if not session.receive():
                    self._selector.unregister(session.channel_end)
                    session.close()
                    self._sessions.remove(session)

    def is_over(self) -> bool:
        """Whether the other end has closed the connection to this process."""
        with suppress(BlockingIOError):
            return not self._connection.frames.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        return False

    def _accept(self) -> bool:
        """Accept a session that is requested; returns False at the end of the connection."""
        if self.is_over():
            return False
        with self._reserve.given_up(), suppress(OSError):  # other code took the reserve
            if (connection := accept(self._connection)) is None:
                return False
            session = ServedSession(self, connection)
            self._sessions.append(session)
            self._selector.register(session.channel_end, selectors.EVENT_READ)
        return True

    def _start(self, task: AssembleTask) -> None:
        try:
            task.start(*self._place)
        except BaseException as error:  # user code: worker_init_fn
            self._failed = error

    def open(self, opening: StartSession) -> Make:
        """Begin a session; errors of user code are raised."""
        if self._broken is not None:
            raise self._broken
        if opening.work is not None and opening.work.number != self._number:
            self._failed, self._number = None, opening.work.number
            self._task = opening.work.loads()
            self._start(self._task)
        assert self._task is not None
        if self._failed is not None:
            raise self._failed
        return self._task.open(opening)

    @property
    def reads(self) -> bool:
        """Whether a torch dataset is read here."""
        return isinstance(self._task, ReadTask)


class ServedSession:
    """One session of a worker, on a connection of its own."""

    def __init__(self, worker: Worker, connection: Connection) -> None:
        self._worker = worker
        self._channel = BlockingChannel(connection)
        self.channel_end = connection.frames
        self._make: Make | None = None
        self._failed: BaseException | None = None  # why the session could not begin
        self._left = False  # whether the consumer reads no more
        self._steps: dict[int, StepsTask | BaseException] = {}

    def receive(self) -> bool:
        """Answer the requests that have arrived; False at the end of the session."""
        try:
            for obj in self._channel.receive_ready():
                if self._left and self._worker.is_over():
                    return False
                self._handle(obj)
        except Disconnected:
            return False
        return True

    def _handle(self, obj: Any) -> None:
        if isinstance(obj, StartSession):  # the first session on this channel, or one after the other
            send_no_more_by(self._channel.send_between)
            send_records_by(self._channel.send_between)
            self._make, self._failed = None, None
            self._steps.clear()
            try:
                self._make = self._worker.open(obj)
            except BaseException as error:  # user code: imports of the user's modules, worker_init_fn
                self._failed = error
            self._send(Started())
        elif isinstance(obj, Steps):
            try:
                self._steps[obj.task.number] = obj.task.loads()
            except BaseException as error:  # user code: imports of the user's modules
                self._steps[obj.task.number] = error
        elif isinstance(obj, BaseException):  # user code: __setstate__ of a sample's class
            self._send(Unread(picklable_error(obj)))
        elif isinstance(obj, list):
            for plan in obj:
                self._answer(plan, plan)
        elif type(obj) is tuple:  # a flat `RawBatch`
            raw = RawBatch.from_flat(obj)
            if not self._left:
                self._answer(raw, raw.plan)
        else:
            assert isinstance(obj, ApplySteps)
            self._apply(obj)

    def _answer(self, request: Any, plan: BatchPlan) -> None:
        collate_into(self._channel.arena)
        self._channel.arena.begin()
        if self._make is None:
            assert self._failed is not None
            failure = Failure.caught(self._failed, Stage.WORKER_START, plan.number)
            host = HostBatch.nothing(plan, (failure,), end=self._worker.reads)
        else:
            try:
                host = self._make(request)
            except (
                BaseException
            ) as error:  # user code: SystemExit and KeyboardInterrupt are errors here, see docs/design
                host = HostBatch.failed(plan, error, Stage.ASSEMBLE)
        host = to_wire(host)
        self._send(host.flat(plan), plain=not host.failures)

    def _apply(self, request: ApplySteps) -> None:
        number, steps = request.number, self._steps[request.steps]
        try:
            if isinstance(steps, BaseException):
                raise steps
            outcomes = steps.outcomes(Chunk(*request.chunk))
        except BaseException as error:  # user code
            self._send(StepsAnswer(number, None, picklable_error(error)))
            return
        try:
            self._send(StepsAnswer(number, (outcomes.of_samples, outcomes.seconds)))
        except BaseException as error:  # user code: the outcomes cannot be pickled
            self._send(StepsAnswer(number, None, picklable_error(error), packing=True))

    def _send(self, obj: object, *, plain: bool = False) -> None:
        if self._left:
            return
        try:
            self._channel.send(obj, plain=plain)
        except OSError:
            # The consumer has left the epoch. What a worker reads in the next one must not depend on how far it has
            # come, so it reads on, as torch's workers do.
            self._left = True

    def close(self) -> None:
        send_no_more_by(self._channel.send_between)
        self._channel.close()
