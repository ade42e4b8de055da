"""A stream whose iterators have a state, for tests of random numbers."""

LENGTH = 24


class Count:
    def __init__(self):
        self.next = 0

    async def __anext__(self):
        if self.next == LENGTH:
            raise StopAsyncIteration
        self.next += 1
        return self.next - 1

    def __aiter__(self):
        return self

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]
