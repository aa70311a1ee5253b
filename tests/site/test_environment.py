"""Settings from the environment: a typo is an error, not a False."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from inference_site.core import environment
from inference_site.ops.serve.stack import lock_directory

ROOT = Path(__file__).resolve().parents[2]
NAME = "TEST_OF_ENVIRONMENT"


def given(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(NAME, raising=False)
    else:
        monkeypatch.setenv(NAME, value)


@pytest.mark.parametrize(
    ("value", "expected"), [("a b", "a b"), ("  a ", "a"), ("", "fallback"), (None, "fallback")]
)
def test_an_empty_variable_counts_as_absent(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: str
) -> None:
    given(monkeypatch, value)
    assert environment.text(NAME, "fallback") == expected


def test_a_secret_may_lie_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden\n")
    monkeypatch.setenv(f"{NAME}_FILE", str(tmp_path / "secret"))
    assert environment.text(NAME, "fallback") == "hidden"


@pytest.mark.parametrize("secret", ["$HOME", "$no-such-variable", "$$", "a$HOME"])
def test_a_secret_may_begin_with_a_dollar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secret: str
) -> None:
    given(monkeypatch, secret)
    assert environment.text(NAME) == secret
    (tmp_path / "secret").write_text(f"{secret}\n")
    monkeypatch.setenv(f"{NAME}_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv(NAME, "less")
    assert environment.text(NAME) == secret


def test_a_file_of_a_secret_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(f"{NAME}_FILE", str(tmp_path / "no-such"))
    with pytest.raises(ImproperlyConfigured, match=rf"{NAME}_FILE: No such file.*no-such"):
        environment.text(NAME)
    monkeypatch.setenv(f"{NAME}_FILE", "")
    given(monkeypatch, "own")
    assert environment.text(NAME) == "own"


def test_a_file_of_a_secret_that_is_no_text_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "random").write_bytes(b"\xff\x00\xfe")
    monkeypatch.setenv(f"{NAME}_FILE", str(tmp_path / "random"))
    with pytest.raises(ImproperlyConfigured, match=rf"{NAME}_FILE: not a text in UTF-8: .*random"):
        environment.text(NAME)


def test_amounts_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, '{"a": 0.1, "b": "2", "c": 0}')
    assert environment.amounts(NAME, re.compile("[abc]")) == {"a": Decimal("0.1"), "b": 2, "c": 0}
    given(monkeypatch, None)
    assert environment.amounts(NAME, re.compile("[abc]")) == {}


@pytest.mark.parametrize("value", ["-1", '"x"', "NaN", "Infinity", "null", "true", "[1]", "1e9"])
def test_what_is_no_amount_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    given(monkeypatch, f'{{"a": {value}}}')
    with pytest.raises(ImproperlyConfigured, match="a: expected a number"):
        environment.amounts(NAME, re.compile("[abc]"))


def test_an_amount_of_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, '{"web-search": 1}')
    with pytest.raises(ImproperlyConfigured, match="'web-search' is none of web_search"):
        environment.amounts(NAME, re.compile("web_search"))


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("true", True),
        ("TRUE", True),
        ("1", True),
        ("yes", True),
        (" on ", True),
        ("false", False),
        ("0", False),
        ("No", False),
        ("off", False),
        ("", None),
        (None, None),
    ],
)
def test_a_boolean_is_one_of_the_known_words_or_the_default(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool | None, default: bool
) -> None:
    given(monkeypatch, value)
    assert environment.boolean(NAME, default) is (default if expected is None else expected)


@pytest.mark.parametrize("value", ["ture", "2", "y", "none", "true false"])
def test_a_boolean_that_is_neither_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    given(monkeypatch, value)
    with pytest.raises(ImproperlyConfigured, match=NAME) as caught:
        environment.boolean(NAME, False)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("value", "expected"), [("12", 12), (" 5 ", 5), ("", 7), (None, 7)])
def test_a_number_is_read_or_defaulted(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: int
) -> None:
    given(monkeypatch, value)
    assert environment.number(NAME, 7) == expected


@pytest.mark.parametrize("value", ["4", "-5", "1.5", "5s", "1e3", "five", "²", "١٢", "9" * 5000])
def test_a_number_below_the_minimum_or_none_at_all_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    given(monkeypatch, value)
    with pytest.raises(ImproperlyConfigured, match=NAME) as caught:
        environment.number(NAME, 7, minimum=5)
    assert "from 5" in str(caught.value)


def test_a_number_above_the_maximum_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "10")
    with pytest.raises(ImproperlyConfigured, match=f"{NAME}: expected .* from 5 to 9, got '10'"):
        environment.number(NAME, 7, 5, 9)
    assert environment.number(NAME, 7, 5, 10) == 10


def test_a_time_is_one_that_sockets_and_timestamps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "1000000000")
    assert environment.seconds(NAME, 7) == 10**9
    given(monkeypatch, "1000000001")
    with pytest.raises(ImproperlyConfigured, match=f"{NAME}: expected .* from 2 to 1000000000, "):
        environment.seconds(NAME, 7, 2)


@pytest.mark.parametrize("value", ["app.example", "https://app.example/", "https://a/b", "*.a"])
def test_an_origin_that_no_browser_sends_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    given(monkeypatch, f"https://a.example,{value}")
    with pytest.raises(ImproperlyConfigured, match=f"{NAME}: expected origins such as") as caught:
        environment.web_origins(NAME)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["*", "null", "http://[::1]:80", "app://obsidian.md", ""])
def test_an_origin_that_a_browser_sends_is_taken(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    given(monkeypatch, value)
    assert environment.web_origins(NAME) == [value] * bool(value)


def test_the_minimum_itself_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "5")
    assert environment.number(NAME, 7, minimum=5) == 5


@pytest.mark.parametrize("value", ["0", "-1", "soon"])
def test_a_bad_number_may_warn_and_fall_back(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    given(monkeypatch, value)
    with pytest.warns(RuntimeWarning, match=f"{NAME}.*Using 7"):
        assert environment.number_or_warn(NAME, 7) == 7


def test_a_good_number_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "9")
    assert environment.number_or_warn(NAME, 7) == 9


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a", ["a"]), (" a , b,,", ["a", "b"]), ("", ["x", "y"]), (None, ["x", "y"]), (",", [])],
)
def test_a_list_is_separated_by_commas(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: list[str]
) -> None:
    given(monkeypatch, value)
    assert environment.items(NAME, "x,y") == expected


def test_a_database_address_becomes_djangos_settings() -> None:
    config = environment.database("postgresql://user:pass%40word@db.example:5433/site")
    assert config["ENGINE"] == "django.db.backends.postgresql"
    assert (config["HOST"], config["PORT"], config["NAME"]) == ("db.example", 5433, "site")
    assert (config["USER"], config["PASSWORD"]) == ("user", "pass@word")


@pytest.mark.parametrize(("level", "told"), [("Debug", "DEBUG"), ("loud", "LOG_LEVEL: expected")])
def test_the_level_of_the_log_is_in_any_case(level: str, told: str) -> None:
    read = "from inference_site import settings; print(settings.LOGGING['root']['level'])"
    done = subprocess.run(
        [sys.executable, "-c", read],
        cwd=ROOT,
        env={**os.environ, "LOG_LEVEL": level},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert told in (done.stderr if done.returncode else done.stdout)


@pytest.mark.parametrize(
    "url", ["site", "mysql://db/site", "//db/site", "postgresql://user:secret@db:port/site"]
)
def test_what_is_no_address_of_postgresql_is_told_without_its_password(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"DATABASE_URL.*postgresql://") as caught:
        environment.database(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "://site:p/secret@db:1/site",
        "://site:p@secret/w@db:1/site",
        "://site:1#secret@db:1/site",
        "://site:p@w#secret@db:1/site",
        "://site:1?secret@db:1/site",
    ],
)
def test_a_password_with_a_delimiter_is_no_part_of_the_host(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match="in percent-encoding") as caught:
        environment.database(f"postgresql{url}")
    assert "secret" not in str(caught.value)
    given(monkeypatch, f"redis{url}")
    with pytest.raises(ImproperlyConfigured, match="in percent-encoding"):
        environment.redis(NAME, "")


@pytest.mark.parametrize("url", ["db", "http://db", "redis://:secret@db:port/0"])
def test_what_is_no_address_of_redis_is_told_without_its_password(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    given(monkeypatch, url)
    for read in (environment.redis, environment.redis_servers):
        with pytest.raises(ImproperlyConfigured, match=rf"{NAME}.*rediss://") as caught:
            read(NAME, "")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://db/site", "redis://db/-1", "redis://db/0/1", "unix://"])
def test_a_redis_has_a_number_or_a_path(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    given(monkeypatch, url)
    for read in (environment.redis, environment.redis_servers):
        with pytest.raises(ImproperlyConfigured, match=f"{NAME}: expected unix:///PATH, or the"):
            read(NAME, "")


def test_a_list_of_redis_servers_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, ",")
    with pytest.raises(ImproperlyConfigured, match=f"{NAME}: expected an address"):
        environment.redis_servers(NAME, "redis://db")


def test_addresses_of_redis_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (
        "redis://db",
        "redis://db/",
        "rediss://:p@db:6380/1",
        "unix:///run/redis.sock?db=2",
    ):
        given(monkeypatch, url)
        assert environment.redis(NAME, "") == url
        assert environment.redis_servers(NAME, "") == [url]
    given(monkeypatch, "redis://a, redis://b")
    assert environment.redis_servers(NAME, "") == ["redis://a", "redis://b"]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory in which a ``serve`` runs, and what it has written."""
    monkeypatch.setattr(environment, "_served", {})
    (tmp_path / "services.json").write_text(json.dumps({NAME: "served", f"{NAME}_OTHER": "too"}))
    return tmp_path


