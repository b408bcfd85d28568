"""The reader of Kineto traces given files in every state: odd events, damaged text, no trace at all."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from daydream.trace.files import read_trace
from hal.support.errors import InputError
from tests.daydream.traces import Builder, event, one_step, written


class TestOddEvents:
    @pytest.mark.parametrize(
        ("fields", "start", "duration"),
        [
            ({"ts": "10.5"}, 10.5, 5),
            ({"dur": "7"}, 10, 7),
            ({"dur": None}, 10, 0),
            ({"dur": -3}, 10, 0),
            ({"dur": math.nan}, 10, 0),
            ({"dur": math.inf}, 10, 0),
            ({"dur": [1]}, 10, 0),
            ({"dur": 10**400}, 10, 0),
            ({"args": "text"}, 10, 5),
            ({"args": [1, 2]}, 10, 5),
            ({"args": None}, 10, 5),
            ({"args": {"a": math.nan, "b": -math.inf}}, 10, 5),
            ({"name": 12}, 10, 5),
            ({"name": None}, 10, 5),
            ({"pid": {"a": 1}}, 10, 5),
            ({"tid": 10**30}, 10, 5),
            ({"args": {"Sequence number": 10**30, "External id": "x"}}, 10, 5),
            ({"id": [1]}, 10, 5),
        ],
    )
    def test_kept(self, fields: dict[str, Any], start: float, duration: float, tmp_path: Path) -> None:
        trace = written(tmp_path / "t.json", {"traceEvents": [event(**fields), event(ts=0, name="other")]})
        assert (trace.start_us[1], trace.duration_us[1]) == (start, duration)
        assert isinstance(trace.arguments[1], dict)

    @pytest.mark.parametrize("time", [None, "soon", math.nan, -math.inf, 1e300, 10**400, [], True, "NaN", "1E999999"])
    @pytest.mark.parametrize("other", ["10", "1712195495519689.047"])
    def test_without_a_time_left_out(self, time: Any, other: str, tmp_path: Path) -> None:
        text = json.dumps([event(ts=time), event(ts=0)]).replace('"ts": 0', f'"ts": {other}')
        trace = written(tmp_path / "t.json", text)
        assert len(trace) == 1
        assert trace.warnings == ("1 event without a usable time, left out",)

    def test_what_is_no_event_is_counted_once_per_kind(self, tmp_path: Path) -> None:
        junk = [1, "x", None, True, {}, {"ph": 3}, {"name": "only"}]
        trace = written(tmp_path / "t.json", {"traceEvents": [*junk, event()]})
        assert len(trace) == 1
        assert trace.warnings == ("7 events without a phase, left out",)

    def test_negative_durations_are_counted(self, tmp_path: Path) -> None:
        trace = written(tmp_path / "t.json", [event(dur=-1), event(dur=-2), event()])
        assert trace.warnings == ("2 events with a negative duration, taken as 0",)

    def test_duplicate_keys(self, tmp_path: Path) -> None:
        text = '{"traceEvents": [{"ph": "M", "ph": "X", "cat": "cpu_op", "ts": 1, "ts": 4, "dur": 2, "name": "a"}]}'
        assert written(tmp_path / "t.json", text).origin_us == 4

    def test_events_under_other_keys_and_in_lists_of_lists(self, tmp_path: Path) -> None:
        document: Any = {"traceEvents": [[[event()]], [[event(ts=20)], event(ts=30)]], "daydream": {"version": 1}}
        for _ in range(10):
            document = {"inner": document}
        assert len(written(tmp_path / "t.json", document)) == 3

    def test_junk_inside_an_event(self, tmp_path: Path) -> None:
        junk: Any = 1
        for _ in range(10):
            junk = {"more": [junk, "]}"]}
        trace = written(tmp_path / "t.json", [event(args=junk, strange=junk)])
        assert trace.arguments == (junk,)

    @pytest.mark.parametrize("field", ["args", "strange"])
    def test_nesting_without_end_costs_its_event_only(self, field: str, tmp_path: Path) -> None:
        deep = "[" * 100_000 + "]" * 100_000
        text = json.dumps({"traceEvents": [event(), event(**{field: "deep"}), event(ts=20)]}).replace('"deep"', deep)
        trace = written(tmp_path / "t.json", text)
        assert len(trace) == 2
        assert trace.warnings == ("1 event damaged or cut, left out",)

    def test_objects_without_end(self, tmp_path: Path) -> None:
        trace = written(tmp_path / "t.json", f"[{json.dumps(event())}," + '{"ph":' * 100_000)
        assert len(trace) == 1
        assert "The file is damaged in too many places; the rest of it is left out" in trace.warnings

    def test_text_that_is_not_utf8(self, tmp_path: Path) -> None:
        data = json.dumps([event(name="?")]).encode().replace(b"?", b"\xff\xfe")
        trace = written(tmp_path / "t.json", data)
        assert trace.text(0) == "\ufffd\ufffd"
        assert trace.warnings == ("The text is not UTF-8 throughout; what is not was replaced",)

    def test_half_a_surrogate_pair(self, tmp_path: Path) -> None:
        text = json.dumps([event(name="?", args={"a": "?"})]).replace("?", r"\ud83d\ude00 \ud800 \\ud800")
        trace = written(tmp_path / "t.json", text)
        assert trace.text(0) == "\U0001f600 \ufffd \\ud800"
        assert trace.arguments[0]["a"].encode()

    def test_line_breaks_within_names(self, tmp_path: Path) -> None:
        assert written(tmp_path / "t.json", '[{"ph":"X","cat":"cpu_op","ts":1,"dur":1,"name":"a\nb"}]').names == (
            "a\nb",
        )

    def test_byte_order_mark(self, tmp_path: Path) -> None:
        assert len(written(tmp_path / "t.json", b"\xef\xbb\xbf" + json.dumps([event()]).encode())) == 1


class TestDamagedFiles:
    @pytest.mark.parametrize(
        ("data", "problem"),
        [
            (b"", "is empty"),
            (b" \n\t", "is empty"),
            (b"[]", "no usable event"),
            (b"{}", "no list traceEvents"),
            (b'{"traceEvents": null}', "no list traceEvents"),
            (b'{"traceEvents": {}}', "no list traceEvents"),
            (b'{"traceEvents": []}', "no usable event"),
            (b'{"traceEvents": [', "no usable event"),
            (b"[1, 2", "no usable event"),
            (b"[" * 100_000, "no usable event"),
            (b'{"a":' * 100_000, "no list traceEvents"),
            (b"PK\x03\x04 not JSON", "is a zip archive"),
            (b"\x00" * 1000, "no list traceEvents"),
            (b"\x1f\x8b", "is empty"),
            (b"\x1f\x8bjunk", "is empty"),
            # Without the time at which it was compressed.
            pytest.param(gzip.compress(b"", mtime=0), "is empty", id="nothing compressed"),
            pytest.param(gzip.compress(b"hello", mtime=0), "no list traceEvents", id="a word compressed"),
        ],
    )
    def test_no_trace_at_all(self, data: bytes, problem: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=problem) as raised:
            written(tmp_path / "t.json", data)
        assert "t.json" in raised.value.field

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no such file"):
            read_trace(tmp_path / "none.json")

    def test_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is a directory"):
            read_trace(tmp_path)

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(InputError, match="not a regular file"):
            read_trace(tmp_path / "pipe")

    def test_not_readable(self, tmp_path: Path) -> None:
        path = Builder().operator("a", 0, 1).write(tmp_path / "t.json")
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read everything")
        with pytest.raises(InputError, match="cannot be read"):
            read_trace(path)

    def test_names_that_no_file_can_have(self) -> None:
        with pytest.raises(InputError):
            read_trace(Path("a\0b"))
        with pytest.raises(InputError):
            read_trace(Path("x" * 5000))

    def test_too_much_text_for_a_small_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("daydream.trace.text.MAX_BYTES", 1 << 20)
        with pytest.raises(InputError, match="GiB of text"):
            written(tmp_path / "t.json", gzip.compress(b" " * (2 << 20), mtime=0))

    def test_cut_anywhere(self, tmp_path: Path) -> None:
        data = one_step("2022").text().encode()
        whole = len(written(tmp_path / "t.json", data))
        counts = []
        for end in range(data.index(b"ProfilerStep"), len(data), 11):
            try:
                trace = written(tmp_path / "t.json", data[:end])
                assert trace.warnings or len(trace) == whole
                counts.append(len(trace))
            except InputError:
                counts.append(0)
        assert counts == sorted(counts)
        assert set(counts) == set(range(whole + 1))

    def test_gzip_cut_anywhere(self, tmp_path: Path) -> None:
        data = gzip.compress(one_step("2026").text().encode(), mtime=0)
        whole = len(written(tmp_path / "t.json", data))
        counts = []
        for end in range(0, len(data), 7):
            try:
                trace = written(tmp_path / "t.json", data[:end])
                assert "The compressed file is cut off; what is there is used" in trace.warnings
                counts.append(len(trace))
            except InputError:
                counts.append(0)
        assert counts == sorted(counts)
        assert counts[0] == 0
        assert counts[-1] == whole

    def test_gzip_damaged_within(self, tmp_path: Path) -> None:
        builder = Builder()
        for number in range(3000):
            builder.operator(f"aten::op{number * 7919 % 3001}", number, 1)
        data = bytearray(gzip.compress(builder.text().encode(), mtime=0))
        data[len(data) // 2 : len(data) // 2 + 40] = b"\xff" * 40
        trace = written(tmp_path / "t.json", bytes(data))
        assert 1000 < len(trace) < 3000
        assert trace.warnings[0] == "The compressed data is damaged; what comes before the damage is used"

    def test_gzip_of_several_members(self, tmp_path: Path) -> None:
        data = one_step("2026").text().encode()
        members = [gzip.compress(part, mtime=0) for part in (data[:500], data[500:])]
        trace = written(tmp_path / "t.json", b"".join(members))
        assert (len(trace), trace.warnings) == (9, ())

    def test_damage_costs_its_event_and_keeps_what_follows(self, tmp_path: Path) -> None:
        builder = one_step("2022")
        builder.head = {"deviceProperties": [{"id": 0, "name": "V100"}]}
        text = builder.text().replace('"traceName"', '"daydream": {"version": 1}, "traceName"')
        trace = written(tmp_path / "t.json", text.replace('"name": "gemm"', '"name": "ge"mm"'))
        assert len(trace) == 8
        assert trace.warnings == ("1 event damaged or cut, left out",)
        assert trace.devices == ({"id": 0, "name": "V100"},)
        assert trace.metadata == {"version": 1}

    def test_missing_brace(self, tmp_path: Path) -> None:
        text = (
            one_step("2022")
            .text()
            .replace('"block": [256, 1, 1], "registers per thread": 32, "shared memory": 0}}', "")
        )
        assert len(written(tmp_path / "t.json", text)) == 8

    def test_every_place_damaged_ends(self, tmp_path: Path) -> None:
        text = "[" + '{"ph": "X" "cat": "cpu_op"},' * 5000 + json.dumps(event()) + "]"
        with pytest.raises(InputError, match="damaged in too many places"):
            written(tmp_path / "t.json", text)

    def test_trailing_comma(self, tmp_path: Path) -> None:
        trace = written(tmp_path / "t.json", f'{{"traceEvents": [{json.dumps(event())},]}}')
        assert (len(trace), trace.warnings) == (1, ())
