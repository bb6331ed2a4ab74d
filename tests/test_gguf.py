"""gguf: made-up headers and random bytes; test_models describes the real default model, which it fetches."""

import contextlib
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.engines.gguf import GgufInfo, describe, read_metadata
from overnight.errors import ModelNotFound

FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: object) -> bytes:
    packed = text(str(value)) if kind == 8 else struct.pack("<" + FORMS[kind], value)
    return text(key) + struct.pack("<I", kind) + packed


def array(key: str, kind: int, values: list[bytes], count: int | None = None) -> bytes:
    stated = len(values) if count is None else count
    return text(key) + struct.pack("<IIQ", 9, kind, stated) + b"".join(values)


def gguf(*pairs: bytes, version: int = 3, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs) if count is None else count) + b"".join(pairs)


EMBEDDER = gguf(
    pair("general.architecture", 8, "bert"),
    array("tokenizer.ggml.tokens", 8, [text("a"), text(""), text("ü")]),
    array("tokenizer.ggml.scores", 6, [b"\0" * 4] * 3),
    pair("general.name", 8, "Made up"),
    pair("bert.context_length", 4, 512),
    pair("bert.pooling_type", 4, 2),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_a_header_is_described(path):
    path.write_bytes(EMBEDDER)
    assert describe(path) == GgufInfo("bert", 512, 2, chat_template="", name="Made up")


def test_what_the_header_does_not_say_is_none(path):
    path.write_bytes(gguf(pair("general.architecture", 8, "llama"), pair("tokenizer.chat_template", 8, "{{ x }}")))
    assert describe(path) == GgufInfo("llama", None, None, chat_template="{{ x }}", name="")
    assert describe(path).has_chat_template


def test_values_of_the_wrong_type_are_not_believed(path):
    path.write_bytes(
        gguf(
            pair("general.architecture", 8, "llama"),
            pair("general.name", 4, 7),
            pair("llama.context_length", 8, "long"),
            pair("llama.pooling_type", 7, 1),
            pair("tokenizer.chat_template", 7, 1),
        )
    )
    assert describe(path) == GgufInfo("llama", None, None, chat_template="", name="")
    assert not describe(path).has_chat_template


@pytest.mark.parametrize("version", [2, 3])
def test_every_scalar_is_read_and_arrays_are_left_out(path, version):
    values = {
        0: 255,
        1: -1,
        2: 65535,
        3: -2,
        4: 2**32 - 1,
        5: -3,
        6: 0.5,
        7: True,
        8: "ü",
        10: 2**64 - 1,
        11: -4,
        12: 0.1,
    }
    arrays = [array(f"a{kind}", kind, [b"\1" * struct.calcsize(form)] * 2) for kind, form in FORMS.items()]
    path.write_bytes(gguf(*arrays, *(pair(f"k{kind}", kind, value) for kind, value in values.items()), version=version))
    assert read_metadata(path) == {f"k{kind}": value for kind, value in values.items()}


def test_only_the_wanted_names_and_prefixes_are_returned(path):
    path.write_bytes(EMBEDDER)
    assert read_metadata(path, ["bert.", "general.name"]) == {
        "general.name": "Made up",
        "bert.context_length": 512,
        "bert.pooling_type": 2,
    }
    assert read_metadata(path, ["bert"]) == {}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"GG", "cut short"),
        (b"PK\3\4" + bytes(99), "it is no GGUF"),
        (gguf(version=1), "GGUF version 1"),
        (gguf(version=4), "GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (gguf(count=2**64 - 1), "cut short or broken at byte 24"),
        (gguf(struct.pack("<Q", 2**63)), "cut short"),
        (gguf(pair("k", 8, "x" * 99))[:-1], "cut short"),
        (gguf(text("k") + struct.pack("<IQ", 8, 2**64 - 1)), "cut short"),
        (gguf(array("k", 8, [], 2**64 - 1)), "cut short"),
        (gguf(array("k", 8, [struct.pack("<Q", 2**64 - 1)], 3)), "cut short"),
        (gguf(array("k", 8, [struct.pack("<Q", 99)])), "cut short"),
        (gguf(array("k", 10, [], 2**64 - 1)), "cut short"),
        (gguf(array("k", 9, [])), "array of arrays"),
        (gguf(array("k", 13, [])), "unknown type 13"),
        (gguf(text("k") + struct.pack("<I", 99)), "unknown type 99"),
        (gguf(), "names no architecture"),
        (gguf(pair("general.architecture", 4, 1)), "names no architecture"),
    ],
)
def test_a_broken_header_is_told_with_the_file_and_the_reason(path, data, reason):
    path.write_bytes(data)
    with pytest.raises(ModelNotFound, match=reason) as caught:
        describe(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_and_a_folder_are_told(tmp_path):
    for path in (tmp_path / "gone.gguf", tmp_path):
        with pytest.raises(ModelNotFound, match=r"cannot be read: .*directory"):
            describe(path)


def test_every_cut_of_a_sound_header_is_refused(path):
    for size in range(len(EMBEDDER)):
        path.write_bytes(EMBEDDER[:size])
        with pytest.raises(ModelNotFound):
            read_metadata(path)


SCRATCH = "hypothesis.gguf"


@given(body=st.binary(max_size=200), pairs=st.integers(0, 2**64 - 1))
def test_random_bytes_are_read_or_refused(tmp_path_factory, body, pairs):
    path = tmp_path_factory.getbasetemp() / SCRATCH
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, pairs) + body)
    with contextlib.suppress(ModelNotFound):
        assert isinstance(read_metadata(path), dict)


@given(at=st.integers(8, len(EMBEDDER) - 1), byte=st.integers(0, 255))
def test_a_sound_header_with_one_changed_byte_is_read_or_refused(tmp_path_factory, at, byte):
    path = tmp_path_factory.getbasetemp() / SCRATCH
    path.write_bytes(EMBEDDER[:at] + bytes([byte]) + EMBEDDER[at + 1 :])
    with contextlib.suppress(ModelNotFound):
        describe(path)


def test_a_vocabulary_of_150_000_tokens_and_merges_is_walked_quickly(path):
    tokens = [text(f"token{number}") for number in range(150_000)]
    path.write_bytes(gguf(array("tokenizer.ggml.tokens", 8, tokens), array("m", 8, tokens), pair("z", 4, 1)))
    started = time.perf_counter()
    assert read_metadata(path, ["z"]) == {"z": 1}
    assert time.perf_counter() - started < 1  # 0.06 s on an idle laptop
