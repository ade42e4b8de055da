"""The results of iterators that fail on the way, for the rows about errors, workers and ends."""

import re

from tests.parity.harness import Raised

MOST = 60  # results of an iterator that is taken to end; torch's workers can raise for ever


def drained(iterator, most=MOST):
    """Everything an iterator gives until it ends, with an error as `Raised` in the place of its batch."""
    came = []
    while len(came) < most:
        try:
            came.append(next(iterator))
        except StopIteration:
            break
        except Exception as error:
            came.append(Raised(type(error), own_message(error)))
    return came


def errors_of(iterator, most=MOST):
    """The errors among what an iterator gives, as they were raised, without this process's part of the traceback."""
    errors = []
    for _ in range(most):
        try:
            next(iterator)
        except StopIteration:
            break
        except Exception as error:
            errors.append(error.with_traceback(None))
    return errors


def own_message(error):
    """The message of an error in its worker, without torch's words around it."""
    text = str(error)
    wrapped = re.match(r"Caught (\w+) in ", text)
    if not wrapped:
        return text
    printed = [*re.finditer(rf"\n(?:[\w.<>]+\.)?{wrapped[1]}(?:: |\n\Z)", text)]
    return text[printed[-1].end() :].removesuffix("\n")


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))
