"""Reading of iterators in tests of their states."""


async def outcomes(iterator, count=None):
    """Samples and errors until the end, or `count` of them."""
    found = []
    while count is None or len(found) < count:
        try:
            found.append(await anext(iterator))
        except StopAsyncIteration:
            break
        except ValueError as error:
            found.append(repr(error))
    return found
