"""The truth tables of flags, variables, profile and defaults (cases D38 and D41)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kestrel_cli import options
from kestrel_cli.settings import Setting, Settings
from kestrel_cuda.config import KvDtype, Quant
from kestrel_cuda.errors import SettingError


def settle(flags: Mapping[str, str | bool] | None = None, /, **variables: str) -> Settings:
    return options.settle(options.RUN, flags or {}, variables)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "mine.toml"
    file.write_text('keep = 7\nbackend = "cpu"\nlazy = true\nmax_new_tokens = 5\n', encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("variable", "backend", "source"),
    [
        (None, "auto", "default"),
        ("", "auto", "default"),
        ("0", "cpu", "VLLM_CUDA_INFER"),
        ("1", "cuda", "VLLM_CUDA_INFER"),
    ],
)
def test_vllm_cuda_infer(variable: str | None, backend: str, source: str) -> None:
    settings = settle() if variable is None else settle(VLLM_CUDA_INFER=variable)
    assert (settings[options.BACKEND], settings.source(options.BACKEND)) == (backend, source)


@pytest.mark.parametrize("variable", ["true", "00", " ", " 1", "2", "-1", "cpu", "cuda", "auto", "off"])
def test_vllm_cuda_infer_takes_nothing_else(variable: str) -> None:
    with pytest.raises(SettingError) as raised:
        settle(VLLM_CUDA_INFER=variable)
    assert str(raised.value).startswith(f"VLLM_CUDA_INFER holds {variable!r}; it takes 0 (CPU backend) or 1 ")


@pytest.mark.parametrize(
    ("variable", "keep", "source"),
    [
        (None, None, "default"),
        ("", None, "default"),
        ("  ", None, "default"),
        ("0", 0, "VLLM_CUDA_STREAM"),
        ("1", 1, "VLLM_CUDA_STREAM"),
        ("4", 4, "VLLM_CUDA_STREAM"),
        (" 4 ", 4, "VLLM_CUDA_STREAM"),
        ("99", 99, "VLLM_CUDA_STREAM"),
    ],
)
def test_vllm_cuda_stream(variable: str | None, keep: int | None, source: str) -> None:
    settings = settle() if variable is None else settle(VLLM_CUDA_STREAM=variable)
    assert (settings[options.KEEP], settings.source(options.KEEP)) == (keep, source)
    assert options.run_config(settings).keep == keep


@pytest.mark.parametrize("variable", ["-2", "1.5", "abc", "auto", "off", "+4", "4 4", "0x4", "٤"])
def test_vllm_cuda_stream_takes_nothing_else(variable: str) -> None:
    with pytest.raises(SettingError) as raised:
        settle(VLLM_CUDA_STREAM=variable)
    assert str(raised.value).startswith(f"VLLM_CUDA_STREAM holds {variable!r}; it takes a whole number of layers")


@pytest.mark.parametrize("name", ["keep", "max_new_tokens", "device", "ids", "vram", "cache_budget", "prefill_chunk"])
@pytest.mark.parametrize("num_digits", [400, 5000])
def test_a_number_beyond_all_measure_is_refused_briefly(name: str, num_digits: int) -> None:
    with pytest.raises(SettingError) as raised:
        settle({name: "9" * num_digits})
    message = str(raised.value)
    assert message.startswith(f"--{name.replace('_', '-')} holds '9999")
    assert f"... ({num_digits} characters), which " in message
    assert len(message) < 300


def test_the_largest_numbers_are_told_apart() -> None:
    assert settle({"max_new_tokens": "9" * 18})[options.MAX_NEW_TOKENS] == 10**18 - 1
    with pytest.raises(SettingError, match="which has more than 18 digits; it takes a whole number of at least 1"):
        settle({"max_new_tokens": "9" * 19})


@pytest.mark.parametrize(("variable", "layers"), [("", 0), ("0", 0), (" ", 0), ("4", 4), (" 12 ", 12)])
def test_vllm_vqf_stream(variable: str, layers: int) -> None:
    settings = settle({"strip_cache": "packed"}, VLLM_VQF_STREAM=variable)
    assert settings[options.HOST_KEEP] == layers
    assert options.run_config(settings).host_keep == layers


@pytest.mark.parametrize("variable", ["-1", "1.5", "abc", "auto"])
def test_vllm_vqf_stream_takes_nothing_else(variable: str) -> None:
    with pytest.raises(SettingError, match=r"VLLM_VQF_STREAM holds .*; it takes a whole number of layers to hold"):
        settle(VLLM_VQF_STREAM=variable)


def test_host_residency_needs_a_strip_cache() -> None:
    with pytest.raises(SettingError, match=r"^--host-keep 2 .* needs --strip-cache DIR"):
        settle({"host_keep": "2"})
    with pytest.raises(SettingError, match=r"^VLLM_VQF_STREAM 2 .* needs --strip-cache DIR"):
        settle(VLLM_VQF_STREAM="2")


@pytest.mark.parametrize(
    ("flag", "keep", "shown"), [("0", 0, "off"), ("off", 0, "off"), ("auto", None, "auto"), ("1", 1, 1), ("99", 99, 99)]
)
def test_keep(flag: str, keep: int | None, shown: object) -> None:
    settings = settle({"keep": flag})
    assert settings[options.KEEP] == keep
    assert settings.as_json()["keep"] == {"value": shown, "source": "flag"}


@pytest.mark.parametrize("flag", ["-1", "1.5", "", " ", "all", " 4", "OFF", "none"])
def test_keep_out_of_range(flag: str) -> None:
    with pytest.raises(SettingError) as raised:
        settle({"keep": flag})
    assert str(raised.value) == f"--keep holds {flag!r}; it takes a whole number of layers, off (or 0) or auto"


def test_flag_over_variable_over_profile_over_default(profile: str) -> None:
    keep = options.KEEP
    chosen: list[tuple[int | None, str]] = []
    for settings in (
        settle({"keep": "3", "profile": profile}, VLLM_CUDA_STREAM="5"),
        settle({"profile": profile}, VLLM_CUDA_STREAM="5"),
        settle({"profile": profile}, VLLM_CUDA_STREAM=" "),
        settle(),
    ):
        chosen.append((settings[keep], settings.source(keep)))
    assert chosen == [(3, "flag"), (5, "VLLM_CUDA_STREAM"), (7, f"profile {profile}"), (None, "default")]


@pytest.mark.parametrize(
    ("name", "flag", "variable"),
    [
        ("keep", "3", "VLLM_CUDA_STREAM"),
        ("backend", "cpu", "VLLM_CUDA_INFER"),
        ("ctx", "64", "KESTREL_CUDA_CTX"),
        ("quant", "none", "KESTREL_CUDA_QUANT"),
        ("vram", "1GiB", "KESTREL_CUDA_VRAM"),
    ],
)
def test_a_variable_that_a_flag_overrides_may_hold_anything(name: str, flag: str, variable: str) -> None:
    assert settle({name: flag}, **{variable: "garbage"}).as_json()[name]["source"] == "flag"


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        (options.MODEL, "/models/x", Path("/models/x")),
        (options.MAX_NEW_TOKENS, "32", 32),
        (options.CTX, "64", 64),
        (options.QUANT, "q4_0", Quant.Q4_0),
        (options.KV, "f32", KvDtype.F32),
        (options.KV, "q8", KvDtype.Q8),
        (options.POLICY, "past-only", "past-only"),
        (options.VRAM, "6GiB", 6 << 30),
        (options.CACHE_BUDGET, "seeds", "seeds"),
        (options.CACHE_BUDGET, "1GiB", 1 << 30),
        (options.PREFILL_CHUNK, "64", 64),
        (options.DEVICE, "1", 1),
        (options.PROMPT_FILE, "p.txt", Path("p.txt")),
        (options.SYSTEM, " ", " "),
        (options.MESSAGES, "m.json", Path("m.json")),
        (options.IMAGE, "a:b, c.png", ("a:b, c.png",)),
        (options.VIDEO, "clip", ("clip",)),
        (options.FPS, "0.5", 0.5),
        (options.MIN_PIXELS, "1", 1),
        (options.MAX_PIXELS, "4096", 4096),
        (options.IMAGE_TOKENS, "64", 64),
        (options.IDS, "1, 2,3", (1, 2, 3)),
        (options.LOGITS, "l.npz", Path("l.npz")),
        (options.EXPECT, "7", (7,)),
        (options.TABLE, "all", "all"),
    ],
)
def test_every_option_with_a_value_has_its_variable(setting: Setting[Any], text: str, value: object) -> None:
    variable = f"KESTREL_CUDA_{setting.name.upper()}"
    settings = settle(**{variable: text})
    assert (settings[setting], settings.source(setting)) == (value, variable)
    assert settle({setting.name: text})[setting] == value
    assert settle(**{variable: ""}).source(setting) == "default"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_new_tokens", "0"),
        ("max_new_tokens", "1e3"),
        ("ctx", "-5"),
        ("quant", "q5_0"),
        ("quant", "Q8_0"),
        ("kv", "bf16"),
        ("policy", "sideways"),
        ("vram", "much"),
        ("cache_budget", "half"),
        ("prefill_chunk", "0"),
        ("backend", "gpu"),
        ("device", "-1"),
        ("fps", "24fps"),
        ("fps", "1000001"),
        ("fps", "0.0009"),
        ("image_tokens", "0"),
        ("image", "a\0b"),
        ("ids", "1,,2"),
        ("ids", "-1"),
        ("expect", ""),
        ("model", ""),
        ("table", "first"),
    ],
)
def test_a_flag_out_of_range_names_itself_and_what_it_takes(name: str, text: str) -> None:
    with pytest.raises(SettingError) as raised:
        settle({name: text})
    assert str(raised.value).startswith(f"--{name.replace('_', '-')} holds {text!r}; it takes ")


def test_a_flag_that_may_be_repeated_is_read_one_by_one() -> None:
    settings = options.settle(options.RUN, {"image": ("a.png", "https://b/c.png", "a.png")}, {})
    assert settings[options.IMAGE] == ("a.png", "https://b/c.png", "a.png")
    assert settings.as_json()["image"] == {"value": ("a.png", "https://b/c.png", "a.png"), "source": "flag"}
    assert settle().as_json()["image"] == {"value": None, "source": "default"}
    with pytest.raises(SettingError, match=r"^--image holds ' '; it takes the path of a picture$"):
        options.settle(options.RUN, {"image": ("a.png", " ")}, {})


@pytest.mark.parametrize("line", ['keep = "many"', "keep = 1.5", "keep = true", 'lazy = "yes"', "lazy = 1", "ctx = -1"])
def test_a_profile_out_of_range_names_itself(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(line, encoding="utf-8")
    with pytest.raises(SettingError, match=rf"profile .*bad\.toml: {line.split()[0]} holds .*; it takes "):
        settle({"profile": str(file)})


def test_the_profile_may_be_named_by_its_variable(profile: str) -> None:
    settings = settle(KESTREL_CUDA_PROFILE=profile)
    assert (settings[options.MAX_NEW_TOKENS], settings[options.LAZY]) == (5, True)


def test_a_switch_of_the_profile_can_be_turned_off(profile: str) -> None:
    settings = settle({"profile": profile, "lazy": False})
    assert (settings[options.LAZY], settings.source(options.LAZY)) == (False, "flag")


@pytest.mark.parametrize(
    "flags",
    [
        {"prompt": "hi", "prompt_file": "p"},
        {"prompt": "hi", "ids": "1"},
        {"prompt": "hi", "messages": "m"},
        {"prompt_file": "p", "ids": "1"},
        {"prompt_file": "p", "messages": "m"},
        {"messages": "m", "ids": "1"},
        {"raw": True, "system": "s"},
        {"raw": True, "messages": "m"},
        {"raw": True, "ids": "1"},
        {"ids": "1", "system": "s"},
        {"messages": "m", "system": "s"},
        {"quiet": True, "table": "all"},
    ],
)
def test_contradictory_flags_are_refused(flags: dict[str, str | bool]) -> None:
    with pytest.raises(SettingError, match="contradict each other: "):
        settle(flags)


def test_a_contradiction_names_both_sides() -> None:
    with pytest.raises(SettingError) as raised:
        settle({"prompt": "hi", "prompt_file": "p"})
    assert str(raised.value) == "PROMPT and --prompt-file contradict each other: a run has one prompt"
    with pytest.raises(SettingError, match="KESTREL_CUDA_MESSAGES and KESTREL_CUDA_SYSTEM contradict each other"):
        settle(KESTREL_CUDA_MESSAGES="m", KESTREL_CUDA_SYSTEM="s")


@pytest.mark.parametrize(
    ("flags", "variable"),
    [
        ({"prompt": "hi"}, "KESTREL_CUDA_IDS"),
        ({"raw": True}, "KESTREL_CUDA_SYSTEM"),
        ({"ids": "1"}, "KESTREL_CUDA_SYSTEM"),
    ],
)
def test_a_variable_that_contradicts_a_flag_is_not_read(flags: dict[str, str | bool], variable: str) -> None:
    name = variable.removeprefix("KESTREL_CUDA_").lower()
    settings = settle(flags, **{variable: "garbage"})
    assert settings.as_json()[name] == {"value": None, "source": "default"}
    (note,) = settings.notes
    assert note.startswith(f"{variable} is not read, since {'PROMPT' if 'prompt' in flags else '--'}")


@pytest.mark.parametrize("source", [{"flags": {"backend": "cpu"}}, {"VLLM_CUDA_INFER": "0"}])
def test_a_gpu_cannot_be_chosen_for_the_cpu_backend(source: dict[str, Any]) -> None:
    flags = {"device": "1", **source.pop("flags", {})}
    with pytest.raises(SettingError, match=r"--device chooses a GPU, and (--backend|VLLM_CUDA_INFER) asks for the CPU"):
        settle(flags, **source)


def test_more_ids_than_tokens_cannot_be_expected() -> None:
    with pytest.raises(SettingError, match="--expect lists 3 ids, but at most 2 are chosen; raise --max-new-tokens"):
        settle({"expect": "1,2,3", "max_new_tokens": "2"})


def test_nothing_but_exact_names_is_read() -> None:
    settings = settle(VLLM_CUDA_STREAM_X="4", vllm_cuda_stream="4", VLLM_USE_V1="1", KESTREL_CUDA_KEEPS="x")
    assert {setting["source"] for setting in settings.as_json().values()} == {"default"}
    assert settings.warnings == []


@pytest.mark.parametrize(
    ("variable", "instead"),
    [
        ("KESTREL_CUDA_KEEP", "the variable of --keep is VLLM_CUDA_STREAM"),
        ("KESTREL_CUDA_BACKEND", "the variable of --backend is VLLM_CUDA_INFER"),
        ("KESTREL_CUDA_HOST_KEEP", "the variable of --host-keep is VLLM_VQF_STREAM"),
        ("KESTREL_CUDA_JSON", "there is only the flag --json"),
        ("KESTREL_CUDA_QUANTS", "did you mean KESTREL_CUDA_QUANT?"),
        ("KESTREL_CUDA_PROMPT", "did you mean KESTREL_CUDA_PROMPT_FILE?"),
        ("KESTREL_CUDA_WINGS", "no option has that name"),
    ],
)
def test_a_variable_of_ours_that_is_not_read_is_said(variable: str, instead: str) -> None:
    assert settle(**{variable: "1"}).warnings == [f"{variable} is not read; {instead}"]
    assert settle(**{variable: ""}).warnings == []


@pytest.mark.parametrize("text", ["folder/", "folder/.", "folder/..", ".", "..", "/"])
@pytest.mark.parametrize("name", ["logits", "prompt_file", "messages"])
def test_a_file_is_not_a_folder(name: str, text: str) -> None:
    with pytest.raises(SettingError, match="it takes the path of a file"):
        settle({name: text})


def test_logits_go_to_no_stream() -> None:
    with pytest.raises(SettingError, match="--logits holds '-'; it takes the path of a file"):
        settle({"logits": "-"})


def test_a_message_of_the_engine_says_where_a_flag_came_from(profile: str) -> None:
    settings = settle({"quant": "q4_0", "profile": profile}, KESTREL_CUDA_VRAM="1KiB")
    assert settings.with_labels("--vram 1 KiB is little; --quant q4_0 needs less") == (
        "--vram 1 KiB is little; --quant q4_0 needs less (--vram comes from KESTREL_CUDA_VRAM)"
    )
    assert settings.with_labels("--keep 7") == f"--keep 7 (--keep comes from profile {profile}: keep)"
    for text in ("--ctx 5", "--vram-x", "--quant q4_0", settings.with_labels("--vram")):
        assert settings.with_labels(text) == text
    with pytest.raises(SettingError, match=r"^--vram \(--vram comes from KESTREL_CUDA_VRAM\)$"):  # noqa: SIM117
        with settings.naming_sources():
            raise SettingError("--vram")


@pytest.mark.parametrize(("name", "path"), [("MODEL", "/nope"), ("IMAGE", "/nope.png"), ("PROMPT_FILE", "/nope.txt")])
def test_an_error_about_a_path_says_where_that_came_from(name: str, path: str) -> None:
    settings = settle({"ids": "1,2"} if name != "PROMPT_FILE" else {}, **{f"KESTREL_CUDA_{name}": path})
    flag = f"--{name.lower().replace('_', '-')}"
    for text, ending in (
        (f"{path}/config.json is cut off", f" ({flag} comes from KESTREL_CUDA_{name})"),
        ("/another is cut off", ""),
        (f"{path}2: is cut off", ""),
        (f"/another was read from {path}", ""),
    ):
        with pytest.raises(SettingError) as caught, settings.naming_sources():
            raise SettingError(text)
        assert str(caught.value) == text + ending
    assert settings.with_labels(f"{path} was read") == f"{path} was read", "of an error alone"


def test_the_report_speaks_plain_json() -> None:
    shown = settle({"quant": "q4_0", "ids": "1,2", "vram": "1KiB"}, KESTREL_CUDA_MODEL="/m").as_json()
    assert shown["quant"]["value"] == "q4_0"
    assert type(shown["quant"]["value"]) is str
    assert shown["ids"]["value"] == (1, 2)
    assert shown["vram"]["value"] == 1024
    assert shown["model"] == {"value": "/m", "source": "KESTREL_CUDA_MODEL"}
    assert "prompt" not in shown


def test_the_engine_is_told_what_was_chosen() -> None:
    config = options.run_config(
        settle({"model": "/m", "kv": "f32", "keep": "off", "lazy": True, "cache_budget": "seeds", "vram": "1GiB"})
    )
    assert (config.model, config.kv, config.keep, config.lazy) == (Path("/m"), KvDtype.F32, 0, True)
    assert (config.cache_budget, config.vram_bytes, config.policy) == ("seeds", 1 << 30, "pinned")


def test_by_default_the_embedded_model_is_used() -> None:
    assert options.run_config(settle()).model.parts[-3:] == ("kestrel_cuda", "data", "kestrel-tiny")
