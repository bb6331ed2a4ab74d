"""The contract, held against the engines that come with the package and need no server."""

import pytest

from engine_contract import EngineContract, chat, listening_ports
from overnight.engines import find_engine, list_engines, load_engine
from overnight.engines.base import EngineContext
from overnight.engines.echo import EchoEngine, script
from overnight.engines.llama import LlamaEngine, LlamaOptions
from overnight.errors import EngineMissing


class TestEcho(EngineContract):
    long_body = script(delay=60)
    refuses_bad_bodies = False

    @classmethod
    def make(cls):
        return EchoEngine(EngineContext())


class TestLlama(EngineContract):
    long_body = chat(max_tokens=4000, ignore_eos=True)

    @classmethod
    def make(cls):
        return LlamaEngine(EngineContext(), LlamaOptions(threads=1))

    def test_no_port_is_opened(self, live):
        assert live.ask(chat(max_tokens=1)).status == 200
        assert listening_ports() == set()


def test_every_engine_that_is_registered_can_be_loaded_and_has_a_line_of_help():
    assert {"echo", "llama"} <= list_engines().keys()
    for name in list_engines():
        engine = load_engine(name)
        assert engine.name == name
        assert engine.summary


def test_an_engine_that_does_not_exist_is_refused_with_the_names_that_do():
    with pytest.raises(EngineMissing, match=r"none of .*echo.*llama"):
        find_engine("lama")
