"""Which tensors a load means."""

from __future__ import annotations

import json

import pytest

from weightyard.errors import NoSuchThing, Refused
from weightyard.format.dtypes import DType
from weightyard.format.manifest import FileEntry, Manifest, TensorEntry
from weightyard.loader.choosing import by_name, choose, fitting, index_needed, read_index


def _manifest(files: dict[str, list[str]], state: tuple[str, ...] = ()) -> Manifest:
    """Files by path, each with the names of its tensors."""
    entries = [FileEntry(path, 0, "plain", ()) for path in sorted(files)]
    tensors = [(name, None) for name in state]
    for number, entry in enumerate(entries):
        tensors += [(name, number) for name in sorted(files[entry.path])]
    listed = [TensorEntry(name, file, DType.U8, (0,), (), None) for name, file in tensors]
    return Manifest(1, 1 << 20, (), tuple(entries), tuple(listed))


def _chosen(manifest: Manifest, **asked: list[str]) -> list[str]:
    return [
        f"{'' if one.file is None else manifest.files[one.file].path}:{one.name}"
        for one in choose(manifest, **asked)
    ]


MODEL = {"model.safetensors": ["a", "b"], "adapter/model.safetensors": ["a"], "config.json": []}


def test_model_safetensors_is_meant_when_nothing_is_said() -> None:
    assert _chosen(_manifest(MODEL)) == ["model.safetensors:a", "model.safetensors:b"]


def test_the_only_file_with_tensors_is_meant_whatever_it_is_called() -> None:
    manifest = _manifest({"unet/weights.safetensors": ["a"], "config.json": []})
    assert _chosen(manifest) == ["unet/weights.safetensors:a"]


def test_a_state_dict_is_meant_before_files() -> None:
    assert _chosen(_manifest(MODEL, ("s",))) == [":s"]


def test_files_of_a_state_dict_which_has_none_are_refused_by_what_to_do() -> None:
    state = _manifest({}, ("s",))
    with pytest.raises(NoSuchThing, match="state dict's, in no file: leave files= out"):
        choose(state, files=["model.safetensors"])


def test_the_index_says_which_shards_are_meant() -> None:
    files = {
        "model-2.safetensors": ["b", "x"],
        "model-1.safetensors": ["a"],
        "old.safetensors": ["a"],
    }
    manifest = _manifest({**files, "model.safetensors.index.json": []})
    entry = index_needed(manifest, None)
    assert entry is not None
    assert entry.path == "model.safetensors.index.json"
    index = read_index(
        json.dumps(
            {"metadata": {}, "weight_map": {"b": "model-2.safetensors", "a": "model-1.safetensors"}}
        ).encode()
    )
    found = choose(manifest, index=index)
    assert [(one.name, manifest.files[one.file or 0].path) for one in found] == [
        ("a", "model-1.safetensors"),
        ("b", "model-2.safetensors"),
    ]


def test_no_index_is_looked_at_where_the_files_are_named_or_clear() -> None:
    index = {"model.safetensors.index.json": []}
    assert index_needed(_manifest({**MODEL, **index}), None) is None
    assert index_needed(_manifest({"a.safetensors": ["a"], **index}), ["a*"]) is None
    assert index_needed(_manifest(dict(index), ("s",)), None) is None


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"weight_map": {"a": 1}}', b"\xff", b"[" * 9999]
)
def test_an_index_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(Refused, match="name the files"):
        read_index(content)


def test_an_index_that_names_what_is_not_there_is_refused() -> None:
    manifest = _manifest({"model-1.safetensors": ["a"]})
    with pytest.raises(NoSuchThing, match=r"'b' is in 'model-1\.safetensors', where it is not"):
        choose(manifest, index={"b": "model-1.safetensors"})


