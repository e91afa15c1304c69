from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightyard.errors import InvalidName
from weightyard.names import AliasName, BlockId, Digest, FilePath, ModelName, PackId, Ref, Step

HOSTILE_PARTS = [
    "",
    ".",
    "..",
    "...",
    ".hidden",
    "-rf",
    "a/b",
    "a\\b",
    "a b",
    "a\x00b",
    "a\nb",
    "a%2e%2e",
    "%2e%2e",
    "a;b",
    "a#b",
    "a?b",
    "a:b",
    "a@b",
    "a..b",
    "a--b",
    "name.git",
    "x" * 97,
    "tëam",
    "te\u0301am",
    "tеam",  # a Cyrillic look-alike
    "team\u202e",
    "team\u200b",
    "ａ",  # full-width
    "team.",
    "team_",
]


@pytest.mark.parametrize("part", HOSTILE_PARTS)
def test_hostile_model_names_are_refused(part: str) -> None:
    with pytest.raises(InvalidName):
        ModelName("team", part)
    with pytest.raises(InvalidName):
        ModelName(part, "bert")
    with pytest.raises(InvalidName):
        Ref.parse(f"{part}/bert@prod")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../up",
        "a/../b",
        "a/./b",
        "a//b",
        "a/",
        "a\\b",
        "C:/x",
        "c:x",
        "\\\\host\\share",
        "a\x00",
        "a\x7f",
        "a\u202eb",
        "a\ud800",
        "nul",
        "a/COM1.txt",
        "a./b",
        "a /b",
        "e\u0301",
        "a/" * 600 + "a",
        "x" * 256,
    ],
)
def test_a_path_that_could_leave_its_folder_or_not_exist_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(InvalidName):
        FilePath(path)


@pytest.mark.parametrize(
    "path", ["config.json", "a/b-1_2.bin", "模型/权重.safetensors", ".gitattributes"]
)
def test_ordinary_paths_are_kept_as_they_are(path: str) -> None:
    assert str(FilePath(path)) == path


LOOK_ALIKES = {
    "a letter of another script": "m\u043edel.safetensors",
    "the same of Greek": "m\u03bfdel.safetensors",
    "in a folder": "weights/\u0430dapter/w.bin",
    "a space that is none": "my\u00a0model.bin",
    "another one": "my\u2003model.bin",
    "a letter that shows nothing": "model\u3164.bin",
    "a mark that shows nothing": "model\u034f.bin",
    "a variation": "model\ufe0f.bin",
    "wide letters": "\uff4d\uff4f\uff44\uff45\uff4c.bin",
    "a ligature": "\ufb01les.bin",
    "what looks like a slash": "a\u2215b.bin",
}


@pytest.mark.parametrize("path", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_a_new_path_that_looks_like_another_is_refused(path: str) -> None:
    for parse in (FilePath.of_new, FilePath.from_url):
        with pytest.raises(InvalidName, match="could be taken for another one"):
            parse(path)
    assert FilePath(path).text == path, "but what was published before can be read"


@pytest.mark.parametrize(
    "path",
    [
        *("config.json", "模型/权重-v2.safetensors", "модель_v2/веса.bin", "μοντέλο-large.bin"),
        *("größe.bin", "نموذج.bin", "모델/가중치.bin", "モデルmodel.bin"),
        *("हिन्दी.txt", "my model.bin"),
    ],
)
def test_a_new_path_with_one_script_in_each_word_is_fine(path: str) -> None:
    assert FilePath.of_new(path) == FilePath.from_url(path) == FilePath(path)


@given(st.text(max_size=40))
def test_a_parsed_path_never_leaves_its_folder(text: str) -> None:
    try:
        path = FilePath(text)
    except InvalidName:
        return
    assert ".." not in path.parts
    assert not text.startswith("/")


@pytest.mark.parametrize(
    "alias",
    [
        *("latest", "v3", "v0", "v00012", "deadbeef", "a" * 64, "Prod", "1st", "a-"),
        *("step-0", "step-1200", "step-007", "step-" + "9" * 59),
    ],
)
def test_an_alias_that_reads_as_a_version_is_refused(alias: str) -> None:
    with pytest.raises(InvalidName):
        AliasName(alias)


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("team/bert", None),
        ("team/bert@latest", None),
        ("team/bert@v3", 3),
        ("team/bert@prod", AliasName("prod")),
        ("team/bert@step-0", Step(0)),
        ("team/bert@step-1200", Step(1200)),
        (f"team/bert@step-{2**53}", Step(2**53)),
        ("team/bert@step", AliasName("step")),
        ("team/bert@step-one", AliasName("step-one")),
        ("team/bert@" + "0a" * 32, Digest("0a" * 32)),
    ],
)
def test_a_ref_says_which_version_is_meant(text: str, selector: object) -> None:
    ref = Ref.parse(text)
    assert (ref.model, ref.selector) == (ModelName("team", "bert"), selector)
    assert Ref.parse(str(ref)) == ref


@pytest.mark.parametrize(
    "text",
    ["bert", "team/bert@v0", "team/bert@v03", "team/bert@", "a/b/c", "team/bert@x@y"]
    + [f"team/bert@step-{step}" for step in ("", "007", "٣", "-1-", 2**53 + 1)]
    + ["team/bert@step-" + "9" * 5000, "team/bert@Step-3", "team/bert@step-3/..", "@step-3"],
)
def test_a_ref_that_does_not_parse_says_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidName):
        Ref.parse(text)


@pytest.mark.parametrize("digits", [8, 12, 63])
def test_who_gives_the_beginning_of_a_digest_is_told_where_all_of_it_is(digits: int) -> None:
    for digest in ("0" * 64, "ab" * 32):
        with pytest.raises(InvalidName, match=f"64 hex digits, this one {digits}; .*show"):
            Ref.parse(f"team/bert@{digest[:digits]}")


@pytest.mark.parametrize(
    "text", ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64, "٠" * 64, "../" + "0" * 61]
)
def test_ids_are_lower_case_hex_of_one_length(text: str) -> None:
    with pytest.raises(InvalidName):
        BlockId(text)


def test_ids_of_different_kinds_are_different() -> None:
    assert BlockId("00" * 32) != Digest("00" * 32)
    assert PackId.of(PackId("ab" * 16).raw) == PackId("ab" * 16)


@pytest.mark.parametrize("number", [-1, 2**53 + 1, 10**400])
def test_a_step_is_a_number_every_language_keeps(number: int) -> None:
    with pytest.raises(InvalidName):
        Step(number)