def test_the_settings_of_a_running_stack_are_taken(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock_directory(served):
        environment.read_served(served)
        assert environment.text(f"{NAME}_OTHER", "default") == "too"
        for value, found in ((None, "served"), ("own", "own"), ("", "default")):
            given(monkeypatch, value)
            assert environment.text(NAME, "default") == found


def test_what_a_stack_has_left_behind_is_not_taken(served: Path) -> None:
    lock_directory(served).close()
    environment.read_served(served)
    assert environment.text(NAME, "default") == "default"


@pytest.mark.parametrize("content", [None, "", "{", "not json"])
def test_without_the_file_of_a_stack_there_are_the_defaults(
    served: Path, content: str | None
) -> None:
    (served / "services.json").unlink()
    if content is not None:
        (served / "services.json").write_text(content)
    with lock_directory(served):
        environment.read_served(served)
    assert environment.text(NAME, "default") == "default"


def test_a_look_at_the_lock_does_not_keep_a_stack_from_starting(served: Path) -> None:
    with (served / "lock").open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.1, looking.close).start()
        lock_directory(served).close()


@pytest.mark.parametrize(
    ("value", "expected"),
    [('{"temperature": 0, "top_k": 5}', {"temperature": 0, "top_k": 5}), ("", {}), (None, {})],
)
def test_a_mapping_is_a_json_object(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: dict[str, int]
) -> None:
    given(monkeypatch, value)
    assert environment.mapping(NAME) == expected


