"""Causes of failed requests, classified from obstore's errors."""

from __future__ import annotations

import enum
import re

from obstore.exceptions import (
    BaseError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from headrace._store.redaction import redact_text
from headrace.errors import (
    ChecksumError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreError,
    StoreUnreachableError,
)

ALLOW_REDIRECTS = "allow_redirects"
PROFILE = "profile"
"""Names of headrace's own options among the options of a store."""

BLACKHOLE_PROXY = "127.0.0.1:0"
"""Address where no process can listen.

Port 0 means "any port" when a socket is bound, and is not a port itself.
"""

NATIVE_ERRORS = (BaseError, OSError, ValueError)
"""Exceptions of obstore: a store refuses or fails, or a key cannot be requested."""

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
# A store over HTTP has "Generic HTTP error".
_TRANSPORT = re.compile(r"(?<!Generic )HTTP error")
_KIND = re.compile(r"kind: (\w+)")
# Names that stores give to expired credentials. Tokens that never were valid have other names.
_EXPIRED = re.compile(
    r"ExpiredToken|TokenRefreshRequired|RequestExpired|RequestTimeTooSkewed|token.{0,20} expired",
    re.I,
)
# Parts of the debug dump of an error: the message of the system or of the client's libraries, and
# the address.
_WORDS = re.compile(
    r'(?:message|error): "([^"]{1,200})"'
    r"|InvalidCertificate\((?:\s*Other\w*\()*\s*(\w+)"  # for example UnknownIssuer
    r"|(InvalidContentType|BadScheme)"  # no TLS; allow_http is off
)
_ADDRESS = re.compile(r'"tcp connect error",\s+([0-9a-fA-F.:\[\]]+),')
_MAX_MESSAGE = 400  # characters; a server may answer an error with a page
CREDENTIAL_HOST = "169.254.169.254"  # serves credentials on AWS, GCP and Azure machines
NO_CREDENTIALS = (
    "No credentials were given, and this machine has no service that gives them. Set them in the "
    "environment or in the store's options, or options={'skip_signature': True} for a public bucket"
)
NO_LISTING = (
    "servers over HTTP list by WebDAV only: if this one does not, name objects with keys=[...] and "
    "shards as in '{000..127}.tar', or, if it speaks S3, use "
    "Store('s3://bucket', options={'endpoint': 'https://host'})"
)
HUB_REMEDY = (
    "A private repository needs a token that may read it (hf auth login, HF_TOKEN, or token=); a "
    "gated one also that its account has accepted the terms, on the page of the repository"
)
IN_BUCKET = (
    "Check bucket and key, and endpoint, region and credentials in the store's options or the "
    "environment"
)
_CREDENTIALS = "Check the credentials in the store's options or the environment"


class Cause(enum.Enum):
    """The cause of a failed request, and the exception to raise.

    `transient` tells whether the same request may succeed a little later.
    """

    def __init__(
        self,
        text: str,
        transient: bool = False,
        error: type[StoreError] = StoreError,
        remedy: str = "",
    ) -> None:
        self.text, self.transient, self.error, self.remedy = (
            text,
            transient,
            error,
            remedy,
        )

    THROTTLED = "throttled (HTTP 429 or 503)", True
    SERVER = "the store failed", True
    TIMED_OUT = (
        "no byte, or no end of a listing, came within the time-out",
        True,
        StoreUnreachableError,
    )
    UNREACHABLE = (
        "no connection to the store",
        True,
        StoreUnreachableError,
        "Check endpoint, port and region; http:// (which allow_http=False forbids) or https://; "
        "and for a certificate of a private authority the option root_certificate",
    )
    ENDLESS = (
        "the listing has no end: the server repeats a continuation token, and so this key",
    )
    CUT = "the body was cut short", True
    WRONG_RANGE = "the store sent another range than requested", True
    WRONG_LENGTH = (
        "the body has another length",
        True,
        ObjectChangedError,
        "It has changed: make the dataset again",
    )
    DAMAGED = (
        "the checksum is not the given one",
        True,
        ChecksumError,
        "The object itself may be damaged",
    )
    UNUSABLE = ("the answer cannot be used",)
    RANGE_IGNORED = ("the store does not do ranges",)
    CHANGED = (
        "overwritten since its listing, or while it was read",
        False,
        ObjectChangedError,
        "Make the dataset again",
    )
    NOT_FOUND = "not found, or a directory", False, ObjectNotFoundError
    NO_KEY = "this cannot be the key of an object", False, StoreError, "Rename it"
    EXPIRED = "the credentials have expired", False, StoreError, _CREDENTIALS
    REFUSED = "refused", False, StoreError, _CREDENTIALS
    REDIRECTED = (
        "the server redirects",
        False,
        StoreError,
        f"Not followed: another host or port would get what is sent to this one. "
        f"If you trust it, set options={{{ALLOW_REDIRECTS!r}: True, ...}}",
    )
    OTHER = ("failed",)


_CLASSES = (
    ((NotFoundError, FileNotFoundError), Cause.NOT_FOUND),
    ((PreconditionError,), Cause.CHANGED),
    ((PermissionDeniedError, UnauthenticatedError, PermissionError), Cause.REFUSED),
    ((NotSupportedError,), Cause.RANGE_IGNORED),
    ((TimeoutError,), Cause.TIMED_OUT),
    ((ValueError,), Cause.NO_KEY),
)
_STATUSES = {
    Cause.REDIRECTED: (301, 302, 303, 307, 308),
    Cause.REFUSED: (401, 403),
    Cause.NOT_FOUND: (404, 410),
    Cause.TIMED_OUT: (408,),
    Cause.CHANGED: (412, 416),
    Cause.SERVER: (425, *range(500, 600)),
    Cause.THROTTLED: (429, 503),
    Cause.OTHER: (501, 505),
}
CAUSES = {status: cause for cause, statuses in _STATUSES.items() for status in statuses}
"""Causes by the HTTP status of a refusal."""


class RequestFailure(Exception):
    """A failed request.

    `status` is the HTTP status of the answer, if any. `error` is obstore's exception, if any.
    """

    error: BaseException | None = None

    def __init__(self, cause: Cause, status: int | None = None, detail: str = "") -> None:
        super().__init__(cause)
        self.cause, self.status, self.detail = cause, status, detail


FAILURES = (*NATIVE_ERRORS, RequestFailure)


def failure_of(error: BaseException) -> RequestFailure:
    """Return the `RequestFailure` for an exception of `FAILURES`, without traceback.

    obstore keeps the future of a request, with the error, until the next call of obstore. The
    frames of a traceback would keep the store alive for as long, with open connections.
    """
    error = error.with_traceback(None)
    if isinstance(error, RequestFailure):
        return error
    failure = classify_error(error)
    failure.error = error
    return failure


def classify_error(error: BaseException) -> RequestFailure:
    """Classify an obstore error by class, HTTP status or text.

    A class in `_CLASSES` decides. Otherwise the HTTP status decides, and then the text. obstore
    gives the status, the body and the kind of a broken connection as text only, and no headers.
    `tests/unit/store/test_obstore_errors.py` checks each case with real requests.
    """
    text, _, dump = str(error).partition("\n\nDebug source:")
    found = _STATUS.search(text)
    status = None if found is None else int(found[1])
    known = [cause for kinds, cause in _CLASSES if isinstance(error, kinds)]
    if status is not None:
        known.append(CAUSES.get(status, Cause.OTHER))
    if known:
        expired = (known[0] is Cause.REFUSED or status == 400) and _EXPIRED.search(text)
        return RequestFailure(Cause.EXPIRED if expired else known[0], status)
    if "non-partial response" in text:
        return RequestFailure(Cause.RANGE_IGNORED)
    if "Requested " in text and ", got " in text:
        return RequestFailure(Cause.WRONG_RANGE)
    if _TRANSPORT.search(text) is not None or isinstance(error, ConnectionError):
        failed = _transport_cause(text, dump)
        return RequestFailure(
            failed, detail="" if failed is Cause.REDIRECTED else _innermost(dump)
        )
    return RequestFailure(Cause.OTHER)


def _transport_cause(text: str, dump: str) -> Cause:
    if "following redirect" in text:
        return Cause.OTHER
    if f" {BLACKHOLE_PROXY}," in dump:
        return Cause.REDIRECTED
    if "Parse(" in dump:
        return Cause.UNUSABLE
    kinds = _KIND.findall(dump)
    if "Timeout" in kinds[:1]:
        return Cause.TIMED_OUT
    return Cause.CUT if "body error" in text else Cause.UNREACHABLE


def _innermost(dump: str) -> str:
    """Return the innermost cause of a failed connection, and the address.

    The text comes from the client's libraries: `reqwest`, `hyper`, `rustls`.
    """
    words = ["".join(each) for each in _WORDS.findall(dump)] or [""]
    address = _ADDRESS.search(dump)
    return f"{words[-1]} ({address[1]})" if address is not None else words[-1]


def describe_error(error: BaseException, secrets: tuple[str, ...] = ()) -> str:
    """Return the message of an obstore error, without secrets.

    The message has a single line and no debug dump. A long message is cut.
    """
    text = str(error).partition("\n\nDebug source:")[0]
    # A body of XML repeats the signed headers of the request. Code and message are enough.
    reasons = re.findall(r"<(?:Code|Message)>([^<]*)<", text)
    if "<" in text:
        text = text.partition("<")[0] + ": ".join(reasons)
    text = " ".join(redact_text(text, secrets).split()).rstrip(" :")
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " …"
