"""A model as vLLM itself builds it, by its own loader from a folder and by ours from a ref.

A program, `python vllm_program.py FOLDER REF MEETING`: vLLM keeps its groups and its platform for
as long as a process lives. MEETING is a file where its one rank meets nobody. It says how many
parameters are equal.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

# vLLM as it is on PyPI is for accelerators and finds no platform without one. Models are built and
# filled by the same code; the kernels that would run them are not there. Others import it by name.
vllm.platforms._current_platform = CpuPlatform()

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402


def configured(model: str, load_format: str) -> VllmConfig:
    arguments = EngineArgs(
        model=model,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
    )
    return arguments.create_engine_config()


def loaded(config: VllmConfig) -> dict[str, torch.Tensor]:
    loader: Any = get_model_loader(config.load_config)
    with set_current_vllm_config(config):
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    return dict(model.named_parameters())


def main(folder: str, ref: str, meeting: str) -> None:
    load_general_plugins()
    theirs, ours = configured(folder, "safetensors"), configured(ref, "weightyard")
    with set_current_vllm_config(theirs):
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    expected, found = loaded(theirs), loaded(ours)
    assert expected.keys() == found.keys()
    different = [name for name, one in expected.items() if not torch.equal(one, found[name])]
    assert not different, different
    print(f"{ours.model_config.served_model_name}: {len(found)} parameters are equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
