"""llama.cpp inside the process, through xllamacpp: GGUF models on any hardware, with continuous batching.

Requests go to llama.cpp's own server core over a Unix socket in a folder of this user alone, with a key made for the
run: no port is opened. This way a body reaches the server as it was written, its answer comes back with its status
and byte for byte, and closing the connection ends the work on a request at once. (The library's `handle_*` calls
take Python objects and block until the answer is whole; a stop would need streaming, and the chunks put together.)
Where Unix sockets are missing (Windows) a loopback port is used, with the same key.

For editors: a server that is destroyed before it has answered anything may hang for ever, and the whole process with
it, as it holds the interpreter's lock. Hence `_load` gives a server back only when it has answered, threads here are
daemons, what was loaded for nobody is freed in its own thread, and the model's header is read first. One thread of the
server does all the work, in steps that nothing interrupts: a step is kept short.
"""

import asyncio
import contextlib
import importlib.util
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from overnight.errors import EngineLost, UsageError
from overnight.options import option, parse_count
from overnight.records import Answer, Failure, Request

from . import scoring
from .base import Engine, EngineContext
from .bodies import GENERATING, refuse_body, reword
from .sockets import SocketFolder

if TYPE_CHECKING:
    import aiohttp

    from overnight.models import Model

    from .gguf import GgufInfo

T = TypeVar("T")

EMBEDDINGS = "/v1/embeddings"
EMBEDDING = frozenset({EMBEDDINGS, "/score", "/rerank"})
RANKING = frozenset({"/score", "/rerank"})
# What llama.cpp runs as encoders: they embed, and generate nothing.
ENCODERS = frozenset({
    "bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert", "modern-bert", "eurobert",
    "gemma-embedding", "t5encoder",
})  # fmt: skip
POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}

DEFAULT_SLOTS = 4  # two cores generate most tokens per second with 4; GPUs want more
DEFAULT_CONTEXT = 4096
# Tokens in one step. A cancelled request may hold the engine for one more, which with 2048 took 15 s on a slow core
# where 512 took 3 s, at the same speed. But an input that is embedded is pooled in one step, which must hold it whole.
STEP, EMBEDDING_STEP = 512, 2048
STOP_S = 10


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """Flags of the llama engine, under vLLM's names where it has the same."""

    threads: int | None = option(
        None, "Threads that compute (default: the cores that this process may use)", "engine", metavar="N",
        parse=parse_count,
    )  # fmt: skip
    max_num_seqs: int = option(
        DEFAULT_SLOTS, "Requests that the model works on at once (llama.cpp's parallel slots)", "engine",
        metavar="N", parse=parse_count,
    )  # fmt: skip
    max_model_len: int | None = option(
        None, f"Tokens of prompt and answer together, per request (default: the model's, at most {DEFAULT_CONTEXT})",
        "engine", metavar="N", parse=parse_count, shapes=True,
    )  # fmt: skip
    gpu_layers: int = option(-1, "Layers on the GPU; -1 for as many as fit", "engine", metavar="N")
    chat_template: str | None = option(
        None, "A Jinja template, or a file that holds one, in place of the model's", "engine", metavar="PATH",
        shapes=True,
    )  # fmt: skip
    max_num_batched_tokens: int | None = option(
        None, "Tokens in one step of the engine: an input that is embedded must fit in one (default: "
        f"{STEP}; {EMBEDDING_STEP} for a model made for embedding, or with --pooling)",
        "engine", metavar="N", parse=parse_count,
    )  # fmt: skip
    no_prefix_caching: bool = option(
        False, "Compute each prompt anew: slower, but with --max-num-seqs 1 equal requests get equal answers",
        "engine", shapes=True,
    )  # fmt: skip
    pooling: str | None = option(
        None, "How token vectors become one embedding (default: the model's, else mean)", "engine",
        choices=POOLINGS, shapes=True,
    )  # fmt: skip


