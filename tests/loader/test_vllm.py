"""vLLM itself, which `make test-vllm` installs in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import weightyard

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="make test-vllm installs vLLM")


def test_a_model_that_vllm_builds_from_a_ref_is_the_one_it_builds_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    for name in ("home", "cache", "store"):
        monkeypatch.setenv(f"WEIGHTYARD_{name.upper()}", str(tmp_path / name))
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    folder = tmp_path / "model"
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    with weightyard.open() as yard:
        yard.push(folder, "team/qwen", alias="prod")

    program = Path(__file__).with_name("vllm_program.py")
    arguments = [str(folder), "team/qwen@prod", str(tmp_path / "meeting")]
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # qkv and gate_up are one parameter each in vLLM, and tensors of their own in the version.
    assert done.stdout.splitlines()[-1] == "team/qwen@prod: 17 parameters are equal"
