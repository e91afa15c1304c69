"""vLLM's load format `weightyard`: its model name is a ref, its weights are streamed from the yard.

vLLM finds `register` by the entry point `vllm.general_plugins`, in each of its processes. Nothing
of vLLM or torch is imported before that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from weightyard.errors import BadSetting, DoesNotFit
from weightyard.loader.batches import AHEAD_BYTES

if TYPE_CHECKING:
    import torch

    from weightyard.yard import Yard

LOAD_FORMAT = "weightyard"

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
"""What vLLM's configuration and tokenizer do not need."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `--model-loader-extra-config` may say."""

    yard: str | None = None
    """The yard's URL; None: as the environment says."""
    files: tuple[str, ...] | None = None
    verify: Literal["fast", "full"] = "fast"
    cache: bool = True
    ahead_bytes: int = AHEAD_BYTES

    @classmethod
    def parse(cls, said: Any) -> Options:
        """Raises BadSetting."""
        import msgspec

        fields = cls.__dataclass_fields__
        if not isinstance(said, Mapping) or (unknown := sorted(set(said) - set(fields))):
            what = "no object" if not isinstance(said, Mapping) else f"no key {unknown[0]!r:.80}"
            raise BadSetting(
                f"--model-loader-extra-config of load format {LOAD_FORMAT}: {what}; it is an "
                f"object of {', '.join(fields)}"
            )
        try:
            return msgspec.convert(dict(said), cls)
        except msgspec.ValidationError as why:
            raise BadSetting(f"--model-loader-extra-config: {why}") from None

    @contextmanager
    def opened(self) -> Iterator[Yard]:
        import weightyard

        with weightyard.open(self.yard) as yard:
            yield yard


class Loading:
    """What vLLM asks of a model loader; `register` makes it one, by adding vLLM's base class.

    vLLM makes one with a load configuration in every worker, and calls `load_weights` with a model
    whose parameters are there already, on their device. `download_model` is for those who want the
    bytes on the node beforehand.
    """

    def __init__(self, load_config: Any) -> None:
        """Raises BadSetting."""
        super().__init__(load_config)  # type: ignore[call-arg]  # vLLM's base class
        self._options = Options.parse(load_config.model_loader_extra_config or {})

    def download_model(self, model_config: Any) -> None:
        """Make this node's snapshot of the version, which is then mapped."""
        with self._options.opened() as yard:
            yard.snapshot(_ref_of(model_config))

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Stream the version's tensors into a model: vLLM takes of each what this rank needs.

        Raises DoesNotFit if parameters were left as they were.
        """
        options = self._options
        with options.opened() as yard:
            tensors = yard.stream(
                _ref_of(model_config),
                files=options.files,
                verify=options.verify,
                cache=options.cache,
                ahead_bytes=options.ahead_bytes,
            )
            loaded = model.load_weights(tensors)  # type: ignore[operator]  # vLLM's models have it
        # Models that do not tell what they took, or whose quantization makes parameters of its
        # own, cannot be judged from here; neither can vLLM.
        if loaded is not None and model_config.quantization is None:
            _require_all(model, loaded)


def register() -> None:
    """Make the load format known to vLLM; may be called again. For vLLM's plug-in entry point."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    made = type("WeightyardModelLoader", (Loading, BaseModelLoader), {"__doc__": Loading.__doc__})
    model_loader.register_model_loader(LOAD_FORMAT)(made)
    create = EngineArgs.create_engine_config
    if getattr(create, "knows_refs", False):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        find_model(self)
        return create(self, *args, **kwargs)

    create_engine_config.knows_refs = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def find_model(arguments: Any) -> None:
    """If vLLM's engine arguments name a ref, have them name a folder with its configuration.

    vLLM reads configuration and tokenizer from `model`, a folder or a name on a hub, before any
    loader is asked; `model_weights` is where it keeps what the user wrote if that is neither. The
    version is settled here: an alias may move before the last worker has started.
    Raises NoSuchThing, Retryable.
    """
    is_ours = arguments.load_format == LOAD_FORMAT and not arguments.model_weights
    if not is_ours or os.path.isdir(arguments.model):
        return
    ref = arguments.model
    with Options.parse(arguments.model_loader_extra_config or {}).opened() as yard:
        version = yard.resolve(ref)
        folder = str(yard.snapshot(version.ref, exclude=WEIGHT_FILES))
    arguments.model_weights = version.ref
    arguments.model = folder
    if arguments.tokenizer in (None, ref):
        arguments.tokenizer = folder
    if arguments.served_model_name is None:
        arguments.served_model_name = ref


def _ref_of(model_config: Any) -> str:
    ref: str = model_config.model_weights or model_config.model
    return ref


def _require_all(model: torch.nn.Module, loaded: set[str]) -> None:
    """Layers with a quantization method may have parameters that are in no file."""
    missing = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if getattr(module, "quant_method", None) is None
        for name, _ in module.named_parameters(recurse=False)
    ]
    if missing := [name for name in missing if name not in loaded]:
        some = ", ".join(missing[:5])
        raise DoesNotFit(
            f"the version has nothing for {len(missing)} parameters, such as {some}", missing, []
        )
