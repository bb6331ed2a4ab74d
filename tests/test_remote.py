"""remote: real sockets, a scripted server, files in tmp_path."""

import hashlib
import http.server
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overnight.remote import Access, FetchFailed, HashMismatch, download, fetch, join, public_url

QUICK = Access(stall_s=0.5, pause_s=0.01)
Script = Callable[[http.server.BaseHTTPRequestHandler], None]


def answer(body: bytes, status: int = 200, **headers: str) -> Script:
    """Send a body whose Content-Length is right unless a header says otherwise (names with _ for -)."""

    def send(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        given = {"Content-Length": str(len(body))} | {name.replace("_", "-"): text for name, text in headers.items()}
        for name, text in given.items():
            handler.send_header(name, text)
        handler.end_headers()
        handler.wfile.write(body)

    return send


def stall(handler: http.server.BaseHTTPRequestHandler) -> None:
    time.sleep(1.2)
    handler.close_connection = True


class Server:
    """Plays, for each path, a list of scripts, the last one again and again; keeps what it was asked."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        scripts: dict[str, list[Script]] = defaultdict(lambda: [answer(b"", 404)])
        asked: list[tuple[str, dict[str, str]]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.path, {name.lower(): text for name, text in self.headers.items()}))
                left = scripts[self.path.partition("?")[0]]
                (left.pop(0) if len(left) > 1 else left[0])(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
                pass

        self.scripts, self.asked = scripts, asked
        self.http = http.server.ThreadingHTTPServer((host, 0), Handler)
        self.host = f"{host}:{self.http.server_port}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


@pytest.fixture
def other() -> Iterator[Server]:
    one = Server("localhost")
    yield one
    one.close()


def test_a_small_document_is_fetched_with_the_headers_asked_for(server):
    server.scripts["/a"] = [answer(b"hello")]
    assert fetch(f"{server.url}/a", headers={"X-Key": "k"}, accept="text/plain", access=QUICK).body == b"hello"
    headers = server.asked[0][1]
    assert (headers["accept"], headers["x-key"]) == ("text/plain", "k")
    assert headers.get("accept-encoding", "identity") == "identity"


def test_two_server_errors_and_then_an_answer_is_an_answer(server):
    server.scripts["/a"] = [answer(b"", 500), answer(b"", 429), answer(b"fine")]
    assert fetch(f"{server.url}/a", access=QUICK).body == b"fine"
    assert len(server.asked) == 3


def test_a_third_server_error_is_the_end(server):
    server.scripts["/a"] = [answer(b"", 503)]
    with pytest.raises(FetchFailed, match="HTTP 503 Service Unavailable"):
        fetch(f"{server.url}/a", access=QUICK)
    assert len(server.asked) == 3


def test_not_found_is_not_tried_again(server):
    with pytest.raises(FetchFailed, match="HTTP 404 Not Found"):
        fetch(f"{server.url}/a", access=QUICK)
    assert len(server.asked) == 1


def test_a_status_without_a_name_is_told_by_its_number(server):
    server.scripts["/a"] = [answer(b"", 499)]
    with pytest.raises(FetchFailed, match=r"HTTP 499$"):
        fetch(f"{server.url}/a", access=QUICK)


def test_a_document_above_the_limit_is_refused(server):
    server.scripts["/a"] = [answer(b"x" * 101)]
    with pytest.raises(FetchFailed, match="larger than 100 bytes"):
        fetch(f"{server.url}/a", limit=100, access=QUICK)
    assert len(fetch(f"{server.url}/a", limit=101, access=QUICK).body) == 101


def test_a_compressed_answer_that_nobody_asked_for_is_refused(server):
    server.scripts["/a"] = [answer(b"x", Content_Encoding="gzip")]
    with pytest.raises(FetchFailed, match="sent it as gzip"):
        fetch(f"{server.url}/a", access=QUICK)


def test_a_server_that_falls_silent_is_given_up_and_tried_again(server):
    server.scripts["/a"] = [stall, answer(b"fine")]
    started = time.monotonic()
    assert fetch(f"{server.url}/a", access=QUICK).body == b"fine"
    assert 0.4 < time.monotonic() - started < 1.1


def test_a_server_that_stays_silent_is_told_with_the_seconds(server):
    server.scripts["/a"] = [stall]
    with pytest.raises(FetchFailed, match=r"nothing came for 0\.05 s"):
        fetch(f"{server.url}/a", access=Access(stall_s=0.05, pause_s=0.01))


def test_a_port_where_nobody_listens_is_a_failed_fetch():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(FetchFailed, match=rf"http://127\.0\.0\.1:{port}/a: Connection refused"):
        fetch(f"http://127.0.0.1:{port}/a", access=QUICK)


def test_what_is_no_http_is_a_failed_fetch(server):
    server.scripts["/a"] = [lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH_9\r\n")]
    with pytest.raises(FetchFailed, match="no whole HTTP"):
        fetch(f"{server.url}/a", access=QUICK)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://h/x", "http://", "x", "http://h:port/", "http://[h/", "http://h/a b?secret"]
)
def test_only_a_valid_http_url_is_opened(url):
    with pytest.raises(FetchFailed, match="no valid http or https URL") as caught:
        fetch(url, access=QUICK)
    assert "secret" not in str(caught.value)


def test_credentials_in_the_url_become_basic_authorization(server):
    server.scripts["/a"] = [answer(b"ok")]
    fetch(f"http://me:p%40ss@{server.host}/a", access=QUICK)
    assert server.asked[0][1]["authorization"] == "Basic bWU6cEBzcw=="
    assert server.asked[0][1]["host"] == server.host


def test_secrets_follow_a_redirect_within_the_origin_and_not_to_another(server, other):
    server.scripts["/a"] = [answer(b"", 301, Location="/b")]
    server.scripts["/b"] = [answer(b"", 302, Location=f"{other.url}/c")]
    other.scripts["/c"] = [answer(b"there")]
    found = fetch(f"http://me:secret@{server.host}/a", headers={"X-Key": "k"}, accept="x/y", access=QUICK)
    assert (found.body, found.url) == (b"there", f"{other.url}/c")
    assert [headers.get("authorization") is None for _, headers in server.asked] == [False, False]
    assert [headers.get("x-key") for _, headers in server.asked] == ["k", "k"]
    ((_, at_other),) = other.asked
    assert not {"authorization", "x-key"} & set(at_other)
    assert (at_other["accept"], at_other["host"]) == ("x/y", other.host)


def test_a_document_keeps_its_credentials_for_its_own_links(server):
    server.scripts["/a"] = [answer(b"", 301, Location="/b/")]
    server.scripts["/b/"] = [answer(b"")]
    found = fetch(f"http://me:secret@{server.host}/a", access=QUICK)
    assert join(found.url, "../c") == f"http://me:secret@{server.host}/c"
    assert join(found.url, f"http://{server.host}/d") == f"http://me:secret@{server.host}/d"
    assert join(found.url, "https://elsewhere/d") == "https://elsewhere/d"
    assert "secret" not in repr(found)


def test_a_redirect_to_a_file_is_refused(server):
    server.scripts["/a"] = [answer(b"", 302, Location="file:///etc/passwd")]
    with pytest.raises(FetchFailed):
        fetch(f"{server.url}/a", access=QUICK)


def test_a_redirect_without_end_is_a_failed_fetch(server):
    server.scripts["/a"] = [answer(b"", 302, Location="/a")]
    with pytest.raises(FetchFailed, match="HTTP 302"):
        fetch(f"{server.url}/a", access=QUICK)


def test_no_message_shows_credentials_or_query(server):
    with pytest.raises(FetchFailed) as caught:
        fetch(f"http://me:secret@{server.host}/a?token=secret#secret", access=QUICK)
    assert str(caught.value) == f"Cannot fetch {server.url}/a: HTTP 404 Not Found"
    assert "secret" not in repr(caught.value)
    assert "secret" not in repr(caught.value.__cause__)


def test_a_url_is_shown_as_scheme_host_and_path():
    assert public_url("https://u:p@h:8/a/b?q=1#f") == "https://h:8/a/b"
    assert public_url("http://[bad") == "an address that cannot be parsed"


def test_a_download_is_whole_and_leaves_nothing_beside_it(server, tmp_path):
    body = bytes(range(256)) * 4000
    server.scripts["/f"] = [answer(body)]
    seen: list[tuple[int, int]] = []
    path = tmp_path / "f"
    download(
        f"{server.url}/f",
        path,
        sha256=hashlib.sha256(body).hexdigest().upper(),
        progress=lambda done, total: seen.append((done, total)),
        access=QUICK,
    )
    assert path.read_bytes() == body
    assert [one.name for one in tmp_path.iterdir()] == ["f"]
    assert seen[-1] == (len(body), len(body))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_download_with_another_hash_is_refused_at_once_and_the_old_file_stays(server, tmp_path):
    server.scripts["/f"] = [answer(b"evil")]
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(HashMismatch, match="its SHA-256 is"):
        download(f"{server.url}/f", tmp_path / "f", sha256="0" * 64, access=QUICK)
    assert len(server.asked) == 1
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("f", b"old")]


def test_a_body_that_is_cut_short_is_fetched_again(server, tmp_path):
    server.scripts["/f"] = [answer(b"half", Content_Length="8"), answer(b"halfhalf")]
    download(f"{server.url}/f", tmp_path / "f", access=QUICK)
    assert (tmp_path / "f").read_bytes() == b"halfhalf"


def test_a_body_that_is_always_cut_short_leaves_no_file(server, tmp_path):
    server.scripts["/f"] = [answer(b"half", Content_Length="8")]
    with pytest.raises(FetchFailed, match="only 4 of 8 bytes came"):
        download(f"{server.url}/f", tmp_path / "f", access=QUICK)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_is_interrupted_leaves_no_file(server, tmp_path):
    server.scripts["/f"] = [answer(b"body")]

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(f"{server.url}/f", tmp_path / "f", progress=interrupt, access=QUICK)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_an_os_error_not_a_failed_fetch(server, tmp_path):
    server.scripts["/f"] = [answer(b"body")]
    with pytest.raises(FileNotFoundError):
        download(f"{server.url}/f", tmp_path / "gone" / "f", access=QUICK)
    assert len(server.asked) == 1


def test_a_ca_bundle_that_is_none_is_named(server, tmp_path):
    bundle = tmp_path / "ca.pem"
    with pytest.raises(FetchFailed, match=r"CA bundle .*ca\.pem cannot be read"):
        fetch(f"{server.url}/a", access=Access(ca_bundle=bundle))
    bundle.write_text("no certificate")
    with pytest.raises(FetchFailed, match=r"CA bundle .*ca\.pem cannot be read"):
        fetch(f"{server.url}/a", access=Access(ca_bundle=str(bundle)))


# Made for these tests with openssl: 127.0.0.1, valid for a hundred years, of use to nobody.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBkDCCATagAwIBAgIUI/U80CHcpEp8RKGXwIRo6CW18WcwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJMTI3LjAuMC4xMCAXDTI2MTEyOTE1NDgxNFoYDzIxMjYxMTA1
MTU0ODE0WjAUMRIwEAYDVQQDDAkxMjcuMC4wLjEwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATBUmQ5ruAIzDN81Jg/ykCj9yvnqXbI2I+bkBt5062dr34tR3bXzeFB
jZuv8rSa0FzLUQ2IY7iSvQ21Sv4fl3Ado2QwYjAdBgNVHQ4EFgQUsgReZ9Ca+B0C
BNyFe1aULOi3ugwwHwYDVR0jBBgwFoAUsgReZ9Ca+B0CBNyFe1aULOi3ugwwDwYD
VR0TAQH/BAUwAwEB/zAPBgNVHREECDAGhwR/AAABMAoGCCqGSM49BAMCA0gAMEUC
IBNT56EJx6tyRaOMWgmhjXZXpKQQGnM3j1ysQbu6B45vAiEA7OFgBBcapWKQjzAa
n4NVcLHaQt+swMRpkQ1oAHP71XE=
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgaLYvPmxQE7D+T02u
/94UMhYnO2B/4BwFNRTRim7DdnGhRANCAATBUmQ5ruAIzDN81Jg/ykCj9yvnqXbI
2I+bkBt5062dr34tR3bXzeFBjZuv8rSa0FzLUQ2IY7iSvQ21Sv4fl3Ad
-----END PRIVATE KEY-----
"""


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    (tmp_path / "cert.pem").write_text(CERTIFICATE)
    (tmp_path / "key.pem").write_text(KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    one = Server()
    one.http.socket = context.wrap_socket(one.http.socket, server_side=True)
    one.url = f"https://{one.host}"
    yield one, tmp_path / "cert.pem"
    one.close()


def test_a_certificate_of_the_given_bundle_is_trusted(secure):
    server, bundle = secure
    server.scripts["/a"] = [answer(b"sealed")]
    assert fetch(f"{server.url}/a", access=Access(ca_bundle=bundle)).body == b"sealed"


def test_a_certificate_of_nobody_is_refused_at_once(secure):
    server, _ = secure
    with pytest.raises(FetchFailed, match="certificate is not trusted") as caught:
        fetch(f"{server.url}/a", access=QUICK)
    assert not caught.value.is_transient


def test_a_redirect_from_https_to_http_is_refused(secure, other):
    server, bundle = secure
    server.scripts["/a"] = [answer(b"", 302, Location=f"{other.url}/a")]
    with pytest.raises(FetchFailed, match="redirects from https to http"):
        fetch(f"{server.url}/a", access=Access(ca_bundle=bundle))
    assert other.asked == []


def test_a_folder_of_certificates_will_do_as_a_bundle(secure, tmp_path):
    server, _ = secure
    (tmp_path / "none").mkdir()
    with pytest.raises(FetchFailed, match="certificate is not trusted"):
        fetch(f"{server.url}/a", access=Access(ca_bundle=tmp_path / "none"))
