"""Every field of config.json that anybody's configuration class has is in the one table, and is held to it."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl import cli, config_fields, doctor
from nvfp4_sgl.checkpoint import values
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.config_fields import (
    ELSEWHERE,
    FIELDS,
    FIXED,
    NO_EFFECT,
    OF_DSPARK,
    READ,
    REPEATS,
    YARN,
    Integer,
    unknown_fields,
)
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import BASE
from tests.packaging.checkout import ROOT
from tests.support.damage import change_json, replace_bytes
from tests.support.released import FLASH, PRO, config_json

PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def of_sglang(module: str) -> ast.Module:
    """A module of SGLang, parsed: importing it takes half a minute."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    file = Path(found.origin).parent.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def fields_of(module: str, name: str) -> set[str]:
    """Names that the body of a class of SGLang gives values or types."""
    found = next(node for node in of_sglang(module).body if isinstance(node, ast.ClassDef) and node.name == name)
    annotated = {node.target for node in found.body if isinstance(node, ast.AnnAssign)}
    assigned = {target for node in found.body if isinstance(node, ast.Assign) for target in node.targets}
    return {target.id for target in annotated | assigned if isinstance(target, ast.Name)}


def names_of_others() -> dict[str, set[str]]:
    """Names of fields by where they come from."""
    from transformers import DeepseekV3Config, PreTrainedConfig
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    lengths = next(
        node.value
        for node in of_sglang("srt.utils.hf_transformers.common").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTEXT_LENGTH_KEYS"
    )
    example = json.loads((ROOT / "examples" / "small_model" / "config.json").read_text(encoding="utf-8"))
    return {
        "transformers": {one.name for one in dataclasses.fields(DeepseekV4Config)},
        "transformers' aliases": set(DeepseekV4Config.attribute_map),
        "transformers' output": set(DeepseekV4Config().to_dict()),
        "transformers' base": {one.name for one in dataclasses.fields(PreTrainedConfig)},
        "transformers' V3": set(DeepseekV3Config().to_dict()),
        "SGLang": fields_of("srt.configs.deepseek_v4", "DeepSeekV4Config"),
        "SGLang's V4.1": fields_of("srt.configs.deepseek_v41", "DeepseekV41Config"),
        "SGLang's lengths": set(ast.literal_eval(lengths)),
        "tiny": set(BASE),
        "Flash": set(FLASH),
        "Pro": set(PRO),
        "example": set(example),
    }


def test_every_field_of_every_class_is_in_the_table() -> None:
    for source, names in names_of_others().items():
        assert names
        assert not unknown_fields(dict.fromkeys(names)), f"{source}: say in config_fields what becomes of them"
    parts: tuple[dict[str, Any], ...] = (READ, FIXED, REPEATS, ELSEWHERE, OF_DSPARK, NO_EFFECT)
    assert len(FIELDS) == sum(map(len, parts)), "a field in two parts"
    assert all(rule.reason for rule in FIELDS.values())
    assert {one.name for one in dataclasses.fields(ModelConfig)} - {"yarn", "layer_kinds"} == set(READ)
    found = unknown_fields({"dspark_block_size": 5, "dspark_new": 5, "hidden_size": 1, "new_gate": True})
    assert found == ["dspark_new", "new_gate"]


def test_the_page_prints_the_tables() -> None:
    for name, table in (("config", config_fields.table()), ("values", values.table())):
        found = PAGE.partition(f"<!-- {name} bounds -->\n")[2].partition("\n<!-- end -->")[0]
        module = "nvfp4_sgl.config_fields" if name == "config" else "nvfp4_sgl.checkpoint.values"
        assert found == table, f"print it: python -c 'from {module} import table; print(table())'"


