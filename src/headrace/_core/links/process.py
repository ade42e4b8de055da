"""The process placement: engines, or workers that read a torch dataset, in child processes.

Neither they nor the trainer's Python slow each other. The consumer's process needs no thread for them. Plans are sent
and batches received on the consumer's own thread; a blocking consumer waits for a socket, an async one for its
descriptor.
"""

from __future__ import annotations

import functools

from torch import multiprocessing

from headrace._core.batches import SessionStart
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.engine.serving import WorkerMain
from headrace._core.links.group import EngineGroup
from headrace._core.links.placement import CLOSE_DEADLINE, Placement
from headrace._core.links.session import Session
from headrace._core.links.sidecar import SidecarMain
from headrace._core.pool.children import Children, ProcessLink, StartSession
from headrace._core.pool.dealing import ANY, Dealer
from headrace._core.pool.group import WorkerGroup, log_idle_death
from headrace._core.pool.launch import WorkerProcess, launch_by_context, launch_by_zygote
from headrace._core.pool.settings import Settings
from headrace._core.streams.kinds import sample_key
from headrace._core.streams.resumable import is_stateful
from headrace._core.transport.channel import Connection
from headrace._core.transport.pickling import PickledPayload
from headrace._core.transport.shared_pickle import SharedPickle

ROOM_OUT_OF_ORDER = 2  # plans that a worker can be given at once where a slow one delays only its own

_BLOCKS = "code in aget or __aiter__ blocks, or does not let CancelledError pass."


class ProcessPlacement(Placement):
    """Engines in processes, each of which has a copy of the dataset."""

    def __init__(self, config: EngineConfig, work: SharedPickle, engines: int = 1) -> None:
        super().__init__()
        try:
            self._pickled = SharedPickle.dumps(config.without_functions())
        except Exception as error:
            name_unpicklable(config, error)
        self._config = config
        self._modules = (*self._pickled.modules, *work.modules)
        self._count = engines
        self.children = Children(self._launch)

    def _launch(self, engine: int) -> tuple[WorkerProcess, Connection]:
        main = SidecarMain(self._pickled, self._config.rank, engine, self._count)
        return launch_by_zygote(main, self._modules, Settings.here(), has_control=True)

    @property
    def alive(self) -> bool:
        return self.children.alive

    def connect(self, config: EngineConfig, work: SharedPickle, start: SessionStart, engine: int) -> ProcessLink:
        """A link to one engine's part of a session; an engine is started first, and again if it has died."""
        return self.children.connect(engine, StartSession(work, config.steps_seed(start.epoch), start))

    def _open(self, config: EngineConfig, work: SharedPickle | None, start: SessionStart) -> Session:
        assert work is not None
        connect = functools.partial(self.connect, config, work, start)
        later = [engine for engine in range(1, self._count) if engine not in self.children.started]
        return Session(EngineGroup(config, connect, self._count, first=start.batch, later=later))

    def _end(self) -> None:
        self.children.close(more=5 * CLOSE_DEADLINE, warning=_BLOCKS)


class WorkersPlacement(Placement):
    """Workers with a torch dataset, as torch's own: started by its method, each with a copy of the dataset.

    As in torch, workers that persist keep the dataset that they were started with.
    """

    has_copy = False

    def __init__(self, config: EngineConfig, *, for_one_session: bool) -> None:
        super().__init__()
        self._config = config
        self._task = config.worker_task()
        self._for_one_session = for_one_session
        self._group: WorkerGroup | None = None  # of the last session
        self.children = Children(self._launch, log_idle_death, keeps=True)
        try:
            for number in range(config.num_workers):
                self.children.start(number)
        except BaseException as error:  # Ctrl-C too: nothing owns the processes that have started
            self.children.kill()
            self.children.release()
            if isinstance(error, Exception):
                name_unpicklable(config, error)
            raise

    def _launch(self, number: int) -> tuple[WorkerProcess, Connection]:
        context = self._config.context or multiprocessing.get_context()
        return launch_by_context(context, WorkerMain(number, self._config.num_workers, self._task))

    @property
    def alive(self) -> bool:
        return self.children.alive and (self._group is None or self._group.broken is None)

    def _open(self, config: EngineConfig, work: SharedPickle | None, start: SessionStart) -> Session:
        streams = config.kind.is_iterable
        states = {worker: PickledPayload.dumps(state) for worker, state in start.streams.items()}
        ended = [worker for worker, state in start.streams.items() if state.get("ended") is True]
        turns = ((start.next_worker + turn) % config.num_workers for turn in range(config.num_workers))
        start = start._replace(streams={})
        dealer = Dealer(
            [worker for worker in turns if worker not in ended],
            first=start.batch,
            in_order=config.in_order,
            in_turn=True,
            room=ANY if config.in_order else ROOM_OUT_OF_ORDER,
        )

        def connect(number: int) -> ProcessLink:
            first = next(iter(dealer.shares[number].plans), None)  # if it takes the place of one that has died
            return self.children.connect(number, StartSession(None, 0, start, states.get(number), first))

        self._group = WorkerGroup(
            connect,
            dealer,
            reads=True,
            streams=streams,
            stateful=streams or is_stateful(config.dataset),
            sample_key=functools.partial(sample_key, config.dataset),
        )
        return Session(self._group, on_close=self.close if self._for_one_session else None)

    def _end(self) -> None:
        self.children.close()
