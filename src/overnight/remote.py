"""GET over http and https, with retries; what comes is checked, and a file appears whole or not at all.

For editors: a URL's user, password, query and fragment may be secrets. They reach the server that they name, and
nothing else: no message, no `repr`, no redirect to another origin (scheme, host and port).
"""

import base64
import contextlib
import functools
import hashlib
import http.client
import os
import secrets
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import IO, BinaryIO, TypeVar
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from overnight.errors import OvernightError

ATTEMPTS = 3
CONNECT_S = 15.0  # to be connected; a network that drops packets silently is known after three of them
STALL_S = 60.0  # without a byte; a caching index may fetch a whole file before it sends the first
PAUSE_S = 0.5  # before the second attempt, twice that before the third
SMALL = 32 << 20  # bytes; the largest project pages of PyPI have a few MiB
CHUNK = 256 << 10  # bytes

T = TypeVar("T")


class FetchFailed(OvernightError):
    """A URL could not be fetched; `is_transient` says that another attempt may help."""

    def __init__(self, url: str, reason: str, *, is_transient: bool = False) -> None:
        self.url = public_url(url)
        self.reason = reason
        self.is_transient = is_transient
        super().__init__(f"Cannot fetch {self.url}: {reason}")


class HashMismatch(FetchFailed):
    """What came is not what was named: its SHA-256 is another."""


@dataclass(frozen=True)
class Access:
    """How hosts are reached: a CA bundle in place of the system's (a file or folder), and the patience in seconds."""

    ca_bundle: str | Path | None = None
    stall_s: float = STALL_S
    pause_s: float = PAUSE_S


DEFAULT_ACCESS = Access()
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Document:
    """A small document and the URL that it came from after redirects (with its credentials: not for people)."""

    url: str = field(repr=False)
    body: bytes


def fetch(
    url: str,
    *,
    headers: Mapping[str, str] = NO_HEADERS,
    accept: str = "*/*",
    limit: int = SMALL,
    access: Access = DEFAULT_ACCESS,
) -> Document:
    """Return a small document; raises FetchFailed, also when it has more than `limit` bytes.

    The headers go to the URL's own origin only, as its credentials do (sent as Basic authorization).
    """

    def once() -> Document:
        with _open(url, accept, headers, access) as response:
            body = bytearray()
            for chunk in _chunks(url, response, access):
                body += chunk
                if len(body) > limit:
                    raise FetchFailed(url, f"it is larger than {limit:,} bytes")
            return Document(join(url, response.url), bytes(body))

    return _retried(once, access)


def download(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    access: Access = DEFAULT_ACCESS,
) -> None:
    """Stream a URL into the file `path`, which appears when it is whole, on disk, and has that SHA-256 (hexadecimal).

    `progress` gets the bytes so far and the bytes in all (0: the server does not say), from 0 again on a new attempt.
    Raises FetchFailed, HashMismatch (never retried), or OSError if the file cannot be written.
    """

    def once() -> None:
        digest, done = hashlib.sha256(), 0
        with _open(url, "*/*", NO_HEADERS, access) as response, whole_file(path) as file:
            total = _length(response)
            for chunk in _chunks(url, response, access):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
            if sha256 and digest.hexdigest() != sha256.lower():
                raise HashMismatch(url, f"its SHA-256 is {digest.hexdigest()}, not {sha256.lower()} as it has to be")

    _retried(once, access)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write `path` under a name of its own beside it; synced and renamed when the block ends well, else removed."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def join(base: str, link: str) -> str:
    """Resolve `link` as it stands in the document `base`, whose credentials it keeps on the same origin."""
    url = urljoin(base, link)
    login = urlsplit(base).netloc.rpartition("@")[0]
    if login and "@" not in urlsplit(url).netloc and _origin(base) == _origin(url):
        parts = urlsplit(url)
        url = urlunsplit(parts._replace(netloc=f"{login}@{parts.netloc}"))
    return url


