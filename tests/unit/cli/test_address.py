"""Where a command looks for its host and its token, in which order."""

from pathlib import Path

import pytest

from stellwerk.cli.address import Asked, find_address
from stellwerk.cli.exits import Quit
from tests.unit.cli.conftest import CommandLine, ScriptedHost, Told


def test_without_a_word_it_is_the_usual_port(tmp_path: Path) -> None:
    assert find_address(Asked(), {}, tmp_path).url == "http://127.0.0.1:8765"


def test_the_config_in_the_working_folder_names_the_port(tmp_path: Path) -> None:
    (tmp_path / "stellwerk.yml").write_text("server: {host: 127.0.0.2, port: 9000}\n")
    assert find_address(Asked(), {}, tmp_path).url == "http://127.0.0.2:9000"


def test_a_config_that_was_named_wins_over_the_one_nearby(tmp_path: Path) -> None:
    (tmp_path / "stellwerk.yml").write_text("server: {port: 9000}\n")
    (tmp_path / "other.yml").write_text("server: {port: 9001}\n")
    assert find_address(Asked(config=Path("other.yml")), {}, tmp_path).port == 9001


def test_an_address_that_means_everywhere_is_reached_at_home(tmp_path: Path) -> None:
    (tmp_path / "stellwerk.yml").write_text("server: {host: 0.0.0.0}\n")
    assert find_address(Asked(), {}, tmp_path).host == "127.0.0.1"
    (tmp_path / "stellwerk.yml").write_text("server: {host: '::'}\n")
    assert find_address(Asked(), {}, tmp_path).url == "http://[::1]:8765"


@pytest.mark.parametrize("text", ["", "[", "- 1", "server: 3", "server: {port: x}", "server: {port: 99999}", "\0"])
def test_a_config_that_makes_no_sense_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "stellwerk.yml").write_text(text)
    assert find_address(Asked(), {}, tmp_path).url == "http://127.0.0.1:8765"


def test_a_config_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(Quit, match="there is no file"):
        find_address(Asked(config=Path("none.yml")), {}, tmp_path)


def test_the_flag_wins_over_the_environment_and_that_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "stellwerk.yml").write_text("server: {port: 9000}\n")
    environ = {"STELLWERK_URL": "https://there.example/base/"}
    assert find_address(Asked(), environ, tmp_path).url == "https://there.example:443/base"
    assert find_address(Asked(url="here.example:81"), environ, tmp_path).url == "http://here.example:81"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y", "http://u:p@x", "http://x/?q", "http://x y"])
def test_a_url_that_is_none_is_wrong_usage(tmp_path: Path, url: str) -> None:
    with pytest.raises(Quit) as caught:
        find_address(Asked(url=url), {}, tmp_path)
    assert caught.value.exit_code == 2


def test_tokens_are_looked_for_in_their_order(tmp_path: Path) -> None:
    folder = tmp_path / ".stellwerk"
    folder.mkdir()
    (folder / "admin-token").write_text("from-folder\n")
    (tmp_path / "token").write_text("from-file\n")
    environ = {"STELLWERK_TOKEN": "from-token", "STELLWERK_ADMIN_TOKEN": "from-admin"}
    assert find_address(Asked(token_file=Path("token")), environ, tmp_path).token == "from-file"
    assert find_address(Asked(), environ, tmp_path).token == "from-token"
    assert find_address(Asked(), {"STELLWERK_ADMIN_TOKEN": "from-admin"}, tmp_path).token == "from-admin"
    assert find_address(Asked(), {"STELLWERK_TOKEN": ""}, tmp_path).token == "from-folder"


def test_the_data_folder_is_named_by_flag_environment_or_config(tmp_path: Path) -> None:
    for name in ("flag", "environ", "config", "sub/.stellwerk"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "admin-token").write_text(name)
    assert find_address(Asked(data=Path("flag")), {"STELLWERK_DATA": "environ"}, tmp_path).token == "flag"
    assert find_address(Asked(), {"STELLWERK_DATA": "environ"}, tmp_path).token == "environ"
    (tmp_path / "stellwerk.yml").write_text("data: config\n")
    assert find_address(Asked(), {}, tmp_path).token == "config"
    (tmp_path / "sub" / "stellwerk.yml").write_text("server: {}\n")
    assert find_address(Asked(config=Path("sub/stellwerk.yml")), {}, tmp_path).token == "sub/.stellwerk"


def test_a_token_in_the_settings_is_the_hosts_own(tmp_path: Path) -> None:
    (tmp_path / "stellwerk.yml").write_text("server: {admin_token: swk_set-by-hand}\n")
    (tmp_path / ".stellwerk").mkdir()
    (tmp_path / ".stellwerk" / "admin-token").write_text("stale")
    assert find_address(Asked(), {}, tmp_path).token == "swk_set-by-hand"
    assert find_address(Asked(data=Path(".stellwerk")), {}, tmp_path).token == "stale"


def test_a_host_with_a_certificate_is_asked_by_tls(tmp_path: Path) -> None:
    (tmp_path / "stellwerk.yml").write_text("server: {host: here.example, tls: {cert: c.pem, key: k.pem}}\n")
    assert find_address(Asked(), {}, tmp_path).url == "https://here.example:8765"


def test_the_environment_moves_the_port_for_host_and_command_alike(tmp_path: Path) -> None:
    (tmp_path / "stellwerk.yml").write_text("server: {port: 9000}\n")
    assert find_address(Asked(), {"STELLWERK_PORT": "9002"}, tmp_path).port == 9002


def test_no_token_at_all_is_the_hosts_to_judge(tmp_path: Path) -> None:
    address = find_address(Asked(), {}, tmp_path)
    assert address.token is None
    assert "admin-token" in address.token_from


@pytest.mark.parametrize("text", ["", "two words", "a\nb", "ä", "x" * 5_000])
def test_what_cannot_be_a_token_is_never_sent(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(Quit, match="does not hold a token"):
        find_address(Asked(token_file=Path("token")), {}, tmp_path)


def test_the_token_is_sent_as_a_bearer(nowhere: CommandLine, alone: Path, host: ScriptedHost) -> None:
    host.on("GET", "/api/counts", Told({"counts": {"ready": 2}, "event_id": 1}))
    (alone / "stellwerk.yml").write_text(f"server: {{port: {host.port}}}\n")
    (alone / ".stellwerk").mkdir()
    (alone / ".stellwerk" / "admin-token").write_text("swk_admin\n")
    assert nowhere("counts").exit_code == 0
    assert host.asked[0].headers["authorization"] == "Bearer swk_admin"


def test_a_missing_token_is_explained(nowhere: CommandLine, host: ScriptedHost) -> None:
    host.on("GET", "/api/counts", Told({"message": "who are you?"}, status=401))
    ran = nowhere("counts", "--url", host.url)
    assert ran.exit_code == 4
    assert "no token was found" in ran.err
    assert "--token-file" in ran.err


def test_no_option_takes_a_token_itself(nowhere: CommandLine) -> None:
    assert nowhere("runs", "--token", "swk_x").exit_code == 2