@pytest.mark.parametrize(
    ("value", "told"),
    [("{", "not JSON"), ("temperature=0", "not JSON"), ("[]", "expected a JSON object"),
     ("5", "expected a JSON object"), ("null", "expected a JSON object")],
)  # fmt: skip
def test_what_is_no_json_object_is_no_mapping(
    monkeypatch: pytest.MonkeyPatch, value: str, told: str
) -> None:
    given(monkeypatch, value)
    with pytest.raises(ImproperlyConfigured, match=f"{NAME}: {told}"):
        environment.mapping(NAME)


@pytest.mark.parametrize(("value", "expected"), [(None, "line"), ("JSON", "json"), ("", "line")])
def test_a_choice_is_one_of_its_words_or_the_first(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: str
) -> None:
    given(monkeypatch, value)
    assert environment.choice(NAME, ("line", "json")) == expected


def test_another_word_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "xml")
    with pytest.raises(ImproperlyConfigured, match=f"{NAME}: expected line or json, got 'xml'"):
        environment.choice(NAME, ("line", "json"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [("https://ai.example.org/", "https://ai.example.org"), ("http://[::1]:8000",) * 2, ("", "")],
)
def test_an_origin_has_no_path(monkeypatch: pytest.MonkeyPatch, value: str, expected: str) -> None:
    given(monkeypatch, value)
    assert environment.origin(NAME) == expected


@pytest.mark.parametrize(
    "value", ["ai.example.org", "https://ai.example.org/path", "javascript:alert(1)", "https://a b"]
)
def test_what_is_no_origin_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    given(monkeypatch, value)
    with pytest.raises(ImproperlyConfigured, match=NAME):
        environment.origin(NAME)


def test_networks_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, "10.0.0.0/8, ::1")
    assert [str(network) for network in environment.networks(NAME)] == ["10.0.0.0/8", "::1/128"]


@pytest.mark.parametrize("value", ["10.0.0.1/8", "localhost", "10.0.0.0/33"])
def test_what_is_no_network_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    given(monkeypatch, value)
    with pytest.raises(ImproperlyConfigured, match=f"^{NAME}: "):
        environment.networks(NAME)