def refused(field: str, base: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(config_json(base, **changes))
    message = str(caught.value)
    assert f"'{field}'" in message and "expected" in message and "found" in message and len(message) < 1000, message
    return message


@pytest.mark.parametrize("field", [*READ, *YARN])
def test_a_number_beyond_its_bounds_is_refused(field: str) -> None:
    rule = READ.get(field) or YARN[field]
    step: Any = 1 if isinstance(rule, Integer) else 0
    beyond = [rule.low - step, rule.high + step] if step else [math.nextafter(rule.low, 0), rule.high * (1 + 1e-9)]
    assert rule.takes(rule.low) and rule.takes(rule.high)
    released = FLASH["rope_scaling"][field] if field in YARN else FLASH[field]
    assert rule.takes(released) and released * 8 <= rule.high
    wrong: list[Any] = [*beyond, None, str(released), True, 10**400, -1e-45, -1, [released], {}]
    for value in wrong:
        changes = {"rope_scaling": FLASH["rope_scaling"] | {field: value}} if field in YARN else {field: value}
        refused(field, FLASH, **changes)


WRONG: dict[str, list[Any]] = {"model_type": ["deepseek_v41", "deepseek_v3", None], "norm_topk_prob": [1, None]}


@pytest.mark.parametrize("field", FIXED)
def test_a_fixed_field_with_another_value_is_refused(field: str) -> None:
    for value in FIXED[field].values:
        ModelConfig.from_dict(config_json(FLASH, **{field: value}))
    right = FIXED[field].values[0]
    others = [{"a": 1}, "x", 7, [3], not right if isinstance(right, bool) else True]
    for value in [*WRONG.get(field, []), *others]:
        refused(field, FLASH, **{field: value})


@pytest.mark.parametrize("field", REPEATS)
def test_a_repeated_field_must_agree(field: str) -> None:
    for base in (FLASH, PRO):
        right = REPEATS[field].expected(ModelConfig.from_dict(base))
        ModelConfig.from_dict(config_json(base, **{field: right}))
        ModelConfig.from_dict(config_json(base, **{field: None}))
        wrong: Any
        if isinstance(right, list):
            wrong = [right[-1]] * len(right)
        elif isinstance(right, dict):
            wrong = {**right, "heavily_compressed_attention": 64}
        else:
            wrong = right * 2
        for value in (wrong, "x", True):
            refused(field, base, **{field: value})


@pytest.mark.parametrize("field", ["model_type", "architectures", *sorted(set(READ) - {"num_nextn_predict_layers"})])
def test_what_must_be_there(field: str) -> None:
    raw = copy.deepcopy(FLASH)
    raw.pop(field)
    with pytest.raises(ConfigError, match=f"'{field}'.*found nothing"):
        ModelConfig.from_dict(raw)


_YARN = FLASH["rope_scaling"]
_MAIN = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125}
_COMPRESS = {**_MAIN, **_YARN, "rope_type": "yarn", "rope_theta": 160000, "attention_factor": 1.0}
AGREEING: dict[str, dict[str, Any]] = {
    "as transformers writes them": {"rope_parameters": {"main": _MAIN, "compress": _COMPRESS}},
    "flat": {"rope_parameters": {**_YARN, "rope_type": "yarn"}},
    "null": {"rope_parameters": None},
    "mscale of one": {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "both types": {"rope_scaling": _YARN | {"rope_type": "yarn", "rope_theta": 10000}},
    "all groups": {"n_group": 8, "topk_group": 8},
    "one group": {"n_group": 1},
    "no groups": {"n_group": None, "topk_group": None},
    "three drafts": {"layer_types": None, "dspark_block_size": 5, "compress_ratios": [*FLASH["compress_ratios"], 0, 0]},
}
CONTRADICTING: dict[str, tuple[str, dict[str, Any]]] = {
    "another base": ("rope_parameters", {"rope_parameters": {"main": _MAIN | {"rope_theta": 5e5}}}),
    "main with YaRN": ("rope_parameters", {"rope_parameters": {"main": _MAIN | {"rope_type": "yarn"}}}),
    "compressed without YaRN": ("rope_parameters", {"rope_parameters": {"compress": _MAIN}}),
    "another factor": ("rope_parameters", {"rope_parameters": {"compress": _COMPRESS | {"factor": 40}}}),
    "an attention factor": (
        "rope_parameters",
        {"rope_parameters": {"compress": _COMPRESS | {"attention_factor": 2}}},
    ),
    "flat and linear": ("rope_parameters", {"rope_parameters": {"rope_type": "linear", "factor": 16}}),
    "flat without a type": ("rope_parameters", {"rope_parameters": {"rope_theta": 10000}}),
    "empty": ("rope_parameters", {"rope_parameters": {}}),
    "a list": ("rope_parameters", {"rope_parameters": []}),
    "parts beside parts": ("rope_parameters", {"rope_parameters": {"main": _MAIN, "rope_theta": 10000}}),
    "a part that is a number": ("rope_parameters", {"rope_parameters": {"main": 5}}),
    "two types that differ": ("rope_scaling", {"rope_scaling": _YARN | {"rope_type": "linear"}}),
    "no type": ("rope_scaling", {"rope_scaling": {n: v for n, v in _YARN.items() if n != "type"}}),
    "a scale of attention": ("rope_scaling", {"rope_scaling": _YARN | {"mscale": 0.7}}),
    "a factor of attention": ("rope_scaling", {"rope_scaling": _YARN | {"attention_factor": 2}}),
    "bounds that are not rounded": ("rope_scaling", {"rope_scaling": _YARN | {"truncate": False}}),
    "a third base": ("rope_scaling", {"rope_scaling": _YARN | {"rope_theta": 5e5}}),
    "llama3's field": ("rope_scaling", {"rope_scaling": _YARN | {"low_freq_factor": 1}}),
    "a long field": ("rope_scaling", {"rope_scaling": _YARN | {"x" * 10**6: 1}}),
    "a ramp that rises": ("rope_scaling", {"rope_scaling": _YARN | {"beta_slow": 32}}),
    "half of the groups": ("n_group", {"n_group": 8, "topk_group": 4}),
    "groups that are no number": ("n_group", {"n_group": "8", "topk_group": "8"}),
    "groups of one word": ("topk_group", {"topk_group": 4}),
    "ours second": ("architectures", {"architectures": ["LlamaForCausalLM", "DeepseekV4ForCausalLM"]}),
}


@pytest.mark.parametrize("name", AGREEING)
def test_what_says_the_same_is_read(name: str) -> None:
    ModelConfig.from_dict(config_json(FLASH, **AGREEING[name]))


@pytest.mark.parametrize("name", CONTRADICTING)
def test_what_contradicts_is_refused(name: str) -> None:
    field, changes = CONTRADICTING[name]
    refused(field, FLASH, **changes)


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fields") / "tiny"
    write_tiny(directory, "nvfp4-full", seed=2, num_hidden_layers=2, n_routed_experts=6)
    return directory


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "deepseek_v41"),
        ("rope_parameters", {"main": {"rope_theta": 5e5}}),
        ("partial_rotary_factor", 0.5),
        ("mlp_bias", True),
        ("n_group", 8),
        ("swiglu_limit", 1e-45),
        ("swiglu_limit", 0.25),  # kernels that quantise the result bound it by 0.2785
        ("swiglu_limit", 3e38),
        ("hc_sinkhorn_iters", 10**5),
        ("sliding_window", 10**9),
        ("hc_eps", 3e38),
        ("routed_scaling_factor", 3e38),
    ],
)
def test_inspect_doctor_and_server_refuse_alike(
    tiny_directory: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any
) -> None:
    from nvfp4_sgl.serving.arguments import served

    before = json.loads((tiny_directory / "config.json").read_text())
    change_json(tiny_directory / "config.json", lambda config: config.update({field: value}))
    try:
        with pytest.raises(ConfigError, match=f"'{field}'") as caught:
            served(tiny_directory, None, {})
        assert cli.main(["inspect", str(tiny_directory)]) == 2
        assert str(caught.value) in capsys.readouterr().err.replace("\n", " ")
        assert f"checkpoint: {caught.value}" in doctor.examine(tiny_directory).problems
    finally:
        replace_bytes(tiny_directory / "config.json", json.dumps(before).encode())


def test_inspect_names_fields_that_are_not_read(tiny_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_json(tiny_directory / "config.json", lambda config: config.update(a_new_gate=True))
    try:
        assert verify(tiny_directory).config
        assert cli.main(["inspect", str(tiny_directory)]) == 0
        assert "note: config.json: field 'a_new_gate' is not known" in capsys.readouterr().out
        assert cli.main(["inspect", str(tiny_directory), "--json"]) == 0
        (note,) = json.loads(capsys.readouterr().out)["notes"]
        assert note["kind"] == "field-not-read" and note["tensor"] is None
    finally:
        change_json(tiny_directory / "config.json", lambda config: config.pop("a_new_gate"))
