"""docs/cookbook.md: every command by machine and goal is one that the server takes, and fits the machine's memory."""

from __future__ import annotations

import argparse
import json
import shlex

import pytest

from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.memory.forecast import Forecast, forecast
from nvfp4_sgl.memory.setting import Setting
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from tests.packaging.checkout import ROOT
from tests.packaging.test_documented_commands import server_parser
from tests.support.documents import table
from tests.support.released import FLASH, PRO, config_json

PAGE = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
GOALS = ("low latency", "throughput", "long context")
MACHINES = {
    "one H200": ("sm_90a", 1, 139, ("eight layers",)),
    "two H200s": ("sm_90a", 2, 139, ("Flash",)),
    "four H200s": ("sm_90a", 4, 139, ("Flash",)),
    "eight H200s": ("sm_90a", 8, 139, ("Flash", "Pro")),
    "eight B200s": ("sm_100a", 8, 178, ("Flash", "Pro")),
}
"""By the mark of a table: target, GPUs, GiB that are free on each, and models."""
MODELS = {"eight layers": FLASH | {"num_hidden_layers": 8}, "Flash": FLASH, "Pro": PRO}
RECIPES = [(machine, goal, command) for machine in MACHINES for goal, command in table(PAGE, machine)]


def arguments(command: str) -> argparse.Namespace:
    words = shlex.split(command.strip("`"))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    return server_parser().parse_args(words[3:])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verified]:
    """Each of :data:`MODELS` in full NVFP4."""
    found: dict[str, Verified] = {}
    for name, fields in MODELS.items():
        folder = tmp_path_factory.mktemp("model")
        ratios = [*fields["compress_ratios"][: fields["num_hidden_layers"]], 0]
        (folder / "config.json").write_text(json.dumps(config_json(fields, compress_ratios=ratios)))
        found[name] = verify_dummy(folder)
    return found


def forecast_of(given: argparse.Namespace, target: str, free: int, model: Verified) -> Forecast:
    setting = Setting(
        ranks=given.tp_size,
        requests=given.max_running_requests,
        context=given.context_length,
        chunk=given.chunked_prefill_size or 8192,
        dtype_bytes=2,
        row_bytes=None,
        swa_ratio=0.1,
        fraction=given.mem_fraction_static or 0.85,
        window_by_ratio=False,
    )
    return forecast(model, target, setting, free << 30)


def test_every_machine_has_one_command_a_goal() -> None:
    assert [(machine, goal) for machine, goal, _ in RECIPES] == [(one, goal) for one in MACHINES for goal in GOALS]
    assert len({command for *_, command in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize(("machine", "goal", "command"), RECIPES, ids=[f"{one}, {goal}" for one, goal, _ in RECIPES])
def test_a_command_fits_its_machine(machine: str, goal: str, command: str, models: dict[str, Verified]) -> None:
    target, gpus, free, served = MACHINES[machine]
    given = arguments(command)
    assert given.tp_size == gpus
    assert goal != "long context" or given.context_length == FLASH["max_position_embeddings"]
    for name in served:
        found = forecast_of(given, target, free, models[name])
        assert found.problem() is None
        assert found.tokens is not None and found.tokens >= given.context_length


def test_two_servers_share_eight_gpus(models: dict[str, Verified]) -> None:
    """Each has GPUs of its own, all of them together, and a port."""
    block = PAGE.partition("<!-- two servers -->\n```bash\n")[2].partition("\n```")[0].splitlines()
    gpus, ports = [], []
    for line in block:
        variable, _, command = line.partition(" ")
        name, _, devices = variable.partition("=")
        given = arguments(command)
        assert name == "CUDA_VISIBLE_DEVICES" and len(devices.split(",")) == given.tp_size
        gpus += devices.split(",")
        ports.append(given.port)
        assert forecast_of(given, "sm_90a", 139, models["Flash"]).problem() is None
    assert gpus == [str(gpu) for gpu in range(8)] and len({*ports}) == 2


def test_a_command_that_does_not_fit_would_be_seen(models: dict[str, Verified]) -> None:
    (command,) = (command for machine, goal, command in RECIPES if (machine, goal) == ("two H200s", "low latency"))
    assert forecast_of(arguments(command), "sm_90a", 80, models["Flash"]).problem() is not None
