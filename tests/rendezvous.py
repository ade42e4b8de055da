"""The TCP store at which the ranks of a job meet; in the tests' process, as torchrun has it in its own.

In rank 0 the store would end with that rank while others still need it, and another process could
take its port before that rank begins to listen.
"""

import torch.distributed as dist


class Rendezvous:
    """A store that is served as long as this object exists.

    Attributes:
        variables: the environment by which `init_process_group` finds it, without the rank.
    """

    def __init__(self, ranks: int) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.variables = {
            "MASTER_ADDR": self._store.host,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(ranks),
        }
