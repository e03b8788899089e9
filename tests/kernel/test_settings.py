"""Settings: by flag, environment and file, in that order; every mistake names its place; hostile files are refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stellwerk.core.errors import Refused
from stellwerk.kernel.settings import QUEUES, Settings, load_settings


def _file(folder: Path, text: str | bytes) -> Path:
    path = folder / "stellwerk.yml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def _load(folder: Path, text: str | bytes, env: dict[str, str] | None = None, **flags: object) -> Settings:
    return load_settings(_file(folder, text), env or {}, flags)


def test_without_a_file_there_are_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None, {}, {})
    assert settings.folder == tmp_path
    assert settings.data == tmp_path / ".stellwerk"
    assert settings.store == "sqlite:"
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8765)
    assert dict(settings.workers.slots) == dict.fromkeys(QUEUES, 16)
    workers = settings.workers
    assert (workers.lease_ms, workers.drain_ms, workers.kill_grace_ms) == (30_000, 30_000, 10_000)
    assert (settings.execution.shell, settings.execution.python) == (True, None)
    assert settings.keep_ms == 30 * 24 * 3_600_000
    assert settings.admin_token is None


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(Refused):
        load_settings(tmp_path / "no.yml", {}, {})
    with pytest.raises(Refused):
        load_settings(None, {"STELLWERK_CONFIG": str(tmp_path / "no.yml")}, {})
    with pytest.raises(Refused):
        load_settings(tmp_path, {}, {})


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "server: {port: 4711}")
    settings = load_settings(None, {"STELLWERK_CONFIG": str(path)}, {})
    assert (settings.server.port, settings.folder) == (4711, tmp_path)


SOURCES: list[tuple[str, Any, Any, Any, Any]] = [
    # setting, in the file, in the environment, as a flag; how it is read
    ("server.host", "127.0.0.2", "127.0.0.3", "127.0.0.4", lambda s: s.server.host),
    ("server.port", 1, "2", 3, lambda s: str(s.server.port)),
    ("workers.default", 1, "2", 3, lambda s: str(s.workers.slots["default"])),
    ("store", "sqlite:a", "sqlite:b", "sqlite:c", lambda s: s.store),
]
VARIABLES = {
    "server.host": ("STELLWERK_HOST", "host"),
    "server.port": ("STELLWERK_PORT", "port"),
    "workers.default": ("STELLWERK_WORKERS", "workers"),
    "store": ("STELLWERK_STORE", "store"),
}


@pytest.mark.parametrize(("name", "in_file", "in_env", "as_flag", "read"), SOURCES)
def test_a_flag_counts_before_the_environment_and_that_before_the_file(
    tmp_path: Path, name: str, in_file: Any, in_env: str, as_flag: Any, read: Any
) -> None:
    section, _, key = name.rpartition(".")
    text = f"{section}: {{{key}: '{in_file}'}}" if section else f"{key}: '{in_file}'"
    variable, flag = VARIABLES[name]
    assert read(_load(tmp_path, text)) == str(in_file)
    assert read(_load(tmp_path, text, {variable: in_env})) == str(in_env)
    assert read(_load(tmp_path, text, {variable: in_env}, **{flag: as_flag})) == str(as_flag)


ALL = """
data: here
store: "sqlite:"
retention: 7d
server:
  host: 127.0.0.9
  port: 1234
  allowed_hosts: [a.example, b.example]
  behind_tls_proxy: true
  admin_token: a-secret-of-mine
  tls: {cert: cert.pem, key: key.pem}
