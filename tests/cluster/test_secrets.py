"""Keys stay out of what an application is deployed with, and each ingress reads them itself."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from logsteer_server.settings import ConfigurationError, Settings
from tests.conftest import fake_model

if importlib.util.find_spec("ray") is None:
    pytest.skip("SKIPPED BECAUSE RAY IS ABSENT: install the extra `ray`", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own, of pydantic
    from ray import cloudpickle

    from logsteer_server.cluster.application import ClusterArguments, build, read_settings
    from logsteer_server.cluster.secrets import Secrets, take_secrets

SECRET = "ls-only-for-those-who-know"
KNOWN = "a-name-of-the-host.example"
OTHER = "ls-to-scrape-with"


def write(directory: Path, **settings: Any) -> ClusterArguments:
    path = directory / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [fake_model()], **settings}))
    return ClusterArguments(config=path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", ["file", "environment"])
def test_no_key_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    if given == "file":
        arguments = write(tmp_path, api_key=SECRET, metrics_key=OTHER, allowed_hosts=[KNOWN])
    else:
        arguments = write(tmp_path, allowed_hosts=[KNOWN])
        monkeypatch.setenv("LOGSTEER_API_KEY", SECRET)
        monkeypatch.setenv("LOGSTEER_METRICS_KEY", OTHER)
    settings = read_settings(arguments)
    assert (settings.api_key, settings.metrics_key) == (SECRET, OTHER)
    pickled = cloudpickle.dumps(build(arguments))
    assert KNOWN.encode() in pickled, "the settings are in there"
    assert SECRET.encode() not in pickled
    assert OTHER.encode() not in pickled


def test_an_ingress_reads_its_keys_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = write(tmp_path, api_key=SECRET)
    bare, names = take_secrets(read_settings(arguments))
    assert (bare.api_key, names) == (None, ("api_key",))
    assert Secrets(names, arguments.config).add(bare).api_key == SECRET
    elsewhere = Secrets(names, tmp_path / "absent.yaml")
    with pytest.raises(ConfigurationError, match="set LOGSTEER_API_KEY there") as caught:
        elsewhere.add(bare)
    assert SECRET not in str(caught.value)
    monkeypatch.setenv("LOGSTEER_API_KEY", OTHER)
    assert elsewhere.add(bare).api_key == OTHER


def test_settings_without_keys_are_left_as_they_are(tmp_path: Path) -> None:
    settings = Settings(models=[{"id": "a", "path": "b"}], key_file=tmp_path / "keys.json")
    bare, names = take_secrets(settings)
    assert (bare, names) == (settings, ())
    assert Secrets(names, tmp_path / "absent.yaml").add(bare) is bare


def test_a_token_among_engines_arguments_is_refused(tmp_path: Path) -> None:
    model = fake_model(hf_token=SECRET)
    with pytest.raises(ConfigurationError, match="HF_TOKEN in the environment") as caught:
        read_settings(write(tmp_path, models=[model], api_key="k"))
    assert SECRET not in str(caught.value)


def test_a_key_among_the_stores_options_is_refused(tmp_path: Path) -> None:
    store = {"store_url": "s3://bucket", "store_options": {"secret": SECRET, "anon": False}}
    with pytest.raises(ConfigurationError, match="secret would stand") as caught:
        read_settings(write(tmp_path, **store))
    assert SECRET not in str(caught.value)