class LlamaEngine(Engine):
    """A GGUF model in this process; see the module."""

    name = "llama"
    summary = "GGUF models inside the process, on any hardware (llama.cpp)"
    options_type = LlamaOptions
    endpoints = GENERATING | EMBEDDING
    pip = "pip install 'overnight[llama]'"

    def __init__(self, context: EngineContext, options: LlamaOptions | None = None) -> None:
        super().__init__(context, options or LlamaOptions())
        self._options = options or LlamaOptions()
        from overnight.models import DEFAULT_MODEL, served_names

        self._model_flag = context.model or DEFAULT_MODEL
        self._names = served_names(self._model_flag, context.served)
        self.max_inflight = self._options.max_num_seqs
        self._is_ranker = False
        self._template = ""
        self._server: Any = None
        self._session: aiohttp.ClientSession | None = None
        self._folder: SocketFolder | None = None
        self._base_url = ""

    @classmethod
    def missing(cls) -> str | None:
        """Which of its libraries is not installed."""
        absent = [name for name in ("xllamacpp", "aiohttp") if importlib.util.find_spec(name) is None]
        return f"{' and '.join(absent)} not installed" if absent else None

    @property
    def models(self) -> tuple[str, ...]:
        """The names that requests may ask for."""
        return self._names

    @property
    def identity(self) -> dict[str, object]:
        """The model as given, a local file by its whole path; a template by what it says, not by its file's name."""
        path = Path(self._model_flag).expanduser()
        model = str(path.resolve()) if path.exists() else self._model_flag
        template = self._read_template()
        return {"model": model, **({"template": template} if template else {})}

    def check(self) -> None:
        """Refuse a template that cannot be read."""
        self._read_template()

    def _read_template(self) -> str:
        given = self._options.chat_template
        if not given or "{" in given:
            return given or ""
        try:
            return Path(given).expanduser().read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise UsageError(f"--chat-template {given}: there is no such file") from error
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--chat-template {given} cannot be read: {error}") from error

    async def __aenter__(self) -> Self:
        """Fetch the model where it must be, load it, and wait until it answers.

        Raises ModelNotFound, UsageError, EngineLost.
        """
        import aiohttp

        from overnight.models import resolve_model

        from .gguf import describe

        model: Model = await _in_thread(
            lambda: resolve_model(
                self._model_flag, environ=self.context.environ or os.environ, progress=self.context.on_progress
            )
        )
        info = describe(model.path)
        key = secrets.token_urlsafe(32)
        try:
            params = self._parameters(model.path, info, key)
            self._server = await self._load(params)
            self._base_url, connector = self._connect()
            # A connection for each request: a kept one may be closed by the server while a request is on its way.
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20,
                headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            )  # fmt: skip
            async with self._session.get(f"{self._base_url}/health") as response:
                await response.read()
        except RuntimeError as error:
            await self.__aexit__()
            advice = "Is the file whole, and are the engine's options right? --verbose shows llama.cpp's own words"
            raise EngineLost(self.name, f"llama.cpp could not load {model.path} ({error}). {advice}") from error
        except aiohttp.ClientError as error:
            await self.__aexit__()
            raise EngineLost(self.name, f"it does not answer ({error})") from error
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _load(self, params: Any) -> Any:
        """Load in a thread, which keeps the socket's folder if it is abandoned before it ends."""
        folder = self._folder
        try:
            return await _in_thread(
                lambda: _load(params, folder.socket if folder else None), folder.close if folder else None
            )
        except asyncio.CancelledError:
            self._folder = None
            raise

    def _parameters(self, path: Path, info: "GgufInfo", key: str) -> Any:
        import xllamacpp

        options = self._options
        trained = info.context_length or DEFAULT_CONTEXT
        length = options.max_model_len or min(trained, DEFAULT_CONTEXT)
        if info.context_length and length > trained:
            raise UsageError(f"--max-model-len {length}: {path.name} was trained for {trained} tokens")
        pooling = POOLINGS[options.pooling] if options.pooling else info.pooling_type or POOLINGS["mean"]
        self._is_ranker = pooling == POOLINGS["rank"]
        if self._is_ranker:
            self.endpoints = RANKING
        elif info.architecture in ENCODERS:
            self.endpoints = EMBEDDING
        is_embedder = bool(options.pooling or info.pooling_type) or info.architecture in ENCODERS
        self._template = self._read_template() or info.chat_template
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.model_alias = {self._names[0]}
        params.n_ctx = length * options.max_num_seqs
        params.n_parallel = options.max_num_seqs
        # A cache for all slots, each with its own limit. With one a slot, llama.cpp cuts inputs that are embedded at
        # once into pieces of equal length and pools only the last: 17 of 32 embeddings were wrong.
        params.kv_unified = True
        params.kv_unified_per_slot = length
        params.n_gpu_layers = options.gpu_layers
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads or usable_cores()
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type(pooling)
        step = min(max(length, STEP), EMBEDDING_STEP) if is_embedder else STEP
        params.n_batch = params.n_ubatch = options.max_num_batched_tokens or step
        params.cache_prompt = not options.no_prefix_caching
        if options.chat_template:
            params.chat_template = self._template
        params.verbosity = 3 if self.context.log_path else 0
        params.hostnames = [self._listen_on()]
        params.api_keys = [key]
        params.n_threads_http = options.max_num_seqs + 4
        params.endpoint_slots = params.ui = False
        return params

    def _listen_on(self) -> str:
        if os.name != "posix":
            return "127.0.0.1"
        self._folder = SocketFolder(self.context.environ or os.environ)
        return self._folder.socket

    def _connect(self) -> tuple[str, "aiohttp.BaseConnector"]:
        import aiohttp

        if self._folder:
            return "http://llama", aiohttp.UnixConnector(self._folder.socket, limit=0, force_close=True)
        return self._server.listening_address, aiohttp.TCPConnector(limit=0, force_close=True)

    async def __aexit__(self, *_: object) -> None:
        """Close connections, then the server; a server that does not stop is left to the end of the process."""
        session, self._session = self._session, None
        if session:
            await session.close()
        held, self._server = [self._server], None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await _in_thread(held.clear)
        folder, self._folder = self._folder, None
        if folder:
            folder.close()

    async def answer(self, request: Request) -> Answer | Failure:
        """Ask the server, and give back what it says; scores come from embeddings where the model is no reranker."""
        if request.endpoint in RANKING:
            return await self._score(request, is_rerank=request.endpoint == "/rerank")
        path = request.endpoint or request.url
        return refuse_body(path, request.body, self._template) or await self._post(path, request.body)

    async def _score(self, request: Request, *, is_rerank: bool) -> Answer:
        answer_id = f"{'rerank' if is_rerank else 'score'}-{secrets.token_hex(16)}"
        try:
            pairs = scoring.read_pairs(request.body, is_rerank=is_rerank)
        except scoring.BadScoreRequest as error:
            return scoring.refuse(error)
        if self._is_ranker:
            return await self._rank(pairs, is_rerank=is_rerank, answer_id=answer_id)
        embedded = await self._post(EMBEDDINGS, scoring.embeddings_body(pairs))
        if embedded.status != 200:  # noqa: PLR2004
            return embedded
        return scoring.score_answer(pairs, embedded.body, is_rerank=is_rerank, answer_id=answer_id)

    async def _rank(self, pairs: scoring.Pairs, *, is_rerank: bool, answer_id: str) -> Answer:
        """Ask the reranker for each query; its answers are logits, the sigmoid of which vLLM gives as scores."""
        import msgspec

        scores = [0.0] * len(pairs.right)
        tokens = 0
        for query in sorted(set(pairs.left)):
            places = [n for n, left in enumerate(pairs.left) if left == query]
            documents = [pairs.texts[pairs.right[n]] for n in places]
            body = msgspec.json.encode({"query": pairs.texts[query], "documents": documents})
            answer = await self._post("/v1/rerank", body)
            if answer.status != 200:  # noqa: PLR2004
                return answer
            ranked = msgspec.json.decode(answer.body)
            tokens += ranked["usage"]["prompt_tokens"]
            for result in ranked["results"]:
                scores[places[result["index"]]] = 1 / (1 + math.exp(-result["relevance_score"]))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return scoring.shape_scores(pairs, scores, usage, self._names[0], is_rerank=is_rerank, answer_id=answer_id)

    async def _post(self, path: str, body: bytes) -> Answer:
        import aiohttp

        if self._session is None:
            raise EngineLost(self.name, "it is not open")
        try:
            async with self._session.post(self._base_url + path, data=body) as response:
                return reword(response.status, await response.read())
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineLost(self.name, f"llama.cpp's server went away ({error})") from error


