"""The load format for vLLM, against vLLM's interface: its own where it is installed, else as told
here by its signatures of version 0.32."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loader_world import BERT, noise, saved, yard_in

from weightyard.errors import BadSetting, DoesNotFit, NoSuchThing
from weightyard.loader.vllm_plugin import find_model
from weightyard.yard import Yard

ROOT = Path(__file__).parents[2]

INTERFACE = {
    "vllm/__init__.py": "",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
from dataclasses import dataclass, field

@dataclass
class EngineArgs:
    model: str = "Qwen/Qwen3-0.6B"
    model_weights: str = ""
    served_model_name: str | list[str] | None = None
    tokenizer: str | None = None
    load_format: str = "auto"
    model_loader_extra_config: dict = field(default_factory=dict)

    def create_engine_config(self, usage_context=None, headless=False):
        return self.model, self.model_weights
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": """
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

_LOADERS = {}

def register_model_loader(load_format):
    def register(loader):
        if not issubclass(loader, BaseModelLoader):
            raise ValueError(loader)
        _LOADERS[load_format] = loader
        return loader
    return register

def get_model_loader(load_config):
    return _LOADERS[load_config.load_format](load_config)
""",
    "vllm/model_executor/model_loader/base_loader.py": """
from abc import ABC, abstractmethod

class BaseModelLoader(ABC):
    def __init__(self, load_config):
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config):
        raise NotImplementedError

    @abstractmethod
    def load_weights(self, model, model_config):
        raise NotImplementedError
""",
}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM with the plug-in registered, as its own start does it."""
    is_real = find_spec("vllm") is not None
    if not is_real:
        for path, text in INTERFACE.items():
            file = tmp_path / "interface" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / "interface"))
    entry().load()()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm" and not is_real]:
        del sys.modules[name]


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    """A model with its configuration, in the yard the environment names."""
    monkeypatch.setenv("WEIGHTYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WEIGHTYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WEIGHTYARD_STORE", str(tmp_path / "store"))
    folder = tmp_path / "bert"
    saved(folder / "model.safetensors", {"up.weight": noise(64, 32), "norm.weight": noise(32)})
    (folder / "config.json").write_text('{"architectures": ["Bert"]}')
    with yard_in(tmp_path) as yard:
        yard.push(folder, BERT, alias="prod")
        yield yard


def entry() -> EntryPoint:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (found,) = declared["vllm.general_plugins"].items()
    return EntryPoint(*found, group="vllm.general_plugins")


class Served(torch.nn.Module):
    """A model as vLLM has them: parameters that are there, and its own way to fill them."""

    def __init__(self, *, without: Iterable[str] = ()) -> None:
        super().__init__()
        self.up = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
        self.norm = torch.nn.RMSNorm(32, dtype=torch.bfloat16)
        self._without = set(without)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name not in self._without:
                own[name].data.copy_(tensor)
                loaded.add(name)
        return loaded


def loader(**extra: Any) -> Any:
    config = SimpleNamespace(load_format="weightyard", model_loader_extra_config=extra)
    module = importlib.import_module("vllm.model_executor.model_loader")
    return module.get_model_loader(config)


def of_ref(ref: str, **more: Any) -> Any:
    return SimpleNamespace(**{"model": ref, "model_weights": "", "quantization": None, **more})


def test_the_plug_in_can_be_imported_without_vllm_and_torch() -> None:
    script = "import sys, weightyard.loader.vllm_plugin; print({'vllm', 'torch'} & {*sys.modules})"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.stdout.strip() == "set()", shown.stderr


def test_vllm_gets_every_tensor_of_a_ref(vllm: None, yard: Yard) -> None:
    model = Served()
    loader().load_weights(model, of_ref(f"{BERT}@prod"))
    weights = yard.load(f"{BERT}@prod")
    assert torch.equal(model.up.weight, weights["up.weight"])
    assert torch.equal(model.norm.weight, weights["norm.weight"])


def test_a_parameter_left_as_it_was_is_an_error(vllm: None, yard: Yard) -> None:
    with pytest.raises(DoesNotFit, match=r"norm\.weight") as refused:
        loader().load_weights(Served(without=["norm.weight"]), of_ref(BERT))
    assert refused.value.missing == ("norm.weight",)


def test_a_quantized_model_is_left_to_vllm(vllm: None, yard: Yard) -> None:
    model = Served(without=["norm.weight"])
    loader().load_weights(model, of_ref(BERT, quantization="fp8"))


def test_a_download_leaves_a_snapshot_that_is_mapped_then(vllm: None, yard: Yard) -> None:
    loader().download_model(of_ref(BERT))
    assert yard.load(BERT).report.from_snapshot


def test_a_misspelt_option_is_refused_before_anything_is_read(vllm: None) -> None:
    with pytest.raises(BadSetting, match=r"'verfy'; it is an object of yard, files, verify"):
        loader(verfy="full")
    with pytest.raises(BadSetting, match="verify"):
        loader(verify="never")


def test_the_yard_can_be_named_beside_the_ref(
    vllm: None, yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTYARD_STORE", str(tmp_path / "another"))
    with pytest.raises(NoSuchThing):
        loader().load_weights(Served(), of_ref(BERT))
    loader(yard=str(tmp_path / "store")).load_weights(Served(), of_ref(BERT))


def engine_arguments(model: str, **more: Any) -> Any:
    module = importlib.import_module("vllm.engine.arg_utils")
    return module.EngineArgs(model=model, load_format="weightyard", **more)


def test_a_ref_as_model_name_becomes_a_folder_of_its_small_files(vllm: None, yard: Yard) -> None:
    arguments = engine_arguments(f"{BERT}@prod")
    find_model(arguments)
    assert [file.name for file in Path(arguments.model).iterdir()] == ["config.json"]
    assert arguments.tokenizer == arguments.model
    assert arguments.served_model_name == f"{BERT}@prod"


def test_every_worker_loads_the_version_the_engine_began_with(vllm: None, yard: Yard) -> None:
    arguments = engine_arguments(f"{BERT}@prod")
    find_model(arguments)
    before = yard.load(f"{BERT}@prod")
    yard.push({"up.weight": noise(64, 32, seed=1)}, BERT, alias="prod")
    model = Served()
    loader().load_weights(model, of_ref(arguments.model, model_weights=arguments.model_weights))
    assert torch.equal(model.up.weight, before["up.weight"])


def test_folders_and_other_load_formats_are_left_alone(vllm: None, yard: Yard) -> None:
    for arguments in (
        engine_arguments(str(ROOT)),
        SimpleNamespace(load_format="auto", model="a/b", model_weights=""),
    ):
        before = dict(vars(arguments))
        find_model(arguments)
        assert vars(arguments) == before


@pytest.mark.skipif(
    find_spec("vllm") is not None, reason="the real one asks for more than a folder"
)
def test_the_engine_is_configured_from_the_ref_however_often_plug_ins_are_loaded(
    vllm: None, yard: Yard
) -> None:
    entry().load()()
    model, weights = engine_arguments(f"{BERT}@prod").create_engine_config()
    assert (Path(model) / "config.json").is_file()
    assert weights == f"{BERT}@v1"