def public_url(url: str) -> str:
    """Keep what may be shown of a URL: scheme, host, port and path."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an address that cannot be parsed"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _retried(once: Callable[[], T], access: Access) -> T:
    for attempt in range(1, ATTEMPTS):
        try:
            return once()
        except FetchFailed as error:
            if not error.is_transient:
                raise
            time.sleep(access.pause_s * 2 ** (attempt - 1))
    return once()


def _open(url: str, accept: str, headers: Mapping[str, str], access: Access) -> http.client.HTTPResponse:
    """Send the request and return the response with its body unread; every failure is a FetchFailed."""
    try:
        bare, login = _without_login(url)
        plain = {"User-Agent": "overnight", "Accept": accept}
        request = urllib.request.Request(bare, headers=plain)  # noqa: S310 - _without_login has checked the scheme
        # Unredirected: urllib itself forwards ordinary headers to whatever host a redirect names.
        for name, value in (login | dict(headers)).items():
            request.add_unredirected_header(name, value)
        response: http.client.HTTPResponse = _opener(url, access).open(request, timeout=access.stall_s)
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchFailed(url, _status_words(error.code), is_transient=_is_passing(error.code)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _failure(url, error, access) from error
    except ValueError:  # its text may quote the whole URL
        raise FetchFailed(url, "it is no valid http or https URL") from None
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        response.close()
        raise FetchFailed(url, f"the server sent it as {encoding}, which was not asked for")
    return response


def _chunks(url: str, response: http.client.HTTPResponse, access: Access) -> Iterator[bytes]:
    total, done = _length(response), 0
    while True:
        try:
            chunk = response.read(CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _failure(url, error, access) from error
        if not chunk:
            break
        done += len(chunk)
        yield chunk
    # http.client ends such a body quietly when it is read in pieces.
    if total and done != total:
        raise FetchFailed(url, f"only {done:,} of {total:,} bytes came", is_transient=True)


def _length(response: http.client.HTTPResponse) -> int:
    stated = response.headers.get("Content-Length", "")
    return int(stated) if stated.isascii() and stated.isdigit() else 0


def _opener(url: str, access: Access) -> urllib.request.OpenerDirector:
    try:
        context = _tls_context(access.ca_bundle)
    except OSError as error:  # ssl.SSLError is one
        reason = f"the CA bundle {access.ca_bundle} cannot be read: {error.strerror or error}"
        raise FetchFailed(url, reason) from error
    return urllib.request.build_opener(_Http(), _Https(context), _Redirects())


@functools.lru_cache(maxsize=4)  # reading the system's certificates takes some 40 ms
def _tls_context(bundle: str | Path | None) -> ssl.SSLContext:
    if bundle and Path(bundle).is_dir():
        return ssl.create_default_context(capath=bundle)
    return ssl.create_default_context(cafile=bundle or None)


class _Connection(http.client.HTTPConnection):
    """Gives up on connecting sooner than on a silent server."""

    def connect(self) -> None:
        patience = self.timeout
        self.timeout = min(CONNECT_S, patience or CONNECT_S)
        super().connect()
        self.sock.settimeout(patience)


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self.context = context

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TlsConnection, req, context=self.context)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; secrets go on only within one origin, and never from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        bare, login = _without_login(newurl)
        if urlsplit(req.full_url).scheme == "https" and urlsplit(bare).scheme != "https":
            raise FetchFailed(req.full_url, "it redirects from https to http")
        following = super().redirect_request(req, fp, code, msg, headers, bare)  # type: ignore[arg-type]
        if following is None:
            return None
        following.remove_header("Proxy-authorization")  # urllib sets it again if the new host is reached by proxy
        kept = req.unredirected_hdrs if _origin(req.full_url) == _origin(bare) else {}
        for name, value in ({key: text for key, text in kept.items() if key != "Host"} | login).items():
            following.add_unredirected_header(name, value)
        return following


def _without_login(url: str) -> tuple[str, dict[str, str]]:
    """Take user and password out of a URL and into a header; ValueError if it is no http or https URL."""
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError
    header = {}
    if login:
        user, _, password = login.partition(":")
        pair = f"{unquote(user)}:{unquote(password)}".encode()
        header["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    return urlunsplit(parts._replace(netloc=host, fragment="")), header


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _is_passing(status: int) -> bool:
    return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _status_words(status: int) -> str:
    # The server's own phrase is not used: it may quote the URL.
    known = status in HTTPStatus._value2member_map_
    return f"HTTP {status} {HTTPStatus(status).phrase}" if known else f"HTTP {status}"


def _failure(url: str, error: Exception, access: Access) -> FetchFailed:
    """Word what went wrong on the way, and say whether it may pass."""
    wrapped = error.reason if isinstance(error, urllib.error.URLError) else None
    cause = wrapped if isinstance(wrapped, Exception) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return FetchFailed(url, f"its certificate is not trusted ({cause.verify_message}); name a CA bundle")
    if isinstance(cause, http.client.InvalidURL):
        return FetchFailed(url, "it is no valid http or https URL")
    if isinstance(cause, TimeoutError):
        return FetchFailed(url, f"nothing came for {access.stall_s:g} s", is_transient=True)
    if isinstance(cause, OSError):
        return FetchFailed(url, cause.strerror or str(cause), is_transient=True)
    return FetchFailed(url, f"the answer is no whole HTTP ({type(cause).__name__})", is_transient=True)
