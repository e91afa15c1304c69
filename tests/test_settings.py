from __future__ import annotations

from pathlib import Path

import pytest

from weightyard.errors import BadSetting
from weightyard.opening import chosen_url, open_yard
from weightyard.settings import Settings, unknown_variables, variables
from weightyard.storage.opening import folder_of, open_store


def test_the_environment_says_where_the_store_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEIGHTYARD_STORE", str(tmp_path / "here"))
    assert open_store().url == (tmp_path / "here").as_uri()
    assert open_store(str(tmp_path / "argument")).url.endswith("argument"), "an argument goes first"


def test_without_any_setting_the_store_is_a_folder_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WEIGHTYARD_STORE", raising=False)
    monkeypatch.setenv("WEIGHTYARD_HOME", str(tmp_path))
    assert open_store().url == (tmp_path / "store").as_uri()


def test_hadoops_own_variables_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop/conf")
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    monkeypatch.setenv("WEIGHTYARD_WEBHDFS", "http://nn1:9870,http://nn2:9870")
    settings = Settings()
    assert settings.hadoop_conf_dir == Path("/etc/hadoop/conf")
    assert settings.hdfs_user == "alice"
    assert settings.webhdfs == ("http://nn1:9870", "http://nn2:9870")


def test_namenodes_may_be_listed_with_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTYARD_WEBHDFS", " http://nn1:9870, https://nn2/gateway/x ,")
    monkeypatch.setenv("WEIGHTYARD_PROXY_ADDRESSES", "10.0.0.1, 10.1.0.0/16")
    settings = Settings()
    assert settings.webhdfs == ("http://nn1:9870", "https://nn2/gateway/x")
    assert settings.proxy_addresses == ("10.0.0.1", "10.1.0.0/16")


@pytest.mark.parametrize(
    "address",
    ["nn:9870", "hdfs://nn:8020", "http://", "http://nn:99999", "http://[nn", "http://n;m"],
)
def test_what_is_no_address_of_a_namenode_is_refused_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("WEIGHTYARD_WEBHDFS", address)
    with pytest.raises(BadSetting, match=r"^WEIGHTYARD_WEBHDFS: "):
        Settings()


@pytest.mark.parametrize("url", ["s3://bucket/x", "http://host/", "file://host/folder"])
def test_a_url_that_is_no_store_says_what_to_use(url: str) -> None:
    with pytest.raises(BadSetting, match=r"file://"):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "hdfs:/models",
        "HTTP:/host",
        " hdfs://nn/models",
        "file:/models",
        "file://",
        "file:///models#1",
        "file:///models?1",
        "file:///models%00",
        "file://[x/models",
        "hdfs://[x/models",
        "~nobody-of-this-name/models",
        "models\0",
    ],
)
def test_no_folder_is_made_up_for_a_url_that_means_another_one_or_none(url: str) -> None:
    with pytest.raises(BadSetting):
        open_store(url)
    with pytest.raises(BadSetting):
        open_yard(url, settings=Settings())


@pytest.mark.parametrize("name", ["a#1", "a?1", "50%", "%23", "a\tb", "Käfer", "\udcff", "a:b"])
def test_the_url_of_a_folder_opens_that_folder_again(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    url = open_store(str(folder)).url
    assert url.startswith("file:///")
    assert folder_of(open_store(url)) == folder


@pytest.mark.parametrize("url", ["http://[x", "http://host:port", "https://host:99999/"])
def test_a_service_that_cannot_be_is_refused_by_its_url(url: str) -> None:
    with pytest.raises(BadSetting, match="service URL"):
        open_yard(url, settings=Settings())


def test_a_setting_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTYARD_DEADLINE_S", "soon")
    with pytest.raises(BadSetting, match=r"^WEIGHTYARD_DEADLINE_S: "):
        Settings()
    monkeypatch.delenv("WEIGHTYARD_DEADLINE_S")
    monkeypatch.setenv("WEIGHTYARD_CACHE_MAX", "much")
    with pytest.raises(BadSetting, match=r"^WEIGHTYARD_CACHE_MAX: 'much' is no amount of bytes"):
        Settings()
    monkeypatch.delenv("WEIGHTYARD_CACHE_MAX")
    monkeypatch.setenv("WEIGHTYARD_LOCATION", "rack-b")
    with pytest.raises(BadSetting, match=r"^WEIGHTYARD_LOCATION: 'rack-b' .* such as /rack-b"):
        Settings()


def test_every_variable_is_in_the_docs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
    assert [name for name in sorted(variables()) if f"`{name}`" not in page] == []


def test_a_variable_that_is_no_setting_is_known_with_what_it_may_have_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert unknown_variables() == {}
    monkeypatch.setenv("WEIGHTYARD_TOKNE", "x")
    monkeypatch.setenv("WEIGHTYARD_REF", "told by weightyard follow")
    monkeypatch.setenv("WEIGHTYARD_TOKEN", "x")
    assert unknown_variables() == {"WEIGHTYARD_TOKNE": "WEIGHTYARD_TOKEN"}


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().deadline_s = 1.0  # type: ignore[misc]


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = Settings()
    for name in Settings.model_fields:
        monkeypatch.setenv(f"WEIGHTYARD_{name.upper()}", "")
    monkeypatch.setenv("HADOOP_CONF_DIR", "")
    assert Settings() == plain.model_copy(update={"hadoop_conf_dir": None})
    monkeypatch.setenv("WEIGHTYARD_STORE", str(tmp_path))
    assert chosen_url(None, Settings()) == str(tmp_path), "and an empty URL does not clash"


def test_a_rate_is_written_as_other_sizes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().max_rate is None
    monkeypatch.setenv("WEIGHTYARD_MAX_RATE", "200M")
    assert Settings().max_rate == 200 << 20
    for wrong in ("fast", "0"):
        monkeypatch.setenv("WEIGHTYARD_MAX_RATE", wrong)
        with pytest.raises(BadSetting, match="MAX_RATE"):
            Settings()


PATHS = (
    "WEIGHTYARD_HOME", "WEIGHTYARD_CACHE", "WEIGHTYARD_SPOOL", "WEIGHTYARD_HADOOP_CONF_DIR",
    "HADOOP_HOME", "ARROW_LIBHDFS_DIR", "JAVA_HOME",
)  # fmt: skip


@pytest.mark.parametrize("variable", PATHS)
def test_a_folder_of_a_user_that_is_not_is_refused_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "~nobody-of-this-name/x")
    with pytest.raises(BadSetting, match=f"^{variable}: .*nobody-of-this-name"):
        Settings()


def test_a_folder_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("WEIGHTYARD_SPOOL", "~/spool")
    assert Settings(cache=Path("~/cache")).cache == Path("/home/alice/cache")
    assert Settings().spool == Path("/home/alice/spool")