def usable_cores() -> int:
    """The cores that this process may use: its affinity, and a container's limit (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _load(params: Any, path: str | None) -> Any:
    import xllamacpp

    server = xllamacpp.Server(params)
    try:
        _wait_for_answer(server.listening_address, path)
    except OSError as error:
        _unfreed.append(server)
        raise RuntimeError(f"it loaded, but does not answer: {error}") from error
    return server


_unfreed: list[Any] = []  # servers that never answered: destroying one may hang the process


def _wait_for_answer(address: str, path: str | None) -> None:
    """Return when the server has answered something. Raises OSError."""
    if path is None:
        parts = urlsplit(address)
        connection = socket.create_connection((parts.hostname or "", parts.port or 0), STOP_S)
    else:
        connection = socket.socket(socket.AF_UNIX)
    with connection:
        connection.settimeout(STOP_S)
        if path is not None:
            connection.connect(path)
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        if not connection.recv(1):
            raise ConnectionError("it closed the connection")


async def _in_thread(work: Callable[[], T], abandoned: Callable[[], None] | None = None) -> T:
    """Run blocking work in a thread that does not hold up the process's exit.

    `abandoned` is called when the work has ended and nobody waited for it: cancelling does not end it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            tell(future.set_exception, error)
        else:
            if not future.cancelled():  # else it goes with this thread: freeing a server takes long
                tell(future.set_result, outcome)
        if future.cancelled() and abandoned:
            abandoned()

    def tell(settle: Callable[[Any], None], outcome: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else settle(outcome))

    threading.Thread(target=run, name="overnight llama", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        if not future.cancelled() and abandoned:  # it ended in the same turn
            abandoned()
        raise
