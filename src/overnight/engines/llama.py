"""llama.cpp inside the process, through xllamacpp: GGUF models on any hardware, with continuous batching.

Requests go to llama.cpp's own server core over a Unix socket in a folder of this user alone, with a key made for the
run: no port is opened. This way a body reaches the server as it was written, its answer comes back with its status
and byte for byte, and closing the connection ends the work on a request at once. (The library's `handle_*` calls
take Python objects and block until the answer is whole; a stop would need streaming, and the chunks put together.)
Where Unix sockets are missing (Windows) a loopback port is used, with the same key.

For editors: a server that is destroyed before it listens may hang, and so may one whose model fails to load. Hence
the threads here are daemons, and the model's header is read first.
"""

import asyncio
import contextlib
import importlib.util
import math
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from overnight.errors import EngineLost, UsageError
from overnight.options import option, parse_count
from overnight.records import Answer, Failure, Request

from . import scoring
from .base import Engine, EngineContext

if TYPE_CHECKING:
    import aiohttp

    from overnight.models import Model

    from .gguf import GgufInfo

T = TypeVar("T")

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
GENERATING = frozenset({CHAT, "/v1/completions", "/v1/responses"})
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
MAX_EMBEDDED_TOKENS = 2048  # one input is pooled in one step of the engine, which must hold it whole
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
        self._server: Any = None
        self._session: aiohttp.ClientSession | None = None
        self._folder: Path | None = None
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
        """The model as given; a local file by its whole path."""
        path = Path(self._model_flag).expanduser()
        return {"model": str(path.resolve()) if path.exists() else self._model_flag}

    def check(self) -> None:
        """Refuse a template that is not there."""
        template = self._options.chat_template
        if template and "{" not in template and not Path(template).is_file():
            raise UsageError(f"--chat-template {template}: there is no such file")

    async def __aenter__(self) -> Self:
        """Fetch the model where it must be, load it, and wait until it answers. Raises ModelNotFound, EngineLost."""
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
            self._server = await _in_thread(lambda: _load(params))
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
            raise EngineLost(self.name, f"llama.cpp could not load {model.path} ({error}). See --verbose") from error
        except aiohttp.ClientError as error:
            await self.__aexit__()
            raise EngineLost(self.name, f"it does not answer ({error})") from error
        except BaseException:
            await self.__aexit__()
            raise
        return self

    def _parameters(self, path: Path, info: "GgufInfo", key: str) -> Any:
        import xllamacpp

        options = self._options
        trained = info.context_length or DEFAULT_CONTEXT
        length = options.max_model_len or min(trained, DEFAULT_CONTEXT)
        pooling = POOLINGS[options.pooling] if options.pooling else info.pooling_type or POOLINGS["mean"]
        self._is_ranker = pooling == POOLINGS["rank"]
        if self._is_ranker:
            self.endpoints = RANKING
        elif info.architecture in ENCODERS:
            self.endpoints = EMBEDDING
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.model_alias = {self._names[0]}
        params.n_ctx = length * options.max_num_seqs
        params.n_parallel = options.max_num_seqs
        params.n_gpu_layers = options.gpu_layers
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads or usable_cores()
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type(pooling)
        params.n_batch = params.n_ubatch = min(max(length, 512), MAX_EMBEDDED_TOKENS)
        if options.chat_template:
            template = options.chat_template
            params.chat_template = template if "{" in template else Path(template).read_text(encoding="utf-8")
        params.verbosity = 3 if self.context.log_path else 0
        params.hostnames = [self._listen_on()]
        params.api_keys = [key]
        params.n_threads_http = options.max_num_seqs + 4
        params.endpoint_slots = params.ui = False
        return params

    def _listen_on(self) -> str:
        if os.name != "posix":
            return "127.0.0.1"
        self._folder = Path(tempfile.mkdtemp(prefix="overnight-"))  # mode 0700
        return str(self._folder / "llama.sock")

    def _connect(self) -> tuple[str, "aiohttp.BaseConnector"]:
        import aiohttp

        if self._folder:
            return "http://llama", aiohttp.UnixConnector(str(self._folder / "llama.sock"), limit=0, force_close=True)
        return self._server.listening_address, aiohttp.TCPConnector(limit=0, force_close=True)

    async def __aexit__(self, *_: object) -> None:
        """Close connections, then the server; a server that does not stop is left to the end of the process."""
        if self._session:
            await self._session.close()
        held, self._server = [self._server], None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await _in_thread(held.clear)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def answer(self, request: Request) -> Answer | Failure:
        """Ask the server, and give back what it says; scores come from embeddings where the model is no reranker."""
        if request.endpoint in RANKING:
            return await self._score(request, is_rerank=request.endpoint == "/rerank")
        return await self._post(request.endpoint or request.url, request.body)

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

        assert self._session is not None
        try:
            async with self._session.post(self._base_url + path, data=body) as response:
                return Answer(response.status, await response.read())
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineLost(self.name, f"llama.cpp's server went away ({error})") from error


def usable_cores() -> int:
    """The cores that this process may use: its affinity, and a container's limit (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _load(params: Any) -> Any:
    import xllamacpp

    return xllamacpp.Server(params)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that does not hold up the process's exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            tell(future.set_exception, error)
        else:
            tell(future.set_result, outcome)

    def tell(settle: Callable[[Any], None], outcome: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else settle(outcome))

    threading.Thread(target=run, name="overnight llama", daemon=True).start()
    return await future