workers: {default: 1, sync: 2, events: 3, nodes: 4, steps: 5, reactive: 6, lease: 5s, drain: PT1M, kill_grace: 0.5}
execution: {shell: off, python: [mine, yours]}
"""


def test_a_file_may_say_everything(tmp_path: Path) -> None:
    settings = _load(tmp_path, ALL)
    assert settings.data == tmp_path / "here"
    assert settings.keep_ms == 7 * 24 * 3_600_000
    server = settings.server
    assert (server.host, server.port, server.behind_tls_proxy) == ("127.0.0.9", 1234, True)
    assert server.allowed_hosts == ("a.example", "b.example")
    assert (server.tls_cert, server.tls_key) == (tmp_path / "cert.pem", tmp_path / "key.pem")
    assert dict(settings.workers.slots) == dict(zip(QUEUES, (1, 2, 3, 4, 5, 6), strict=True))
    workers = settings.workers
    assert (workers.lease_ms, workers.drain_ms, workers.kill_grace_ms) == (5_000, 60_000, 500)
    assert (settings.execution.shell, settings.execution.python) == (False, ("mine", "yours"))
    assert settings.admin_token == "a-secret-of-mine"


def test_the_environment_may_say_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(
        None,
        {
            "STELLWERK_DATA": "there",
            "STELLWERK_RETENTION": "always",
            "STELLWERK_WORKERS_SYNC": "0",
            "STELLWERK_WORKERS_LEASE": "1",
            "STELLWERK_WORKERS_DRAIN": "0",
            "STELLWERK_WORKERS_KILL_GRACE": "1s",
            "STELLWERK_EXECUTION_SHELL": "off",
            "STELLWERK_EXECUTION_PYTHON": "mine,yours",
            "STELLWERK_ADMIN_TOKEN": "a-secret-of-mine",
            "STELLWERK_SERVER_ALLOWED_HOSTS": "a.example",
        },
        {},
    )
    assert settings.data == tmp_path / "there"
    assert settings.keep_ms is None
    assert settings.workers.slots["sync"] == 0
    workers = settings.workers
    assert (workers.lease_ms, workers.drain_ms, workers.kill_grace_ms) == (1_000, 0, 1_000)
    assert (settings.execution.shell, settings.execution.python) == (False, ("mine", "yours"))
    assert settings.admin_token == "a-secret-of-mine"
    assert settings.server.allowed_hosts == ("a.example",)


def test_paths_in_the_file_start_from_its_folder_and_others_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _load(tmp_path / "etc", "data: d").data == tmp_path / "etc" / "d"
    assert _load(tmp_path / "etc", "data: d", {"STELLWERK_DATA": "d"}).data == tmp_path / "d"
    assert _load(tmp_path / "etc", "data: d", data="d").data == tmp_path / "d"


MISTAKES = [
    ("workers: {default: many}", "1:20"),
    ("workers:\n  default: -1", "2:12"),
    ("workers: {default: 1001}", "1:20"),
    ("workers: {default: 1.5}", "1:20"),
    ("workers: {default: true}", "1:20"),
    ("workers: {lease: 999ms}", "1:18"),
    ("workers: {lease: soon}", "1:18"),
    ("workers: {drain: -1}", "1:18"),
    ("workers: {drain: [1]}", "1:18"),
    ("workers: 4", "1:10"),
    ("workers: [default, 4]", "1:10"),
    ("server: x", "1:9"),
    ("server:\n  tls: yes\n", "2:8"),
    ("server: {port: 65536}", "1:16"),
    ("server: {host: [a]}", "1:16"),
    ("server: {behind_tls_proxy: maybe}", "1:28"),
    ("server: {admin_token: short}", "1:23"),
    ("server: {allowed_hosts: [1, 2]}", "1:25"),
    ("retention: never", "1:12"),
    ("execution: {python: {a: b}}", "1:"),
    ("data: 5", "1:7"),
    ("data: {a: b}", "1:"),
    ("wrokers: {default: 4}", "1:"),
    ("workers: {defualt: 4}", "1:11"),
    ("server:\n  prot: 1", "2:3"),
    ("- a\n- b", "1:1"),
    ("just words", "1:1"),
    ("a: b: c", "1:5"),
    ("workers: {default: 4", "2:1"),
    ("server: {port: 1}\nserver: {port: 2}", "2:1"),
    ("server:\n  port: 1\n  port: 1\n", "3:3"),
    ("{[a, b]: c}", "1:2"),
    ("a: !!python/object/apply:os.system ['true']", "1:4"),
    ("data: !!python/name:os.system x", "1:7"),
    ("\tserver: 1", "1:1"),
    ("server: {port: 1}\n---\nserver: {port: 2}", "2:1"),
]


@pytest.mark.parametrize(("text", "place"), MISTAKES)
def test_a_mistake_in_the_file_is_refused_with_its_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(Refused) as refused:
        _load(tmp_path, text)
    assert f"stellwerk.yml:{place}" in refused.value.message
    assert re.match(r"stellwerk\.yml:\d+:\d+: ", refused.value.message)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        _load(tmp_path, "server: {port: no}\nworkers: {default: no}\nwhat: ever", {"STELLWERK_WORKERS_SYNC": "no"})
    lines = refused.value.message.splitlines()
    assert len(lines) == 4
    assert any(line.startswith("STELLWERK_WORKERS_SYNC: ") for line in lines)


def test_a_mistake_in_a_flag_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--port: "):
        _load(tmp_path, "", port=-1)


def test_an_address_that_others_reach_needs_tls_or_a_proxy(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not this machine alone"):
        _load(tmp_path, "server: {host: 0.0.0.0}")
    with pytest.raises(Refused, match="needs both"):
        _load(tmp_path, "server: {tls: {cert: a}}")
    assert _load(tmp_path, "server: {host: 0.0.0.0, behind_tls_proxy: true}").server.host == "0.0.0.0"


def test_an_admin_token_that_could_never_be_given_is_refused(tmp_path: Path) -> None:
    for token in ("x" * 9, "y" * 257):
        with pytest.raises(Refused):
            _load(tmp_path, f"server: {{admin_token: {token}}}")
        with pytest.raises(Refused):
            _load(tmp_path, "", {"STELLWERK_ADMIN_TOKEN": token})


# -- hostile files ----------------------------------------------------------------------------------------------------


def _refused_in_time(tmp_path: Path, text: bytes) -> str:
    """Loaded in a process of its own, with little memory and time: what blows up must not take the tests along."""
    path = _file(tmp_path, text)
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "resource.setrlimit(resource.RLIMIT_CPU, (20, 20));"
        "from pathlib import Path; from stellwerk.kernel.settings import load_settings;"
        "from stellwerk.core.errors import Refused\n"
        "try: load_settings(Path(sys.argv[1]), {}, {})\n"
        "except Refused as error: print(error.message[:300])\n"
    )
    root = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    assert re.match(r"stellwerk\.yml:\d+:\d+: ", done.stdout), done.stdout
    return done.stdout


def _bomb_of_mappings() -> bytes:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 10):
        inner = ", ".join(f"k{place}: *a{level - 1}" for place in range(10))
        lines.append(f"a{level}: &a{level} {{{inner}}}")
    return "\n".join(lines).encode()


def _bomb_of_lists() -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 12):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    lines.append("server: {allowed_hosts: *a11}")
    return "\n".join(lines).encode()


HOSTILE = {
    "a bomb of mappings": _bomb_of_mappings(),
    "a bomb of lists": _bomb_of_lists(),
    "a mapping that holds itself": b"server: &a {tls: *a}",
    "a list that holds itself": b"server: {allowed_hosts: &a [*a]}",
    "very deep lists": b"data: " + b"[" * 100_000,
    "very deep mappings": b"{a: " * 100_000,
    "very deep lists, closed": b"data: " + b"[" * 5_000 + b"]" * 5_000,
    "too large": b"# " + b"x" * (16 * 1024 * 1024),
    "not utf-8": b"data: \xff\xfe\xfa",
    "a zero byte": b"data: a\0b",
    "a very long number": b"server: {port: " + b"9" * 10_000 + b"}",
    "a merge of others": b"a: &a {port: 1}\nserver: {<<: *a}",
    "an unknown anchor": b"server: {host: *nobody}",
    "binary": bytes(range(256)) * 4,
    "a date that is none": b"data: 2026-99-99",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_quickly_and_with_a_place(tmp_path: Path, name: str) -> None:
    _refused_in_time(tmp_path, HOSTILE[name])


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    for text in ("", "# only words\n", "---\n", "workers:\nserver: {}\n"):
        assert _load(tmp_path, text).server.port == 8765