@pytest.mark.parametrize("odd", ["model.safetensors", "unet/weights.safetensors"])
@pytest.mark.parametrize("more", [{}, {"model.safetensors.index.json": []}])
def test_no_other_file_is_loaded_in_place_of_one_that_was_kept_as_plain_bytes(
    odd: str, more: dict[str, list[str]]
) -> None:
    manifest = _manifest({odd: [], "adapter_model.safetensors": ["a"], **more})
    assert odd != "model.safetensors" or index_needed(manifest, None) is None
    with pytest.raises(NoSuchThing, match=rf"{odd}: kept as plain bytes.*files=.*adapter_model"):
        choose(manifest)
    named = _chosen(manifest, files=["adapter_model.safetensors"])
    assert named == ["adapter_model.safetensors:a"]


def test_several_files_without_a_model_among_them_are_listed() -> None:
    manifest = _manifest({"a.safetensors": ["x"], "b.safetensors": ["x"]})
    with pytest.raises(NoSuchThing, match=r"files= .* a\.safetensors, b\.safetensors"):
        choose(manifest)


def test_a_version_without_tensors_says_what_it_has() -> None:
    with pytest.raises(NoSuchThing, match=r"no tensors.*config\.json.*pull"):
        choose(_manifest({"config.json": []}))


def test_files_are_chosen_by_path_or_pattern() -> None:
    manifest = _manifest(MODEL)
    assert _chosen(manifest, files=["adapter/*"]) == ["adapter/model.safetensors:a"]
    with pytest.raises(NoSuchThing, match=r"'c\*'.*model\.safetensors"):
        choose(manifest, files=["c*"])


def test_a_name_in_two_of_the_files_is_refused_with_both() -> None:
    with pytest.raises(Refused, match=r"tensor a is in adapter/model.safetensors and in model"):
        choose(_manifest(MODEL), files=["*"])


def test_tensors_come_layer_by_layer() -> None:
    names = [
        "layers.10.w",
        "layers.2.w",
        "layers.2.b",
        "embed",
        "layers.0.w",
        "layers.02.w",
        "norm",
    ]
    assert [one.name for one in choose(_manifest({}, tuple(names)))] == [
        "embed", "layers.0.w", "layers.2.b", "layers.02.w", "layers.2.w", "layers.10.w", "norm",
    ]  # fmt: skip


NAMES = ["embed", "experts.0.w", "experts.1.w", "experts.2.w", "odd[0].w"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["embed"], ["embed"]),
        (["experts.*"], ["experts.0.w", "experts.1.w", "experts.2.w"]),
        (["!experts.*"], ["embed", "odd[0].w"]),
        (["!experts.*", "experts.1.*"], ["embed", "experts.1.w", "odd[0].w"]),
        (["experts.*", "!*.2.*"], ["experts.0.w", "experts.1.w"]),
        (["odd[0].w"], ["odd[0].w"]),
        ([], []),
    ],
)
def test_the_last_pattern_that_fits_a_name_decides(
    patterns: list[str], expected: list[str]
) -> None:
    assert fitting(NAMES, patterns) == expected


def test_what_is_a_name_means_that_tensor_and_not_those_it_would_fit_as_a_pattern() -> None:
    both = ["w0", "w[0]"]
    assert fitting(both, ["w[0]"]) == ["w[0]"]
    assert fitting(both, ["!w[0]"]) == ["w0"]
    assert fitting(both, ["w[0-9]"]) == ["w0"]
    assert fitting(["w0"], ["w[0]"]) == ["w0"]
    assert by_name(both, {"w[0]": 1}) == {"w[0]": 1}
    files = _manifest({"a0.safetensors": ["x"], "a[0].safetensors": ["x"]})
    assert _chosen(files, files=["a[0].safetensors"]) == ["a[0].safetensors:x"]


def test_a_pattern_that_fits_nothing_is_said() -> None:
    with pytest.raises(NoSuchThing, match=r"'expert.*embed"):
        fitting(NAMES, ["expert.*"])
    with pytest.raises(NoSuchThing, match="to slice fits 'x'"):
        by_name(NAMES, {"x": 1})


def test_what_is_said_for_a_name_goes_before_what_is_said_for_a_pattern() -> None:
    assert by_name(NAMES, {"*": 1, "experts.*": 2, "experts.1.w": 3}) == {
        **dict.fromkeys(NAMES, 1),
        "experts.1.w": 3,
    }
