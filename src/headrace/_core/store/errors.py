"""What a failed request means: one verdict for each error of the store's client, which says it in words only."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from obstore.exceptions import NotSupportedError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from headrace._core.store.redirects import BLACKHOLE_PROXY

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_KIND = re.compile(r"kind: (\w+)")
# What stores call credentials that were good until now. A token that was never good has other names.
_EXPIRED = re.compile(
    r"ExpiredToken|TokenRefreshRequired|RequestExpired|RequestTimeTooSkewed|token.{0,20} expired", re.I
)

# In the dump of an error's sources: the certificate's defect, the system's message, and the address.
_CERTIFICATE = re.compile(r"InvalidCertificate\(([^\"]{0,400})")
_WORDS = re.compile(r'(?:message|error): "([^"]{1,200})"')
_PROXY = {
    "ProxyAuthRequired": "the proxy requires a user and a password",
    "TunnelUnsuccessful": "the proxy refuses to connect to this host",
}
_ADDRESS = re.compile(r'"tcp connect error",\s+([0-9a-fA-F.:\[\]]+),')


class Cause(enum.Enum):
    """Why a request failed. The value says it in words."""

    THROTTLED = "the store asks for fewer requests"
    SERVER = "the store failed"
    TIMED_OUT = "no byte came within the time-out"
    UNREACHABLE = "no connection to the store"
    UNRESOLVED = "the host name of the store does not resolve"
    UNTRUSTED = "the TLS certificate of the server is not valid here"
    NOT_TLS = "the server does not speak TLS on this port"
    PLAIN_HTTP = "the endpoint is http:// and allow_http is off"
    CUT = "the body was cut short"
    WRONG_RANGE = "the store sent another range than it was asked for"
    WRONG_LENGTH = "the body is of another length"
    DAMAGED = "the checksum is not the given one"
    RANGE_IGNORED = "the store does not do ranges"
    CHANGED = "the object was overwritten"
    NOT_FOUND = "not found"
    EXPIRED = "the credentials have expired"
    REFUSED = "refused"
    WRONG_REGION = "the bucket is in another region"
    REDIRECTED = "the server redirects to another host"
    OTHER = "failed"

    @property
    def is_transient(self) -> bool:
        """Whether the same request may well succeed a little later."""
        return self in _TRANSIENT


_TRANSIENT = frozenset(
    {
        Cause.THROTTLED,
        Cause.SERVER,
        Cause.TIMED_OUT,
        Cause.UNREACHABLE,
        Cause.UNRESOLVED,
        Cause.CUT,
        Cause.WRONG_RANGE,
        Cause.WRONG_LENGTH,
        Cause.DAMAGED,
    }
)
_NOT_WORTH_IT = frozenset({501, 505})  # "not implemented" stays so


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """What is known about a failed request.

    Attributes:
        cause: why it failed.
        status: the HTTP status; None where no answer came, or a good one whose body failed.
        said: what there is to say beyond the cause; without secrets.
    """

    cause: Cause
    status: int | None = None
    said: str = ""


def classify_error(error: BaseException) -> RequestFailure:
    """The verdict on an error of obstore's.

    obstore gives the status, the body and the kind of a broken connection as text, and no header at all.
    """
    text, _, dump = str(error).partition("\n\nDebug source:")
    found = _STATUS.search(text)
    if found is not None:
        status = int(found[1])
        return RequestFailure(cause_of_status(status, text), status)
    if isinstance(error, FileNotFoundError):
        return RequestFailure(Cause.NOT_FOUND)
    if isinstance(error, PreconditionError):
        return RequestFailure(Cause.CHANGED)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return RequestFailure(Cause.REFUSED)
    if isinstance(error, NotSupportedError) or "non-partial response" in text:
        return RequestFailure(Cause.RANGE_IGNORED)
    if "Requested " in text and ", got " in text:
        return RequestFailure(Cause.WRONG_RANGE)
    if "incorrectly configured region" in text:
        return RequestFailure(Cause.WRONG_REGION)
    if isinstance(error, TimeoutError):
        return RequestFailure(Cause.TIMED_OUT)
    if "HTTP error" in text or isinstance(error, ConnectionError):
        return RequestFailure(_of_transport(text, dump), said=_innermost(dump))
    return RequestFailure(Cause.OTHER)


def cause_of_status(status: int, text: str = "") -> Cause:
    """Why an HTTP request failed, by its status and the body of the answer."""
    if status in (400, 401, 403) and _EXPIRED.search(text):
        return Cause.EXPIRED
    if status in (429, 503):
        return Cause.THROTTLED
    if status == 408:
        return Cause.TIMED_OUT
    if status == 425 or (status >= 500 and status not in _NOT_WORTH_IT):
        return Cause.SERVER
    if status in (404, 410):
        return Cause.NOT_FOUND
    if status in (412, 416):
        return Cause.CHANGED
    if status in (401, 403):
        return Cause.REFUSED
    return Cause.OTHER


def _of_transport(text: str, dump: str) -> Cause:
    if "following redirect" in text:
        return Cause.OTHER
    if f" {BLACKHOLE_PROXY}," in dump:
        return Cause.REDIRECTED
    if "source: BadScheme" in dump:
        return Cause.PLAIN_HTTP
    if '"dns error"' in dump:
        return Cause.UNRESOLVED
    if "InvalidCertificate(" in dump:
        return Cause.UNTRUSTED
    if "InvalidContentType" in dump:
        return Cause.NOT_TLS
    kinds = _KIND.findall(dump)
    if "Timeout" in kinds[:1]:
        return Cause.TIMED_OUT
    return Cause.CUT if "body error" in text else Cause.UNREACHABLE


def _innermost(dump: str) -> str:
    """The innermost cause of a failed connection, in words of the client's libraries: `reqwest`, `hyper`, `rustls`."""
    if (certificate := _CERTIFICATE.search(dump)) is not None:
        # InvalidCertificate(Other(OtherError(CaUsedAsEndEntity))): the last name says most.
        names = [name for name in re.findall(r"[A-Za-z]{3,}", certificate[1]) if not name.startswith("Other")]
        return names[0] if names else ""
    words = [said for name, said in _PROXY.items() if name in dump] or _WORDS.findall(dump)
    if not words:
        return ""
    address = _ADDRESS.search(dump)
    return f"{words[-1]} ({address[1]})" if address is not None else words[-1]
